"""``kvsieve bench``: what it counts, verifies, refuses and writes. Times are not tested."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from kvsieve.backends.eager import EagerBackend
from kvsieve.bench import Setting, run_bench, run_seeding
from kvsieve.bench.dense import Dense
from kvsieve.bench.gpu import go_round, rounds
from kvsieve.bench.seeding import Prompt
from kvsieve.bench.setting import parse_heads
from kvsieve.bench.stack import Stack
from kvsieve.budget import Budget
from kvsieve.cli.app import run
from kvsieve.errors import ConfigError, KvsieveError
from kvsieve.flow import build_flow
from kvsieve.stepgraph import StepGraph

SMALL = Setting(
    backend="eager",
    batch=2,
    query_heads=6,
    kv_heads=2,
    head_dim=20,
    page_size=4,
    budget=Budget(3, 1, 2),
    dtype=torch.float32,
    layers=2,
    repeats=3,
)
SMALL_OPTIONS = ["--heads", "6/2", "--head-dim", "20", "--page-size", "4", "--budget", "3+1+2", "--dtype", "fp32"]
SMALL_OPTIONS += ["--layers", "2", "--repeats", "3", "--backend", "eager"]


def test_a_graph_of_many_layers_goes_round_the_few_that_there_are() -> None:
    """The last round's results are those of a step: on the CPU, where the same calls run op by op."""
    assert [rounds(replace(SMALL, layers=layers)) for layers in (1, 2, 24, 32, 40)] == [32, 16, 2, 1, 1]
    for name in ("gqa_quest_sparse_attention", "h2o"):
        once, often = (Stack(build_flow(name), SMALL, 47) for _ in range(2))
        expected = [one.out for one in once.step()]
        graph = StepGraph(often.runtime, often.requests, 50, partial(go_round, often, 3), "cpu")
        for out, wanted in zip(graph.step(), expected, strict=True):
            torch.testing.assert_close(out, wanted, rtol=0, atol=0)


def test_cases_phases_and_bytes() -> None:
    """A ragged page, the phases in order, and every byte count worked out by hand."""
    result = run_bench([build_flow("gqa_quest_sparse_attention")], [47], SMALL)
    (flow,) = result.flows
    assert [(case.kind, case.context, case.pages, case.kept) for case in flow.cases] == [
        ("sparse", 47, 12, 6),
        ("under budget", 10, 3, 3),
        ("budget = length", 24, 6, 6),
    ]
    case = flow.cases[0]
    sizes = {phase.name: phase.bytes for phase in case.phases}
    row = 20 * 4 * 2  # a token's key, or value, in both KV heads
    window, listed = 2 * (12 - 3), 2 * 6 * 2 * 8
    assert sizes["write"] == 2 * 2 * 2 * row
    assert sizes["summarize"] == 2 * (4 * row + 2 * row)
    assert sizes["score"] == window * 2 * row
    assert sizes["select"] == window * 2 * 4 + listed
    assert sizes["attend"] == 2 * (6 * 4 - 1) * 2 * row + listed
    assert sizes["step"] == sum(sizes.values()) - sizes["step"] - sizes["summarize"] + sizes["summarize"] // 4
    assert [phase.name for phase in flow.cases[2].phases] == ["write", "summarize", "select", "attend", "step"]
    assert case.checked == 2 and result.copy_bandwidth > 0
    assert {form.name for form in case.dense if form.fair} == {"SDPA, group as rows", "matmul-softmax-matmul"}
    data = json.loads(json.dumps({**result.as_json(), "setting": str(result.setting)}))
    values = data["flows"][0]["cases"][0]
    assert values["speedup"] == pytest.approx(case.baseline.seconds / case.step.seconds)
    score = case.phases[2]
    assert values["phases"][2]["share_of_copy"] == pytest.approx(score.bytes / score.seconds / result.copy_bandwidth)


