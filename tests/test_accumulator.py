"""The accumulator harness: published figures, verdicts, what counts as an accumulator, reuse of state rows."""

from __future__ import annotations

import json

import pytest
import torch

from kvsieve.cli.accumulator import accumulator_command, accumulator_options
from kvsieve.errors import ConfigError
from kvsieve.flow import Flow, build_flow
from kvsieve.paging.pool import LayerPool
from kvsieve.verify.accumulator import planted, run_accumulator, stored_recurrence, ulp
from kvsieve.verify.accumulator_flow import find_accumulator, with_decay, with_state_dtype
from kvsieve.verify.accumulator_options import AccumulatorOptions, state_dtype_named
from kvsieve.verify.accumulator_reset import check_reset
from kvsieve.verify.accumulator_stack import FixedWindow
from kvsieve.verify.published import SETTINGS, run_published, run_setting

TOKEN, GQA = "h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention"
BF16, SHORT = torch.bfloat16, {"seq_len": 40, "steps": 30, "head_dim": 24, "group_size": 3, "topk": 5}


class Remembers(Flow):
    """A user's accumulator: three tokens a page, state per token, a summary, another name for everything."""

    page_size = 3

    def __init__(self, gain=1.0, decay=0.75):
        self.gain, self.decay = gain, decay

    def summarize(self, k, v):
        return {"mean_k": k.mean(0)}

    def init_state(self, page_size, head_dim):
        return {"memory": torch.zeros(page_size)}

    def score(self, q, pages):
        seen = torch.sigmoid(pages["k"] @ q.amax(0)) * self.gain
        memory = pages["memory"] * self.decay + seen
        return pages["mean_k"] @ q[0] + memory.sum(-1), {"memory": memory}


class Maximum(Flow):
    """State, but no accumulator."""

    def init_state(self, page_size, head_dim):
        return {"best": torch.zeros(())}

    def score(self, q, pages):
        best = torch.maximum(pages["best"], (pages["k"] @ q[0]).amax(-1))
        return best, {"best": best}


class Counter(Flow):
    """Counts steps in integers."""

    def init_state(self, page_size, head_dim):
        return {"count": torch.zeros((), dtype=torch.int64)}

    def score(self, q, pages):
        return pages["k"].sum((1, 2)), {"count": pages["count"] + 1}


class Pair(Maximum):
    """Two fields."""

    def init_state(self, page_size, head_dim):
        return {"best": torch.zeros(()), "other": torch.zeros(())}


class Hidden(Remembers):
    """Keeps an argument under another name."""

    def __init__(self, wish, decay=0.5):
        super().__init__(wish, decay)


def test_published_figures_lie_in_their_bands():
    report = run_published()
    outside = [figure for figure in report.figures if not figure.within]
    assert not outside, outside
    assert report.passed and len(report.figures) == 15
    assert json.loads(json.dumps(report.as_json()))["passed"]


def test_bands_are_no_wider_than_they_must_be():
    """A decay of 1 - 2**-5 or 1 - 2**-7 leaves the band of the mass, two roundings leave that of the error."""
    mass = next(band for band in SETTINGS[0].bands if band.name == "mass")
    for decay in (1 - 2**-5, 1 - 2**-7):
        options = AccumulatorOptions(decay=decay, state_dtype=BF16)
        (outcome,) = run_accumulator(build_flow(TOKEN), options).outcomes
        assert not mass.low <= mass.read(outcome) <= mass.high
    undecayed = run_setting(SETTINGS[1], 0, 1).outcomes[0]
    for band in SETTINGS[0].bands:
        assert not band.low <= band.read(undecayed) <= band.high


@pytest.mark.parametrize(
    ("flow", "decay", "dtype", "passes"),
    [
        (TOKEN, None, None, True),
        (TOKEN, 1.0, None, True),
        (TOKEN, 0.984375, "bfloat16", True),
        (TOKEN, 1.0, "bfloat16", False),
        (GQA, None, "fp16", True),
        (GQA, 1.0, "bf16", False),
    ],
)
def test_verdict_and_exit_code(flow, decay, dtype, passes, capsys):
    options = accumulator_options(decay=decay, state_dtype=dtype)
    assert accumulator_command(build_flow(flow), options, as_json=True) == int(not passes)
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is passes and bool(report["faults"]) is not passes
    assert report["state_dtype"] == {None: "float32", "bf16": "bfloat16", "fp16": "float16"}.get(dtype, dtype)
    (outcome,) = report["outcomes"]
    assert (outcome["touched"], outcome["pages"], outcome["touched_right"]) == (116, 128, True)
    assert report["reset"] == {"reused": 116, "clean": True, "noticed": True, "passed": True}
    if flow == TOKEN:
        wanted = 600 if decay == 1 else (1 - 0.984375**600) * 64
        assert outcome["closed_form"] == pytest.approx(wanted) and outcome["exact_mass"] == pytest.approx(wanted)
        assert (report["published"] is None) == (dtype is None)
    if dtype is None:
        assert outcome["rows"][-1]["error"] < 1e-5 and outcome["rows"][-1]["overlap"] == 1


