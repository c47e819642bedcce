"""``kvsieve explain`` on a tiny model: the recorded trace beside the runtime's own selections, page, PNG, refusals."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsieve.budget import Budget
from kvsieve.cli.app import run
from kvsieve.evaluate.explain_page import explanation, lost_words
from kvsieve.evaluate.trace import Trace, record
from kvsieve.flow import build_flow

transformers = pytest.importorskip("transformers")
tiny_text = pytest.importorskip("tiny_text")

QUEST = "gqa_quest_sparse_attention"
PROMPT, FORCED, NEW, PAGE = 61, (70, 71, 72), 7, 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_text.save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> tuple[Any, Any]:
    import kvsieve.integrations.transformers  # noqa: F401

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="kvsieve").eval()
    return model, transformers.AutoTokenizer.from_pretrained(tiny)


@pytest.fixture(scope="module")
def trace(loaded: tuple[Any, Any]) -> Trace:
    prompt = loaded[1](tiny_text.words(40)).input_ids[:PROMPT]
    return record(*loaded, build_flow(QUEST), Budget(2, 1, 1), PAGE, prompt, FORCED, NEW)


def test_a_trace_is_what_the_runtime_did(loaded: tuple[Any, Any], trace: Trace) -> None:
    """Kept pages are those of a second run without a probe; masses add up; lost pages are the largest not kept."""
    from kvsieve.call import Call
    from kvsieve.integrations.transformers import SparseCache

    model, tokenizer = loaded
    ids = trace.ids
    assert tuple(ids[PROMPT : PROMPT + 3]) == FORCED and trace.pieces == [tokenizer.decode([one]) for one in ids]
    selections: list[torch.Tensor] = []
    plain = Call.attend

    def attend(call: Call, *args: Any, **options: Any) -> Any:
        result = plain(call, *args, **options)
        if result.selection is not None:
            selections.append(result.selection.pages[0])
        return result

    cache = SparseCache(model.config, QUEST, Budget(2, 1, 1), PAGE)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(Call, "attend", attend)
        logits = model(torch.tensor([ids[:PROMPT]]), past_key_values=cache).logits
        for index, token in enumerate(ids[PROMPT:]):
            assert index < len(FORCED) or token == int(logits[0, -1].argmax())
            logits = model(torch.tensor([[token]]), past_key_values=cache).logits
    assert trace.steps == len(ids) - PROMPT == 10 and trace.layers == [0, 1]
    for step in range(trace.steps):
        pages = -(-(PROMPT + step + 1) // PAGE)
        for layer in range(2):
            for head in range(2):
                expected = selections[2 * step + layer][head].tolist()
                assert trace.kept[layer, head, step].nonzero().flatten().tolist() == expected
                assert float(trace.mass[layer, head, step].sum()) == pytest.approx(1, abs=1e-5)
                assert not trace.mass[layer, head, step, pages:].any()


def test_losses_are_the_largest_masses_not_kept(trace: Trace) -> None:
    lost = sorted(
        (
            (float(trace.mass[layer, head, step, page]), page)
            for layer in range(2)
            for head in range(2)
            for step in range(trace.steps)
            for page in range(trace.mass.shape[3])
            if not trace.kept[layer, head, step, page]
        ),
        reverse=True,
    )
    found = trace.losses(4)
    assert found[0].mass == lost[0][0] > 0 and [one.page for one in found] == [*dict.fromkeys(p for _, p in lost)][:4]
    for one in found:
        assert float(trace.mass[one.layer, one.head, one.step, one.page]) == one.mass
        assert not trace.kept[one.layer, one.head, one.step, one.page]
    assert trace.page_text(2) == "".join(trace.pieces[10:15])
    words = lost_words(trace)
    assert f"page {found[0].page} " in words and f"layer {found[0].layer}, KV head {found[0].head}" in words


def test_the_page_holds_every_cell(trace: Trace) -> None:
    page = explanation(trace)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found
    data = json.loads(found[1])
    cells = torch.tensor(list(base64.b64decode(data["cells"]))).reshape(2, 2, data["steps"], data["pages"])
    assert torch.equal(cells % 2 == 1, trace.kept) and "".join(data["pieces"]) == "".join(trace.pieces)
    mass = 10 ** ((cells // 2) / 127 * data["decades"] - data["decades"])
    visible = trace.mass > 1e-3
    assert torch.allclose(mass[visible].log10(), trace.mass[visible].log10().double().float(), atol=0.02)
    worst = trace.losses(1)[0]
    assert data["worst"] == [worst.layer, worst.head, worst.step, worst.page]
    assert not re.search(r'(src|href)="|@import|url\(', page)


def test_nothing_is_lost_under_budget(loaded: tuple[Any, Any]) -> None:
    prompt = loaded[1](tiny_text.words(40)).input_ids[:PROMPT]
    trace = record(*loaded, build_flow(QUEST), Budget(30, 1, 1), PAGE, prompt, (), 3)
    assert trace.losses(3) == [] and trace.captured == pytest.approx(1) and bool(trace.kept[..., 0].all())
    assert "No page was lost" in lost_words(trace) and '"worst": null' in explanation(trace)


def test_the_command_writes_text_page_and_picture(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, page = tmp_path / "text.txt", tmp_path / "page.html"
    text.write_text(tiny_text.words(200))
    words = ("explain", QUEST, "--model", str(tiny), "--text", str(text), "--context", "150", "--budget", "64")
    assert run([*words, "--max-new-tokens", "4", "--report", str(page)]) == 0
    assert "Lost and mattered most: page" in " ".join(capsys.readouterr().out.split()) and page.stat().st_size > 5000
    assert run([*words, "--max-new-tokens", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["prompt_tokens"], result["steps"]) == (150, 4) and 0.3 < result["captured"] < 1
    assert run([*words, "--task", "repeat", "--context", "200", "--max-new-tokens", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2 + 24 + 1
    assert run([*words, "--context", "1020", "--task", "needle"]) == 2
    assert "expected at most 1024 tokens" in capsys.readouterr().err


def test_the_picture_shows_the_asked_segments(trace: Trace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from kvsieve.errors import ConfigError
    from kvsieve.evaluate.explain_plot import choose_segments, plot_trace

    worst = trace.losses(1)[0]
    assert choose_segments(trace, [], []) == [(worst.layer, worst.head)]
    assert choose_segments(trace, [0, 1], [1]) == [(0, 1), (1, 1)]
    with pytest.raises(ConfigError, match="received \\[2, 5\\]"):
        choose_segments(trace, [0, 2], [5])
    plot_trace(trace, [(0, 1), (1, 1)], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