@pytest.mark.parametrize(("name", "rebased"), [("h2o", 0), ("tova", 4 * (4 * 12 + 6 * 9 * 4)), ("snapkv", None)])
def test_mass_is_a_phase_of_flows_whose_steps_add_to_it(name: str, rebased: int | None) -> None:
    """TOVA rebases by 0: it reads the sums of 12 pages, and rewrites the 6 that the last step attended."""
    stack = Stack(build_flow(name), SMALL, 47)
    attended, listed = 2 * 2 * (6 * 4 - 1) * 4, 2 * 6 * 2 * 8
    sizes, phases = stack.bytes(), stack.phases()
    fed = rebased is not None
    assert ("mass" in phases) == fed
    assert sizes["attend"] == 2 * (6 * 4 - 1) * 2 * 2 * 20 * 4 + listed + (attended if fed else 0)
    if rebased is not None:
        assert sizes["mass"] == 3 * attended + 2 * listed + rebased
        before = stack.stored_mass()[1][0]
        assert (before.flatten(1)[:, :46].sum(1) > 0).all() and stack.first[1].selection is not None
    (case, *_) = run_bench([build_flow(name)], [47], SMALL).flows[0].cases
    assert {phase.name for phase in case.phases} == {*phases, "step"}


@pytest.mark.parametrize("name", ["h2o_token_sparse_attention", "streaming_llm"])
def test_flows_of_other_pages_and_without_score_attend_the_same_tokens(name: str) -> None:
    stack = Stack(build_flow(name), SMALL, 47)
    assert stack.quota.tokens == 2 * (6 * 4 - (1 if name == "streaming_llm" else 0))


