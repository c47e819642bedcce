"""``kvsieve eval`` on a tiny model: tasks, references, bytes, resumption, refusals, the report."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsieve.cli.app import run
from kvsieve.errors import ConfigError
from kvsieve.evaluate.contenders import line_up, reference
from kvsieve.evaluate.decode import Batch
from kvsieve.evaluate.tasks import INTRODUCTION, TASKS, Sample
from kvsieve.evaluate.text import Corpus
from kvsieve.flow import build_flow
from kvsieve.paging.pool import LayerPool

transformers = pytest.importorskip("transformers")
tiny_text = pytest.importorskip("tiny_text")

pytestmark = pytest.mark.usefixtures("shared_traces")

QUEST, TOKENS = "gqa_quest_sparse_attention", "gqa_h2o_token_sparse_attention"
CONTEXT = 330


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_text.save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(tiny_text.words(400))
    return path


@pytest.fixture(scope="module")
def corpus(tiny: Path, text: Path) -> Corpus:
    return Corpus(transformers.AutoTokenizer.from_pretrained(tiny), text.read_text())


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    import kvsieve.integrations.transformers  # noqa: F401

    return transformers.AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="kvsieve").eval()


def decode(corpus: Corpus, ids: tuple[int, ...]) -> str:
    return str(corpus.tokenizer.decode(list(ids)))


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_seeded_and_of_the_asked_length(task: str, corpus: Corpus) -> None:
    made = [TASKS[task].sample(corpus, 700, 5, index) for index in range(6)]
    assert made == [TASKS[task].sample(corpus, 700, 5, index) for index in range(6)]
    assert len(set(made)) == 6 and made[0] != TASKS[task].sample(corpus, 700, 6, 0)
    assert {len(sample.prefix) for sample in made} == {700}


def test_a_needle_is_in_the_text_once_and_its_number_is_asked_for(corpus: Corpus) -> None:
    for name, needles in (("needle", 1), ("multikey", 4)):
        depths = []
        for index in range(8):
            sample = TASKS[name].sample(corpus, 900, 0, index)
            prefix, question, answer = (decode(corpus, ids) for ids in (sample.prefix, sample.question, sample.answer))
            found = re.findall(r" One of the special magic numbers for (\w+) is: (\d{7})\.", prefix)
            assert len(found) == len(dict(found)) == needles
            (key,) = set(re.findall(r"special magic number for (\w+) mentioned", question))
            assert answer == dict(found)[key] and len(sample.answer) == 7
            assert question.endswith("mentioned in the text is: ")
            assert prefix.startswith(INTRODUCTION)
            haystack = prefix.removeprefix(INTRODUCTION)
            depths.append(haystack.index(f"for {key} is") / len(haystack))
        assert min(depths) < 0.35 and max(depths) > 0.65


def test_a_passage_comes_again_and_a_text_goes_on(corpus: Corpus) -> None:
    for index in range(4):
        sample = TASKS["repeat"].sample(corpus, 500, 0, index)
        prefix, cue = decode(corpus, sample.prefix), decode(corpus, sample.question).removeprefix("\n\n")
        assert (len(sample.question), len(sample.answer)) == (2 + 24, 16)
        assert cue + decode(corpus, sample.answer) in prefix
        sample = TASKS["perplexity"].sample(corpus, 500, 0, index)
        assert (len(sample.question), len(sample.answer)) == (1, 64)
        whole = decode(corpus, sample.prefix + sample.tail)
        assert whole in corpus.tokenizer.decode(corpus.ids)


def test_a_short_text_serves_needles_only(corpus: Corpus) -> None:
    short = Corpus(corpus.tokenizer, "a b c. " * 20)
    assert len(TASKS["needle"].sample(short, 600, 0, 0).prefix) == 600
    for task in ("repeat", "perplexity"):
        with pytest.raises(ConfigError, match="longer --text"):
            TASKS[task].sample(short, 600, 0, 0)
    with pytest.raises(ConfigError, match="--context 100"):
        TASKS["needle"].sample(corpus, 100, 0, 0)


def samples(corpus: Corpus, counts: tuple[int, ...]) -> list[Sample]:
    """Samples whose tails differ in length."""
    made = [TASKS["needle"].sample(corpus, CONTEXT, 0, index) for index in range(len(counts))]
    return [Sample(one.prefix, one.question[-count:], one.answer) for one, count in zip(made, counts, strict=True)]


def test_dense_is_the_models_own_attention(model: Any, corpus: Corpus) -> None:
    """Also for a flow that is dense in disguise; and a batch of ragged tails is each sample alone."""
    chosen = samples(corpus, (9, 23, 4))
    own = transformers.AutoModelForCausalLM.from_pretrained(model.name_or_path, attn_implementation="sdpa").eval()
    for row, likely in enumerate((7, 3)):  # an answer that is right, and one whose beginning is
        one = chosen[row]
        ids = torch.tensor([one.prefix + one.question])
        wrote = own.generate(ids, max_new_tokens=likely, min_new_tokens=likely, do_sample=False)[0, ids.shape[1] :]
        chosen[row] = Sample(one.prefix, one.question, (*wrote.tolist(), *one.answer[likely:]))
    dense, *others = (reference("dense", 16), *line_up([QUEST, TOKENS], {}, None, references=False))
    batch = Batch(model, chosen, ["a", "b", "c"])
    for contender in (dense, *others):
        for sample, outcome in zip(chosen, batch.run(contender, CONTEXT + 160), strict=True):
            ids = torch.tensor([sample.prefix + sample.tail])
            with torch.no_grad():
                logits = own(ids).logits[0, -8:-1].double()
            nll = torch.nn.functional.cross_entropy(logits, torch.tensor(sample.answer))
            assert outcome.nll == pytest.approx(float(nll), rel=1e-4)
            right = (logits.argmax(-1) == torch.tensor(sample.answer)).double()
            assert outcome.accuracy == float(right.mean()) and outcome.exact == bool(right.all())
            assert outcome.kv_bytes == outcome.dense_bytes and (sample is not chosen[0] or outcome.exact)
            assert outcome.shares == {name: [[1.0] * 2] * 2 for name in ("captured", "window", "recall")}


@pytest.mark.parametrize("flow", [QUEST, TOKENS, "h2o"])
def test_a_flow_decodes_as_generate_would(flow: str, model: Any, corpus: Corpus) -> None:
    """The shared prefix, the probe and the batch change nothing: the numbers are those of a plain SparseCache."""
    from kvsieve.integrations.transformers import SparseCache

    (contender,) = line_up([flow], {}, None, references=False)
    chosen = samples(corpus, (9, 23))
    outcomes = Batch(model, chosen, ["a", "b"]).run(contender, 64)
    read = []
    for sample, outcome in zip(chosen, outcomes, strict=True):
        cache = SparseCache(model.config, flow, contender.budget(build_flow(flow), 64), contender.page_size)
        with torch.no_grad():
            model(torch.tensor([sample.prefix]), past_key_values=cache)
            rows = [model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1] for token in sample.tail[:-1]]
        logprobs = torch.log_softmax(torch.stack(rows[-7:]).double(), -1)
        assert outcome.nll == pytest.approx(float(-logprobs[range(7), list(sample.answer)].mean()), rel=1e-4)
        read.append((cache.stats.kv_bytes, cache.stats.field_bytes, cache.stats.dense_bytes, cache.stats.steps))
    kv, fields, dense, steps = map(sum, zip(*read, strict=True))
    expected = (kv / steps, fields / steps, dense / steps)
    assert (outcomes[0].kv_bytes, outcomes[0].field_bytes, outcomes[0].dense_bytes) == expected
    assert outcomes[0].kv_bytes < 0.35 * outcomes[0].dense_bytes


def test_caches_of_earlier_runs_are_freed_at_once(model: Any, corpus: Corpus) -> None:
    batch = Batch(model, samples(corpus, (5,)), ["a"])
    contenders = line_up([QUEST, "h2o"], {}, None, references=False)
    pools = []
    gc.collect()
    gc.disable()
    try:
        for one in (*contenders, *contenders):
            batch.run(one, 64)
            pools.append(sum(type(thing) is LayerPool for thing in gc.get_objects()))
    finally:
        gc.enable()
    assert pools == pools[:1] * 4  # those of the shared prefix, and what other tests hold


def test_references_are_ordered_as_they_must_be(model: Any, corpus: Corpus) -> None:
    """Oracle above a flow above chance, at equal K/V bytes; chance finds k of W pages."""
    chosen = [TASKS["needle"].sample(corpus, CONTEXT, 1, index) for index in range(4)]
    batch = Batch(model, chosen, ["a", "b", "c", "d"])
    runs = {one.name: batch.run(one, 112) for one in line_up([QUEST], {}, None)}
    assert [*runs] == ["dense", "oracle selection", "random pages", "recent only (streaming_llm)", QUEST]

    def share(name: str, kind: str) -> float:
        return sum(sum(map(sum, one.shares[kind])) for one in runs[name]) / (4 * 2 * 2)

    sparse = [name for name in runs if name != "dense"]
    assert len({runs[name][0].kv_bytes for name in sparse}) == 1
    assert share("oracle selection", "recall") == 1
    assert share("random pages", "recall") == pytest.approx(4 / 19.5, abs=0.03)  # 7 pages: 4 of 18 to 20 compete
    assert share("random pages", "window") == pytest.approx(4 / 19.5, abs=0.06)
    for kind in ("captured", "window"):
        assert share("oracle selection", kind) > share(QUEST, kind) > share("random pages", kind)


def kvsieve(tiny: Path, text: Path, *words: str) -> int:
    common = ("--model", str(tiny), "--text", str(text), "--context", "200", "--budget", "96")
    return run(["eval", *common, "--samples", "3", "--batch", "2", *words])


def test_the_same_seed_gives_the_same_numbers_whole_or_in_parts(
    tiny: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (QUEST, "--task", "repeat", "--json")
    assert kvsieve(tiny, text, *words) == 0
    whole = json.loads(capsys.readouterr().out)
    assert len(whole["rows"]) == 5 and {row["samples"] for row in whole["rows"]} == {3}
    results = tmp_path / "results" / "r.jsonl"
    assert kvsieve(tiny, text, *words, "--results", str(results)) == 0
    assert json.loads(capsys.readouterr().out) == whole
    lines = results.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 5 * 3
    results.write_text("".join(lines[:8]) + lines[8][:40])  # a run that was killed while it wrote
    assert kvsieve(tiny, text, *words, "--results", str(results)) == 0
    assert json.loads(capsys.readouterr().out) == whole
    assert set(results.read_text().splitlines(keepends=True)) == set(lines)
    assert kvsieve(tiny, text, *words, "--results", str(results), "--seed", "1") == 2
    assert "seed 0, now 1" in capsys.readouterr().err
    alone = (QUEST, "--task", "repeat", "--no-references", "--json", "--seed")
    figures = []
    for seed in ("0", "1"):
        assert kvsieve(tiny, text, *alone, seed) == 0
        figures.append(json.loads(capsys.readouterr().out)["rows"][0]["nll"])
    assert figures[0] == whole["rows"][-1]["nll"] != figures[1]
    other = tmp_path / "other.txt"
    other.write_text("not a result\n")
    assert kvsieve(tiny, text, *words, "--results", str(other)) == 2
    assert "expected a file that kvsieve eval wrote" in capsys.readouterr().err
    assert other.read_text() == "not a result\n"


def test_a_changed_flow_is_not_mixed_with_its_old_results(
    tiny: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flow, results = tmp_path / "mine.py", str(tmp_path / "r.jsonl")
    source = "from kvsieve import Flow\n\nclass Mine(Flow):\n    def score(self, q, pages):\n        return {}\n"
    words = (f"{flow}:Mine", "--task", "repeat", "--no-references", "--results", results)
    flow.write_text(source.format("pages['position']"))
    assert kvsieve(tiny, text, *words) == 0
    flow.write_text(source.format("-pages['position']"))
    capsys.readouterr()
    assert kvsieve(tiny, text, *words) == 2
    assert "another version of flow Mine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "expected a flow"),
        (("quest",), "unknown flow"),
        ((QUEST, "--task", "poem"), "unknown task"),
        ((QUEST, "--budget", "30"), "--budget 30: a budget of 30 tokens is 2 page(s) of 16"),
        ((QUEST, "--budget", "30"), "raise the budget to 48 tokens, or lower --page-size"),
        ((QUEST, "--budget", "64+1+2"), "received pages (64+1+2)"),
        ((QUEST, "--context", "1000"), "expected at most 864"),
        ((QUEST, "--backend", "magic"), "unknown backend"),
        ((QUEST, TOKENS, "--flow-arg", "decay=0.5"), "belongs to one flow"),
    ],
)
def test_wrong_requests_are_one_line(
    words: tuple[str, ...], expected: str, tiny: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvsieve(tiny, text, "--task", "needle", *words) == 2
    err = capsys.readouterr().err
    assert expected in err and len(err.splitlines()) == 1


class Links(HTMLParser):
    """Whether a page is well formed, and what it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_report_is_one_file_with_every_number(tiny: Path, text: Path, tmp_path: Path) -> None:
    report = tmp_path / "deep" / "report.html"
    words = (QUEST, TOKENS, "--budget", "64", "--task", "repeat", "--task", "perplexity")
    assert kvsieve(tiny, text, *words, "--samples", "1", "--report", str(report)) == 0
    page, reader = report.read_text(), Links()
    reader.feed(page)
    assert not reader.open and not reader.loads and "url(" not in page and "@import" not in page
    said = " ".join(reader.words)
    names = ("dense", "oracle selection", "oracle selection, page 1", "random pages", "recent only", QUEST, TOKENS)
    assert all(name in said for name in names)
    assert page.count("<table") == 2 and page.count('class="heat"') == 2 * 6
    assert page.count("<tr>") == 2 * (1 + 1 + 2 * 6)
    assert "viewport" in page and "prefers-color-scheme:dark" in page