def test_text_ends_with_the_verdict(capsys):
    bad = accumulator_options(decay=1.0, state_dtype="bfloat16")
    assert accumulator_command(build_flow(TOKEN), bad) == 1
    text = capsys.readouterr().out
    assert "445.8 of 600" in text and "116 of 128 pages, exactly the window" in text
    assert "FAIL: seed 0: relative error" in text and "of the mass, more than 10%" in text
    assert accumulator_command(build_flow(TOKEN), accumulator_options(**SHORT)) == 0
    assert capsys.readouterr().out.rstrip().endswith("PASS")


def test_a_user_flow_with_pages_and_state_per_token():
    options = AccumulatorOptions(**{**SHORT, "seq_len": 71, "sink": 1, "recent": 2}, seeds=3)
    report = run_accumulator(Remembers(gain=2.0), options)
    assert report.passed, report.text()
    assert (report.decay, report.page_size) == (0.75, 3)
    assert [outcome.touched for outcome in report.outcomes] == [21] * 3  # 24 pages, the last one partial
    other = run_accumulator(Remembers(gain=2.0), AccumulatorOptions(**SHORT, sink=1, recent=2, decay=0.5))
    assert other.passed and other.decay == 0.5 and "gain=2.0" in other.flow


def test_what_counts_as_an_accumulator():
    found = find_accumulator(build_flow(TOKEN, decay=0.9), 1, 16, 2)
    assert (found.field, found.decay) == ("heavy", 0.9)
    assert find_accumulator(build_flow("gqa_quest_sparse_attention"), 4, 16, 2) is None
    for flow in (Maximum(), Counter(), Pair()):
        with pytest.raises(ConfigError, match="expected one state field"):
            run_accumulator(flow, AccumulatorOptions(**SHORT))


def test_options_that_do_not_fit_are_refused():
    cases = [
        (lambda: AccumulatorOptions(steps=1), "steps"),
        (lambda: AccumulatorOptions(decay=1.5), "decay"),
        (lambda: accumulator_options(state_dtype="int8"), "bfloat16"),
        (lambda: run_accumulator(build_flow(TOKEN), AccumulatorOptions(seq_len=40)), "leaves 28 pages"),
        (lambda: run_accumulator(Hidden(1.0), AccumulatorOptions(**SHORT, sink=1, recent=2, decay=0.5)), "self.wish"),
        (lambda: run_accumulator(Maximum(), AccumulatorOptions(**SHORT, decay=0.5)), "constructor takes decay"),
        (lambda: run_accumulator(build_flow("h2o"), AccumulatorOptions(**SHORT)), "mass the runtime keeps"),
    ]
    for call, words in cases:
        with pytest.raises(ConfigError, match=words):
            call()


@pytest.mark.parametrize("name", ["h2o_sparse_attention", "gqa_h2o_sparse_attention", "block_sparse_attention"])
def test_page_level_flows_need_no_reset(name, capsys):
    assert accumulator_command(build_flow(name), accumulator_options()) == 0
    assert "nothing to reset" in capsys.readouterr().out
    report = run_accumulator(build_flow(name), AccumulatorOptions(page_size=1))
    assert report.blocks == 128 and report.as_json()["state"] is False


def test_stale_summaries_of_a_stateless_flow_are_noticed(monkeypatch):
    """Were summaries of reused blocks not computed anew, the same check would fail."""
    from kvsieve.backends.eager import EagerBackend

    right, calls = EagerBackend.summarize, []

    def once_per_pool(self, flow, pool, blocks):
        calls.append(id(pool))
        if calls.count(id(pool)) == 1 or len(blocks) < 3:
            right(self, flow, pool, blocks)

    monkeypatch.setattr(EagerBackend, "summarize", once_per_pool)
    assert not run_accumulator(build_flow("h2o_sparse_attention"), AccumulatorOptions()).passed


