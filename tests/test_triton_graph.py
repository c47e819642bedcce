"""Steps of a graph on the Triton backend beside ordinary steps of PyTorch ops: one life, many kinds of step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kvsieve import Budget, Runtime
from kvsieve.backends.triton.generate import stages, tuning
from kvsieve.backends.triton.launch import INTERPRETED
from kvsieve.flow import Flow, build_flow, flow_name
from kvsieve.mass import AttentionMass
from kvsieve.paging.table import RequestId
from kvsieve.retention import Evict
from kvsieve.stepgraph import StepGraph
from triton_device import DEVICE, NEEDS_GPU_OR_INTERPRETER

pytestmark = NEEDS_GPU_OR_INTERPRETER
HEADS, GROUP, WIDTH, V_WIDTH = 2, 3, 20, 12


class Everything(Flow):
    """Summaries of K and V, state, mass, and projected queries, in two stages."""

    mass = AttentionMass(decay=0.9)

    def __init__(self) -> None:
        self.basis = torch.randn(WIDTH, 7, generator=torch.Generator().manual_seed(0)) / 4

    def init_state(self, page_size: int, head_dim: int) -> Mapping[str, torch.Tensor]:
        return {"trail": torch.full((2,), 0.5)}

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"low": k.mean(0) @ self.basis, "size": v.abs().amax(0)}

    def score(
        self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        shares = (pages["low"] @ (q @ self.basis).T).softmax(0).amax(1) * pages["size"].sum(1)
        scores = shares + 0.1 * pages["trail"].sum(1) + pages["mass_sum"]
        return scores, {"trail": pages["trail"] * 0.5 + shares[:, None]}


def draw(tokens: int) -> list[torch.Tensor]:
    sizes = ((HEADS * GROUP, WIDTH), (HEADS, WIDTH), (HEADS, V_WIDTH))
    return [torch.randn(tokens, *size, device=DEVICE) for size in sizes]


def happen(step: int, runtime: Runtime, requests: list[RequestId]) -> None:
    """What happens to requests after some of the steps."""
    if step == 1:
        runtime.fork(requests[0])
    elif step == 4:
        runtime.preempt(requests[1])
        runtime.resume(requests[1])
    elif step == 5 and runtime.eviction is None and not runtime.tables.stateful:
        runtime.crop([requests[0]], [runtime.length(requests[0]) - runtime.tables.page_size])


def lives(flow: Flow, page: int, lengths: list[int], **where: Any) -> None:
    """Two runtimes; outputs and lse of every step agree, whatever happens to their requests in between."""
    torch.manual_seed(page)
    runtimes = [Runtime(flow, page_size=page, backend=name, **where) for name in ("eager", "triton")]
    requests = [[runtime.admit() for _ in lengths] for runtime in runtimes]

    def extend(counts: list[int]) -> None:
        new = draw(sum(counts))
        for runtime, mine in zip(runtimes, requests, strict=True):
            runtime.extend(mine, counts).attend(0, *new)

    def body(call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        result = call.attend(0, *inputs)
        return result.out, result.lse

    extend(lengths)
    inputs = draw(len(lengths))
    graph = StepGraph(runtimes[1], requests[1], max(lengths) + 20 * page, body, DEVICE)
    for step in range(8):
        for old, new in zip(inputs, draw(len(lengths)), strict=True):
            old.copy_(new)
        want, got = body(runtimes[0].step(requests[0])), graph.step()
        for mine, theirs in zip(got, want, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5), f"step {step}"
        if step == 2:
            extend([0, page + 1, 2])
        for runtime, mine in zip(runtimes, requests, strict=True):
            happen(step, runtime, mine)
    assert runtimes[0].stats == runtimes[1].stats


SENT = {"lengths", "lengths_ptr", "widths_ptr", "requests_ptr", "requests", "table_ptr", "row_table_ptr", "table",
        "blocks_ptr", "mass_scale_ptr", "unit", "rows", "count"}  # fmt: skip
"""Tensors of a plan, by what kernels call them: they stay where they are."""


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What is launched: kernels, programs and arguments; of tensors their sizes, and where a plan's lie."""
    from triton.runtime.interpreter import InterpretedFunction

    launches: list[tuple[object, ...]] = []

    def frozen(name: str, value: Any) -> object:
        if isinstance(value, tuple):
            return tuple(frozen(name, one) for one in value)
        if isinstance(value, torch.Tensor):
            return name, tuple(value.shape), value.stride(), value.data_ptr() if name in SENT else None
        return name, value

    def record(self: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        arguments = [*zip(self.arg_names, given, strict=False), *named.items()]
        launches.append((self.__name__, grid, *(frozen(*one) for one in arguments)))

    monkeypatch.setattr(InterpretedFunction, "run", record)  # the host knows no result: nothing need run
    return launches


@pytest.mark.skipif(not INTERPRETED, reason="records what the interpreter is asked to run")
@pytest.mark.parametrize("flow", [Everything(), build_flow("gqa_quest_sparse_attention")], ids=flow_name)
def test_every_step_launches_the_same(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph repeats a step: no number may differ from under the budget to beyond it, whatever pages are filled."""
    monkeypatch.setattr(tuning, "MOST_PAGES", 1)  # many chunks, which are dealt out in one row
    page, lengths = 2, (1, 4, 3)
    runtime = Runtime(flow, Budget(2, 1, 1), page_size=page, backend="triton")
    requests = [runtime.admit() for _ in lengths]
    runtime.extend(requests, lengths).attend(0, *draw(sum(lengths)))
    inputs = draw(len(lengths))
    graph = StepGraph(runtime, requests, (60, 14, 14), lambda call: call.attend(0, *inputs).out, DEVICE)
    launches, steps = recorded(monkeypatch), []
    for _ in range(10):
        launches.clear()
        graph.step()
        steps.append(list(launches))
    begun = 1 if flow.mass is not None else 0  # a short prompt's queries count in the step after it, which is no graph
    assert len(steps[-1]) >= 3
    for number, step in enumerate(steps[begun:]):
        for mine, first in zip(step, steps[begun], strict=True):
            assert mine == first, f"step {number}: {mine[0]}"


@pytest.mark.parametrize("page", [1, 5])
def test_a_flow_of_everything(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "HOISTED_PRODUCTS", 64)
    lives(Everything(), page, [6 * page, 1, 3 * page + page // 2 + 1], budget=Budget(2, 1, 2))


def test_a_flow_without_state() -> None:
    lives(build_flow("gqa_quest_sparse_attention"), 3, [16, 2, 21], budget=Budget(2, 1, 1, 0.3))


def test_evicted_tokens() -> None:
    lives(build_flow("h2o"), 4, [13, 3, 12], retention=Evict(13, 2, 3))
