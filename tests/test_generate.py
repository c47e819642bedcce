"""``kvsieve generate`` end to end: a tiny model with known sizes, and the small real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsieve.cli import main

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

LAYERS, KV_HEADS, HEAD_DIM, POSITIONS = 2, 2, 8, 64
PROMPT = " ".join(f"w{i % 29}" for i in range(41))
PAGES = ("--topk", "2", "--sink", "1", "--recent", "1", "--page-size", "4")
QUEST = ("--flow", "gqa_quest_sparse_attention")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, and a tokenizer of one word a token."""
    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=POSITIONS, initializer_range=0.5,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w31"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    return directory


def generate(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()  # what the test itself has loaded shows its progress, whichever test comes first
    with pytest.raises(SystemExit) as exit_:
        main(["generate", *arguments])
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = generate(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    result: dict[str, Any] = json.loads(out)
    return result


def dense_tokens(directory: Path, new: int) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa")
    ids = torch.tensor([[int(word[1:]) for word in PROMPT.split()]])
    return model.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :].tolist()


def test_bytes_per_step_are_those_counted_by_hand(tiny, capsys):
    result = as_json(capsys, "--model", str(tiny), *QUEST, *PAGES, "--prompt", PROMPT, "--max-new-tokens", "5")
    assert result["prompt_tokens"] == 41 and len(result["sparse"]["tokens"]) == 5
    token = LAYERS * KV_HEADS * 2 * HEAD_DIM * 4
    # Steps 2 to 5 attend 42, 43, 44 and 45 tokens: 3 full pages and what is in the last one.
    counted = result["sparse"]["bytes_per_step"]
    assert counted["kv"] == (14 + 15 + 16 + 13) * token / 4
    assert counted["dense"] == (42 + 43 + 44 + 45) * token / 4
    # Two fields of head_dim values for the 9, 9, 9 and 10 pages of the window, as many as one token's K and V.
    assert counted["fields"] == (9 + 9 + 9 + 10) * token / 4
    assert result["budget"] == {"topk": 2, "sink": 1, "recent": 1, "ratio": 0.0}
    assert (result["page_size"], result["dense"], result["parting"]) == (4, None, None)


def test_compare_runs_the_models_own_dense_attention(tiny, capsys):
    arguments = ("--model", str(tiny), *QUEST, "--prompt", PROMPT, "--max-new-tokens", "12", "--compare")
    expected = dense_tokens(tiny, 12)
    roomy = as_json(capsys, *arguments)
    assert roomy["dense"]["tokens"] == roomy["sparse"]["tokens"] == expected
    assert roomy["parting"] is None
    assert roomy["sparse"]["bytes_per_step"]["kv"] == roomy["sparse"]["bytes_per_step"]["dense"]
    tight = as_json(capsys, *arguments, "--topk", "0", "--sink", "0", "--recent", "1", "--page-size", "4")
    assert tight["dense"]["tokens"] == expected
    index = tight["parting"]["index"]
    assert tight["sparse"]["tokens"][:index] == expected[:index]
    assert tight["sparse"]["tokens"][index] != expected[index]
    assert tight["parting"]["dense"] == " ".join(f"w{token}" for token in expected[index:])
    assert tight["dense"]["tokens_per_second"] > 0 and tight["sparse"]["tokens_per_second"] > 0
    dense_everywhere = as_json(capsys, *arguments, *PAGES, "--skip-layers", "0-1")
    assert dense_everywhere["sparse"]["tokens"] == expected


def test_the_report_shows_texts_parting_and_bytes(tiny, capsys, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT + "\n")
    arguments = ("--model", str(tiny), *QUEST, "--prompt-file", str(prompt), "--max-new-tokens", "5")
    code, out, _ = generate(capsys, *arguments, *PAGES, "--compare")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert "prompt of 41 tokens; Quest(); budget: 1 sink + 2 chosen + 1 recent pages of 4" in " ".join(out.split())
    assert [f"w{token}" for token in dense_tokens(tiny, 5)] in lines
    row = next(line for line in lines if line[:1] == ["gqa_quest_sparse_attention"] and "MB" in line)
    assert row[-1] == f"{(14 + 15 + 16 + 13 + 9 + 9 + 9 + 10) / (42 + 43 + 44 + 45):.1%}"


def test_eviction_reads_its_capacity_and_says_so(tiny, capsys):
    arguments = ("--model", str(tiny), "--flow", "h2o", "--prompt", PROMPT, "--max-new-tokens", "12")
    evict = ("--retention", "evict", "--sink", "2", "--recent", "3")
    result = as_json(capsys, *arguments, *evict, "--capacity", "16", "--compare")
    assert result["retention"] == {"capacity": 16, "sink": 2, "recent": 3} and result["budget"] is None
    token = LAYERS * KV_HEADS * 2 * HEAD_DIM * 4
    assert result["sparse"]["bytes_per_step"] == {
        "kv": 17 * token, "fields": 0, "dense": sum(range(42, 53)) / 11 * token
    }  # fmt: skip
    assert result["dense"]["tokens"] == dense_tokens(tiny, 12) != result["sparse"]["tokens"]
    index = result["parting"]["index"]
    assert index > 0 and result["sparse"]["tokens"][:index] == result["dense"]["tokens"][:index]
    roomy = as_json(capsys, *arguments, *evict, "--capacity", "64", "--compare")
    assert roomy["sparse"]["tokens"] == roomy["dense"]["tokens"] and roomy["parting"] is None
    kept = as_json(capsys, *arguments, "--topk", "1", "--sink", "1", "--recent", "1", "--page-size", "4")
    assert kept["retention"] is None and kept["budget"]["topk"] == 1


def test_the_report_of_an_eviction(tiny, capsys):
    arguments = ("--model", str(tiny), "--flow", "h2o", "--prompt", PROMPT, "--max-new-tokens", "5")
    evict = ("--retention", "evict", "--sink", "2", "--recent", "3")
    code, out, err = generate(capsys, *arguments, *evict, "--capacity", "16", "--flow-arg", "decay=1.0")
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    assert "capacity: 2 sink + 11 chosen + 3 recent tokens, all others are evicted" in words
    assert "hence dense" not in words and f"{17 * 4 / (42 + 43 + 44 + 45):.1%}" in words
    code, out, _ = generate(capsys, *arguments, *evict, "--capacity", "45")
    assert code == 0
    assert "Every step was within the capacity, hence dense" in " ".join(out.split()) and "Lower --capacity" in out
    code, out, err = generate(capsys, *arguments, "--retention", "evict", "--capacity", "64", "--skip-layers", "0-1")
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert "expected no dense layers where tokens are evicted" in err


def test_wrong_requests_are_refused_in_one_line(tiny, capsys, tmp_path):
    model = ("--model", str(tiny), *QUEST)
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    for arguments, expected in (
        (("--prompt", PROMPT, "--max-new-tokens", "24"), "at most 64"),
        (("--prompt", PROMPT, "--max-new-tokens", "4", "--skip-layers", "5"), "[5]"),
        (("--prompt-file", str(latin)), "UTF-8"),
    ):
        code, out, err = generate(capsys, *model, *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.count("\n") == 1 and expected in err


def test_a_flow_file_made_by_new_runs_after_an_edit(tiny, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["new", "edited_flow", "--directory", str(tmp_path)])
    path = tmp_path / "edited_flow.py"
    text = path.read_text()
    edited = (
        text.replace('{"k_mean": k.mean(0)}', '{"k_max": k.amax(0), "k_min": k.amin(0)}')
        .replace(
            'seen = pages["k_mean"] @ q.T  # [W, G]',
            'q = q[:, None]; seen = torch.maximum(q * pages["k_max"], q * pages["k_min"]).sum(-1).T',
        )
        .replace("from kvsieve.flow", "import torch\nfrom kvsieve.flow")
    )
    path.write_text(edited)
    capsys.readouterr()
    common = ("--model", str(tiny), *PAGES, "--prompt", PROMPT, "--max-new-tokens", "12")
    own = as_json(capsys, *common, "--flow", f"{path}:EditedFlow", "--flow-arg", "peak=1")
    quest = as_json(capsys, *common, *QUEST)
    assert own["sparse"]["tokens"] == quest["sparse"]["tokens"]
    assert own["sparse"]["bytes_per_step"] == quest["sparse"]["bytes_per_step"]
    mean = as_json(capsys, *common, "--flow", f"{path}:EditedFlow", "--flow-arg", "peak=0")
    assert "peak=0" in mean["flow_arguments"]


def test_smollm2_under_its_budget_writes_what_dense_writes(capsys):
    result = as_json(
        capsys,
        "--model",
        "smollm2",
        *QUEST,
        "--prompt",
        "The capital of France is",
        "--max-new-tokens",
        "8",
        "--compare",
    )
    assert result["sparse"]["text"].startswith(" Paris.")
    assert result["sparse"]["tokens"] == result["dense"]["tokens"] and result["parting"] is None
    assert result["sparse"]["bytes_per_step"]["kv"] == sum(range(6, 13)) / 7 * 30 * 3 * 2 * 64 * 4
