"""The oracle as a user meets it: verdicts, exit codes, messages, shrunk programmes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsieve.backends import backend_names, get_backend
from kvsieve.backends.base import Selection
from kvsieve.backends.eager import EagerBackend, EagerFlow
from kvsieve.backends.forwarding import ForwardingBackend, ScoringBy
from kvsieve.cli import main
from kvsieve.errors import FlowError, Location, NotCroppable, OutOfPages, UnknownName
from kvsieve.flow import load_flow
from kvsieve.flows.streaming import StreamingLLM
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.table import RequestTables
from kvsieve.plan import Quota
from kvsieve.verify import Fault, assert_flow_correct, verify_flow
from kvsieve.verify.programs import fault_of, fuzz, random_program, run_program, shrink
from kvsieve.verify.suite import CHECKS

QUEST, TOKEN, BLOCK = "gqa_quest_sparse_attention", "h2o_token_sparse_attention", "gqa_block_sparse_attention"
QUICK = [check for check in CHECKS if check.name in ("ties", "life cycle", "unselected NaN", "under budget")]

MINE = """
import torch
from kvsieve import Flow


class Mine(Flow):
    def summarize(self, k, v):
        return {"mean": k.mean(0), "reach": (k - k.mean(0)).norm(dim=-1).amax(0)}

    def score(self, q, pages):
        far = q.norm(dim=-1)[:, None] * pages["reach"]
        return torch.softmax(q @ pages["mean"].T + far, -1).amax(0)


class Broken(Flow):
    def score(self, q, pages):
        return pages["k"].cumsum(0).flip(0).sum((1, 2))
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


class WrongSoftmax(EagerBackend):
    """A copy of the eager backend in which softmax runs over the query heads instead of the window."""

    name = "wrong softmax"

    def prepare(self, graphs: Any, device: torch.device) -> EagerFlow:
        flow = super().prepare(graphs, device)
        assert flow.score is not None
        for node in flow.score.module.graph.nodes:
            if node.target is torch.softmax:
                x, axis = node.args
                node.args = (x, axis - 1)
        flow.score.module.recompile()
        return flow


class WrongSummary(EagerBackend):
    """A copy of the eager backend whose summaries are reduced over the KV heads instead of the tokens alone."""

    name = "wrong summary"

    def summarize(self, flow: EagerFlow, pool: LayerPool, blocks: torch.Tensor) -> None:
        super().summarize(flow, pool, blocks)
        for field in pool.summaries.values():
            field[:, blocks] = field[:, blocks].amax(0, keepdim=True).expand(len(field), -1, -1)


def test_a_wrong_reduction_axis_in_score_is_named() -> None:
    report = verify_flow(BLOCK, QUICK, backend=WrongSoftmax())
    assert not report.passed
    text = report.text()
    assert text.startswith(f"{BLOCK}: WRONG on wrong softmax (fp32, cpu)")
    # The stage, where, which element, what it should be, by how much.
    assert "FAILED ties: score of layer 0 request 0 KV head 0: element [" in text
    assert " expected " in text and " times the bound; " in text and " elements are wrong" in text
    assert "FAILED under budget" not in text  # nothing is scored there


def test_a_wrong_reduction_axis_in_summaries_is_named() -> None:
    report = verify_flow(QUEST, QUICK, backend=WrongSummary())
    assert not report.passed
    assert "FAILED ties: summary of layer 0 request 0 KV head 0 page 0 k_max: element [" in report.text()


class CoarseKeys(ForwardingBackend):
    """Ranks windows of more than 512 pages by keys without their low eight bits."""

    def select(self, scores: torch.Tensor | None, quota: Quota, heads: int) -> Selection:
        if scores is not None and scores.shape[-1] > 512:
            bits = scores.contiguous().view(torch.int32) & ~0xFF
            scores = torch.where(torch.isfinite(scores), bits.view(torch.float32), scores)
        return super().select(scores, quota, heads)


def test_a_backend_that_scores_elsewhere_selects_by_itself() -> None:
    """So what is found in triton's selection is found in that of triton+compiled."""
    both = get_backend("triton+compiled")
    assert isinstance(both, ScoringBy) and ScoringBy.select is ForwardingBackend.select
    assert type(both.inner) is type(get_backend("triton"))


@pytest.mark.parametrize("name", [name for name in backend_names() if name != "triton+compiled"])
def test_coarse_keys_are_found_where_windows_are_long(name: str) -> None:
    (check,) = (check for check in CHECKS if check.name == "order")
    inner = get_backend(name)
    assert verify_flow(QUEST, [check], backend=ForwardingBackend(inner)).passed
    report = verify_flow(QUEST, [check], backend=CoarseKeys(inner))
    assert not report.passed and "FAILED order: selection of request 0 head 0: pages [" in report.text()