@pytest.mark.slow
def test_on_a_real_model_dense_in_disguise_is_dense_and_chance_is_at_the_bottom() -> None:
    from kvsieve.models import load_model

    model, tokenizer = load_model("smollm2")
    text = Path(__file__).parent.parent / "examples" / "jargon.txt"
    corpus = Corpus(tokenizer, text.read_text(encoding="utf-8"))
    chosen = [TASKS["needle"].sample(corpus, 768, 0, index) for index in range(3)]
    batch = Batch(model, chosen, ["a", "b", "c"])
    dense, oracle, chance, recent, quest = line_up([QUEST], {}, None)

    def nll(contender: Any, tokens: int) -> float:
        return sum(outcome.nll for outcome in batch.run(contender, tokens)) / 3

    best = nll(dense, 768 + 160)
    assert best < 0.3
    assert nll(quest, 768 + 160) == pytest.approx(best, rel=1e-3)
    bottom = min(nll(chance, 192), nll(recent, 192))
    assert nll(oracle, 192) < best + 0.15 < 1.2 < bottom
    assert nll(quest, 192) < bottom - 0.5


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        pytest.param("goes well", r"30 30\n", marks=pytest.mark.slow),
        ("fails", r"ConfigError this unit cannot be run\n(\d+) \1\n"),
        ("dies", r"KvsieveError a worker process of 2 died, .* use fewer --jobs or a smaller --batch\n(\d+) \1\n"),
        ("interrupted", r"KeyboardInterrupt \n2 2\n"),
    ],
)
def test_workers_end_with_the_run(what: str, expected: str) -> None:
    """Nobody is left waiting for a pipe that nobody reads, and no result comes twice."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "eval_workers.py"), what]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert re.fullmatch(expected, result.stdout), (result.stdout, result.stderr)
