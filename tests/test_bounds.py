"""Bounds are sharp: four of them in one element are flagged, and honest runs come within a factor of ten."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvsieve.verify.segment
from kvsieve import Budget
from kvsieve.backends.eager import EagerBackend
from kvsieve.flow import Flow, build_flow
from kvsieve.verify import Fault, Numbers
from kvsieve.verify.checks import compare
from kvsieve.verify.data import IidData, LayerShape
from kvsieve.verify.mutants.flow import EveryRule
from kvsieve.verify.twin import Twin, TwinOptions

PAGE, LENGTH = 5, 38
FACTOR = 4.0


class Injecting(EagerBackend):
    """Adds an error to one element of one stage, in the first step."""

    def __init__(self, stage: str = "", error: float = 0.0) -> None:
        self.stage, self.error = stage, error

    def _spoil(self, stage: str, value: torch.Tensor, *index: int) -> None:
        if stage == self.stage:
            value[index] += self.error

    def summarize(self, flow: Any, pool: Any, blocks: torch.Tensor) -> None:
        super().summarize(flow, pool, blocks)
        if len(blocks):
            self._spoil("summary", next(iter(pool.summaries.values())), 0, int(blocks[0]), 0)

    def score(self, flow: Any, q: torch.Tensor, pool: Any, window: Any) -> torch.Tensor:
        scores = super().score(flow, q, pool, window).contiguous()
        self._spoil("score", scores, 0, 0, 1)
        for field in pool.state.values():
            self._spoil("state", field, *[0, int(window.rows[0, 1])] + [0] * (field.dim() - 2))
            break
        return scores

    def attend(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().attend(*arguments)
        out, lse = out.contiguous(), lse.contiguous()
        self._spoil("output", out, 0, 0, 0, 0)
        self._spoil("lse", lse, 0, 0, 0)
        return out, lse


def run(flow: Flow, backend: EagerBackend) -> Numbers:
    options = TwinOptions(flow.page_size or PAGE, (LayerShape(1, 3, 12, 8),))
    twin = Twin(flow, Budget(2, 1, 1), options, IidData(3), backend)
    request = twin.admit()
    twin.extend([request], [LENGTH])
    for _ in range(3):
        twin.step([request])
    return twin.numbers


# What a stage's bound is asked of: the first comparison that the injected element takes part in.
PLACES = {"summary": (0,), "score": (1,), "state": (), "output": (0, 0), "lse": (0,)}


@pytest.mark.parametrize("flow", [EveryRule(), build_flow("h2o_token_sparse_attention")], ids=lambda flow: flow.name)
@pytest.mark.parametrize("stage", PLACES)
@pytest.mark.parametrize("sign", [1, -1])
def test_four_bounds_in_one_element_are_flagged(
    flow: Flow, stage: str, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stage == "summary" and flow.summarize is None:
        return
    bounds: list[float] = []

    def recording(numbers: Numbers, what: str, place: str, received: Any, exact: Any, bound: torch.Tensor) -> None:
        first = what == stage and "prefill" not in place and not bounds
        if first and (stage != "state" or "page 2 " in place):  # the window begins at page 1
            bounds.append(float(bound[PLACES[stage]]))
        compare(numbers, what, place, received, exact, bound)

    monkeypatch.setattr(kvsieve.verify.segment, "compare", recording)
    run(flow, Injecting())
    assert bounds and bounds[0] > 0
    monkeypatch.undo()
    run(flow, Injecting(stage, 0.0))
    with pytest.raises(Fault) as fault:
        run(flow, Injecting(stage, sign * FACTOR * bounds[0]))
    assert fault.value.stage == stage and "times the bound" in str(fault.value)


@pytest.mark.parametrize("flow", [EveryRule(), build_flow("h2o_token_sparse_attention")], ids=lambda flow: flow.name)
def test_honest_runs_come_within_a_factor_of_ten(flow: Flow) -> None:
    worst = run(flow, EagerBackend()).worst
    stages = {"score", "state", "output", "lse"} | ({"summary"} if flow.summarize else set())
    for stage in stages:
        assert 0.1 <= worst[stage] <= 1, (stage, worst)