def make_stack(dtype=torch.float32, decay=0.9, seeds=2):
    options = AccumulatorOptions(**SHORT, seeds=seeds)
    flow = with_state_dtype(with_decay(build_flow(TOKEN), decay), dtype)
    return FixedWindow(flow, options.budget, 1, planted(options), "eager", "cpu")


def test_reset_check_fails_when_the_reset_is_skipped(monkeypatch):
    def run():
        stack = make_stack()
        stack.first_step([one.query() for one in stack.data])
        return stack

    initial = torch.zeros((), dtype=torch.float64)
    assert check_reset(run(), "heavy", initial).passed
    skipped = run()
    monkeypatch.setattr(LayerPool, "enter", lambda self, rows: None)
    reset = check_reset(skipped, "heavy", initial)
    assert reset.noticed and not reset.clean and not reset.passed
    assert "initial value" in reset.faults()[0]


def test_reset_check_says_when_it_says_nothing():
    untouched = check_reset(make_stack(), "heavy", torch.zeros((), dtype=torch.float64))
    assert untouched.clean and not untouched.passed
    assert len(untouched.faults()) == 2  # no reused row, and nothing left behind to notice


def test_a_run_without_any_reset_fails(monkeypatch, capsys):
    """State then starts from poison: NaN, which the report says in valid JSON."""
    monkeypatch.setattr(LayerPool, "enter", lambda self, rows: None)
    assert accumulator_command(build_flow(TOKEN), AccumulatorOptions(**SHORT), as_json=True) == 1
    report = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert report["outcomes"][0]["mass"] == "nan"


@pytest.mark.parametrize("decay", [1 - 2**-6, 1.0])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_stored_recurrence_is_what_the_stack_stores(decay, dtype):
    """Bit for bit, over 60 steps: a stack with decay 0 and float32 state shows the increments themselves."""
    shows, adds = make_stack(decay=0.0), make_stack(dtype, decay)
    increments = []
    for step in range(60):
        queries = [one.query() for one in shows.data]
        for stack in (shows, adds):
            stack.first_step(queries) if step == 0 else stack.step(stack.requests, queries)
        increments.append(shows.state(shows.requests, "heavy").float())
    wanted = stored_recurrence(torch.stack(increments), decay, dtype, lambda step, state: None)
    assert torch.equal(adds.state(adds.requests, "heavy"), wanted.double())


def test_decay_is_rounded_to_the_dtype_of_the_state():
    options = AccumulatorOptions(**SHORT, decay=1 - 2**-9, state_dtype=BF16)
    report = run_accumulator(build_flow(TOKEN), options)
    assert report.stored_decay == 1 and "holds as 1" in report.text()
    kept = run_accumulator(build_flow(TOKEN), AccumulatorOptions(**SHORT, decay=1 - 2**-8, state_dtype=BF16))
    assert kept.stored_decay == kept.decay


def test_faults_in_the_backend_change_the_verdict(monkeypatch):
    """The harness drives the real stack: state written to a neighbour's row, or stored as it came, is noticed."""
    from kvsieve.backends.eager import EagerBackend

    right = EagerBackend.score

    def stored_twice(self, flow, q, pool, window):
        right(self, flow, q, pool, window)
        return right(self, flow, q, pool, window)

    def shifted(self, flow, q, pool, window):
        scores = right(self, flow, q, pool, window)
        pool.state["heavy"][:, window.rows] = pool.state["heavy"][:, window.rows.roll(1, 1)].clone()
        return scores

    for wrong in (stored_twice, shifted):
        monkeypatch.setattr(EagerBackend, "score", wrong)
        assert not run_accumulator(build_flow(TOKEN), AccumulatorOptions(**SHORT)).passed


def test_ulp_is_the_distance_of_neighbours():
    for dtype in (BF16, torch.float16, torch.float32):
        for value in (0.75, 1.0, 1.5, 300.0):
            one = torch.tensor(value, dtype=dtype)
            bits = torch.int32 if dtype is torch.float32 else torch.int16
            following = (one.view(bits) + 1).view(dtype)
            assert ulp(value, dtype) == float(following.double() - one.double())


def test_names_of_state_dtypes():
    assert state_dtype_named("bf16") is state_dtype_named("bfloat16") is BF16