@pytest.mark.parametrize("name", ["gqa_quest_sparse_attention", "h2o_token_sparse_attention", "h2o"])
@pytest.mark.parametrize("context", [24, 47, 48])
def test_measured_steps_come_round(name: str, context: int) -> None:
    """They keep the number of pages, so that no case turns into another; after a page's worth they are the same."""
    stack = Stack(build_flow(name), SMALL, context)
    p = stack.runtime.page_size
    results = []
    for _ in range(1 + 2 * p):
        stack.rewind()
        results.append(stack.step()[0])
        own = 1 if stack.runtime.tables.stateful else 0  # made by copies of requests that have the first step's token
        assert results[-1].selection.count.tolist() == [min(6 * 4 // p, -(-context // p) + own)] * 2
    assert torch.equal(results[p].out, results[2 * p].out)


def test_dense_forms_attend_what_the_runtime_stores() -> None:
    """Under budget the step is dense: all forms give its output."""
    stack = Stack(build_flow("gqa_quest_sparse_attention"), SMALL, 22)
    dense = Dense(SMALL, stack.keys, stack.values)
    dense.q = stack.draws[1][0].unflatten(1, (2, 3))
    for name, form in dense.forms().items():
        error = (form(1).reshape(2, 6, 20) - stack.first[1].out).abs().max()
        assert error < 1e-5, name


@pytest.mark.parametrize(
    ("name", "context", "length"),
    [("gqa_quest_sparse_attention", 47, 43), ("gqa_quest_sparse_attention", 3, 1), ("h2o", 47, 47)],
)
def test_steps_ahead_of_a_measured_one_begin_within_the_context(name: str, context: int, length: int) -> None:
    """Half a page and two steps below it, or with one token; state stays."""
    stack = Stack(build_flow(name), SMALL, context)
    stack.step_back(2)
    assert [stack.runtime.length(request) for request in stack.requests] == [length] * 2
    stack.step()


@pytest.mark.parametrize("stage", ["score", "select", "attend"])
def test_no_time_for_a_wrong_step(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Any = getattr(EagerBackend, stage)

    def wrong(self: EagerBackend, *arguments: Any) -> Any:
        result = original(self, *arguments)
        if stage == "score":
            return result + 0.01
        if stage == "select":
            return type(result)((result.pages - 1).clamp(min=0), result.count)
        return result[0] * 1.001, *result[1:]

    monkeypatch.setattr(EagerBackend, stage, wrong)
    with pytest.raises(KvsieveError, match="no time is shown, for the step is wrong"):
        run_bench([build_flow("gqa_quest_sparse_attention")], [47], SMALL)


def test_no_time_for_a_wrong_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    original = EagerBackend.add_mass

    def wrong(self: EagerBackend, pool: Any, rows: Any, mass: Any, selection: Any, increment: torch.Tensor) -> None:
        original(self, pool, rows, mass, selection, increment * 1.001)

    monkeypatch.setattr(EagerBackend, "add_mass", wrong)
    with pytest.raises(KvsieveError, match="no time is shown, for the step is wrong"):
        run_bench([build_flow("tova")], [47], SMALL)


def test_heads_as_written() -> None:
    assert parse_heads("9/3") == (9, 3)
    for wrong in ("9", "9/2", "0/0", "3/9", "a/b"):
        with pytest.raises(ConfigError):
            parse_heads(wrong)


def test_command_writes_table_json_and_picture(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    files = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    assert run(["bench", "--context", "40", "--context", "80", *SMALL_OPTIONS, *files]) == 0
    text = capsys.readouterr().out
    assert "gqa_quest_sparse_attention" in text and "budget = length" in text and "PyTorch ops" in text
    data = json.loads((tmp_path / "b.json").read_text())
    assert [flow["flow"] for flow in data["flows"]] == ["block_sparse_attention", "gqa_quest_sparse_attention"]
    assert data["setting"]["dtype"] == "float32" and len(data["flows"][0]["cases"]) == 4
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", "7/2"], "--heads: expected"),
        (["--budget", "x"], "--budget: expected"),
        (["--budget", "0"], "--budget: expected tokens such as 256"),
        (["--budget", "12.5%"], "--budget: expected tokens such as 1024, or pages"),
        (["--budget", "30"], "raise the budget to 48 tokens"),
        (["--flow-arg", "decay=0.5"], "--flow-arg belongs to one flow"),
        (["--backend", "fast"], "unknown backend 'fast'"),
        (["--dtype", "int8"], "unknown dtype"),
        (["--flow", "nothing"], "unknown flow"),
        (["--json", "/dev/null/x.json"], "--json /dev/null/x.json: expected a file in a directory"),
    ],
)
def test_mistakes_are_one_line(options: list[str], message: str, capsys) -> None:
    assert run(["bench", "--context", "40", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_plot_without_matplotlib_is_refused_before_measuring(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert run(["bench", "--context", "40", *SMALL_OPTIONS, "--plot", "x.png"]) == 2
    assert "--plot needs matplotlib, which is not installed: pip install matplotlib" in capsys.readouterr().err


# Seeding


def test_seeding_is_checked_measured_and_written(tmp_path, capsys) -> None:
    options = ["--heads", "6/2", "--head-dim", "20", "--page-size", "5", "--dtype", "bf16", "--repeats", "3"]
    options += ["--backend", "eager"]
    file = tmp_path / "s.json"
    assert run(["bench", "--seeding", "--context", "384", "--context", "77", *options, "--json", str(file)]) == 0
    assert "heads 6/2 x 20" in capsys.readouterr().out
    cases = json.loads(file.read_text())["cases"]
    assert [(case["context"], [one["decay"] for one in case["seedings"]]) for case in cases] == [
        (77, [1.0, 0.9]),
        (384, [1.0, 0.9]),
    ]
    assert cases[1]["seedings"][0]["largest"] == 3 * 128 * 384 * 4  # a group's rows of one block, in float32


def test_no_time_for_wrong_seeding(monkeypatch: pytest.MonkeyPatch) -> None:
    original = EagerBackend.prompt_mass
    monkeypatch.setattr(EagerBackend, "prompt_mass", lambda *arguments: original(*arguments) * 1.0001)
    with pytest.raises(KvsieveError, match=r"no time is shown, for seeding is wrong: decay 1\.0, 47 tokens"):
        run_seeding([47], SMALL)


def test_float64_seeding_is_the_definition() -> None:
    prompt = Prompt(SMALL, 23)
    mass = torch.zeros(23, dtype=torch.float64)
    for place in range(23):
        logits = prompt.q[place, -1].double() @ prompt.k[: place + 1, -1].double().T * 20**-0.5
        mass *= 0.9
        mass[: place + 1] += torch.softmax(logits, -1).sum(0)
    assert torch.allclose(prompt.exact(0.9), mass, rtol=1e-12)


def test_seeding_refuses_what_it_would_ignore(capsys) -> None:
    assert run(["bench", "--seeding", "--flow", "h2o"]) == 2
    assert "expected neither --flow nor --plot" in capsys.readouterr().err


def test_a_request_of_a_single_page_is_rewound_to_a_token() -> None:
    setting = Setting(query_heads=2, kv_heads=1, head_dim=8, page_size=4, budget=Budget(0, 1, 2), layers=1)
    stack = Stack(build_flow("block_sparse_attention"), setting, 3)
    for _ in range(6):
        stack.step()
        stack.rewind()
    assert stack.runtime.length(stack.requests[0]) in range(1, 4)