def test_assert_flow_correct(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs every check by default, as test_exit_code_0 does on this flow; some of them are enough here."""
    assert verify_flow.__defaults__ == (CHECKS,)
    monkeypatch.setattr(verify_flow, "__defaults__", (QUICK,))
    assert_flow_correct(load_flow(f"{mine}:Mine"))
    with pytest.raises(AssertionError, match=r"Mine: WRONG on wrong summary[^$]*summary of layer 0"):
        assert_flow_correct(load_flow(f"{mine}:Mine"), backend=WrongSummary2())


class WrongSummary2(EagerBackend):
    """Summaries of the last page of a call belong to the page before."""

    name = "wrong summary"

    def summarize(self, flow: EagerFlow, pool: LayerPool, blocks: torch.Tensor) -> None:
        super().summarize(flow, pool, blocks)
        for field in pool.summaries.values():
            field[:, blocks] = field[:, blocks.roll(1)].clone() if len(blocks) > 1 else 0


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["verify", *arguments])
    return int(exit_.value.code or 0)


def test_exit_code_0(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(f"{mine}:Mine", "--json", "--jobs", "2") == 0
    (report,) = json.loads(capsys.readouterr().out)["flows"]
    assert report["flow"] == "Mine" and report["passed"] is True and report["backend"] == "eager"
    assert {"dtype", "device", "seed", "seconds", "boundary_ulp", "state_drift"} <= set(report)
    assert [check["check"] for check in report["checks"]] == [check.name for check in CHECKS]
    assert all(set(check) == {"check", "passed"} for check in report["checks"])
    assert report["selections"]["equal_to_reference"] <= report["selections"]["compared"] > 100
    assert set(report["worst_of_bound"]) >= {"summary", "score", "lse", "output"}
    assert all(0 < ratio <= 1 for ratio in report["worst_of_bound"].values())
    assert all(count > 0 for count in report["comparisons"].values())


def test_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A fault in the stack: the command runs here, not in a worker, so that the patch is seen."""
    plant_shared_pages(monkeypatch)
    assert command("streaming_llm", "--fuzz", "100", "--jobs", "1", "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] is False and "request" in result["error"]
    assert result["snippet"].startswith("from kvsieve.budget import Budget")
    assert command("streaming_llm", "--fuzz", "100", "--jobs", "1") == 1
    shown = capsys.readouterr().out
    assert shown.startswith("FAULT after ") and "replay it with:" in shown


def test_exit_code_1_of_a_wrong_backend(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from kvsieve.cli import verify as command_line

    report = verify_flow(BLOCK, QUICK, backend=WrongSoftmax())
    monkeypatch.setattr(command_line, "verify_all", lambda *arguments: [report])
    assert command(BLOCK, "--json") == 1
    (shown,) = json.loads(capsys.readouterr().out)["flows"]
    failed = [check for check in shown["checks"] if not check["passed"]]
    assert failed and failed[0]["stage"] == "score" and failed[0]["place"].startswith("layer 0 request")
    assert command(BLOCK) == 1
    assert "FAILED ties: score of layer 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (QUEST, "--all"),
        ("gqa_quest",),
        (QUEST, "--dtype", "fp8"),
        (QUEST, "--backend", "cuda"),
        ("nowhere.py:Mine",),
        (QUEST, "--mutants"),
    ],
)
def test_exit_code_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*arguments) == 2
    assert capsys.readouterr().err.strip()


def test_a_flow_that_cannot_run_is_a_mistake_not_a_verdict(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(f"{mine}:Broken") == 2
    assert "Broken.score: op flip over the page axis" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        FlowError("Mine.score", "a problem", "a remedy", Location("mine.py", 3)),
        UnknownName("flow", "quest", ["gqa_quest"]),
        OutOfPages(3, 2),
        NotCroppable("no"),
        Fault("score", "layer 0", "wrong"),
    ],
)
def test_errors_travel_between_processes(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


def plant_shared_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy-on-write is forgotten: one of two requests that share a partial page overwrites the other's tokens."""
    monkeypatch.setattr(RequestTables, "_shared_and_written", lambda self, entry, count, kept, wanted: [])


def test_a_shrunk_programme_is_minimal_and_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_shared_pages(monkeypatch)
    monkeypatch.setattr(StreamingLLM, "evictable", False)  # a programme that evicts shows it in other events
    result = fuzz(100, flow="streaming_llm")
    assert result.failing is not None and isinstance(result.error, Fault)
    # A request, a token in it, a fork, a token in each of the two: nothing less shows it.
    assert [verb for verb, *_ in result.failing.events] == ["admit", "extend", "fork", "step", "extend"]
    assert all(number < 4 for _, *numbers in result.failing.events for number in numbers)
    with pytest.raises(Fault, match=f"^{result.error.stage} of "):
        exec(result.failing.snippet(), {})
    monkeypatch.undo()
    exec(result.failing.snippet(), {})  # without the fault it is a programme like any other


def test_shrinking_keeps_the_kind_of_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerPool, "enter", lambda self, rows: None)
    seed = next(seed for seed in range(40) if fault_of(random_program(seed, TOKEN)) is not None)
    program = random_program(seed, TOKEN)
    error = fault_of(program)
    smaller = shrink(program, fault_of)
    again = fault_of(smaller)
    assert isinstance(error, Fault) and isinstance(again, Fault) and again.stage == error.stage
    assert len(smaller.events) <= 3


def test_a_programme_is_the_same_in_every_run() -> None:
    assert random_program(7) == random_program(7) != random_program(8)
    first, second = run_program(random_program(3)), run_program(random_program(3))
    assert first == second


def test_a_programme_runs_where_it_says() -> None:
    program = random_program(3, dtype="bf16")
    assert program.dtype == "bf16" and run_program(program) != run_program(random_program(3))
    with pytest.raises((AssertionError, RuntimeError)):
        run_program(random_program(3, device="nowhere"))


def test_forty_programmes() -> None:
    result = fuzz(40)
    assert result.failing is None, result.failing.snippet()
    assert result.events == 2000
    assert {"storage", "summary", "score", "state", "selection", "lse", "output"} <= set(result.numbers.checked)
