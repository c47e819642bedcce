"""Bounds are sharp: four of them in one element are flagged, and honest runs come within a factor of ten."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

import kvsieve.verify.segment
from kvsieve import Budget
from kvsieve.backends.eager import EagerBackend
from kvsieve.flow import Flow, build_flow
from kvsieve.graph import Geometry, trace_flow
from kvsieve.verify import Fault, Numbers
from kvsieve.verify.checks import compare
from kvsieve.verify.data import IidData, LayerShape
from kvsieve.verify.mutants.flow import EveryRule
from kvsieve.verify.rounding import F64, attention_spread, graph_spread
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
        for field in list(pool.summaries.values())[:1]:
            for block in blocks[:1].tolist():
                self._spoil("summary", field, 0, block, 0)

    def score(self, flow: Any, q: torch.Tensor, pool: Any, window: Any) -> torch.Tensor:
        scores = super().score(flow, q, pool, window).contiguous()
        self._spoil("score", scores, 0, 0, 1)
        for field in list(pool.state.values())[:1]:
            self._spoil("state", field, 0, int(window.rows[0, 1]))
        return scores

    def attend(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        out, lse, mass = super().attend(*arguments)
        out, lse = out.contiguous(), lse.contiguous()
        self._spoil("output", out, 0, 0, 0, 0)
        self._spoil("lse", lse, 0, 0, 0)
        return out, lse, mass


def run(flow: Flow, backend: EagerBackend, steps: int = 3) -> Numbers:
    options = TwinOptions(flow.page_size or PAGE, (LayerShape(1, 3, 12, 8),))
    twin = Twin(flow, Budget(2, 1, 1), options, IidData(3), backend)
    request = twin.admit()
    twin.extend([request], [LENGTH])
    for _ in range(steps):
        twin.step([request])
    return twin.numbers


# Which element of a stage's first comparison is the injected one.
PLACES = {"summary": (0,), "score": (1,), "state": (), "output": (0, 0), "lse": (0,)}
FLOWS = {"every_rule": EveryRule(), "h2o_token": build_flow("h2o_token_sparse_attention")}


@lru_cache(None)
def bounds_of(flow: str) -> dict[str, float]:
    """The derived bound of the element into which each stage's error goes."""
    bounds: dict[str, float] = {}

    def recording(numbers: Numbers, stage: str, place: str, received: Any, exact: Any, bound: torch.Tensor) -> None:
        elsewhere = stage == "state" and "page 2 " not in place  # the window begins at page 1
        if "prefill" not in place and not elsewhere and stage not in bounds:
            bounds[stage] = float(bound[PLACES[stage]])
        compare(numbers, stage, place, received, exact, bound)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvsieve.verify.segment, "compare", recording)
        run(FLOWS[flow], Injecting())
    return bounds


@pytest.mark.parametrize(
    "flow,stage", [("every_rule", stage) for stage in PLACES] + [("h2o_token", stage) for stage in ("score", "state")]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_four_bounds_in_one_element_are_flagged(flow: str, stage: str, sign: int) -> None:
    error = FACTOR * bounds_of(flow)[stage]
    assert error > 0
    with pytest.raises(Fault) as fault:
        run(FLOWS[flow], Injecting(stage, sign * error))
    assert fault.value.stage == stage and "times the bound" in str(fault.value)


@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
def test_honest_runs_come_within_a_factor_of_ten(flow: Flow) -> None:
    worst = run(flow, EagerBackend(), steps=16).worst
    stages = {"score", "state", "output", "lse"} | ({"summary"} if flow.summarize else set())
    for stage in stages:
        assert 0.1 <= worst[stage] <= 1, (stage, worst)


@pytest.mark.parametrize("width", [64, 192, 256])
def test_bounds_hold_for_products_added_one_by_one(width: int) -> None:
    """Large logits of wide heads, in plain float32."""
    torch.manual_seed(width)
    q, k, v = (torch.randn(n, width) for n in (30, 300, 300))
    q = q * 3
    logits = torch.zeros(30, 300)
    for x, y in zip(q.T, k.T, strict=True):
        logits += x[:, None] * y
    out = torch.softmax(logits * width**-0.5, -1) @ v
    seen = torch.ones(30, 300, dtype=torch.bool)
    exact, bound = attention_spread(q.to(F64)[:, None], k.to(F64), v.to(F64), seen, width**-0.5, None, None)
    assert 0.1 < float(((out[:, None] - exact["out"]).abs() / bound["out"]).max()) <= 1


def on_tensor_cores(terms: torch.Tensor) -> torch.Tensor:
    """Sums over the last axis, 16 terms at a time, each cut off one bit below the last of the largest among them."""
    total = torch.zeros(terms.shape[:-1], dtype=F64)
    for some in terms.split(16, -1):
        together = torch.cat([total[..., None], some], -1)
        largest = torch.exp2(together.abs().amax(-1).log2().floor())
        total = (torch.trunc(together / largest[..., None] * 2.0**24).sum(-1) * largest / 2**24).float().to(F64)
    return total


@pytest.mark.parametrize("width", [80, 128])
def test_a_bound_for_tensor_cores_holds_what_they_cut_off(width: int) -> None:
    """Scores of one sign, whose errors have one sign too: a tenth of the bound, and more than rounding may bring."""
    torch.manual_seed(0)
    graphs = trace_flow(build_flow("gqa_quest_sparse_attention"), Geometry(5, width, width, 3, 1.0, 0), {})
    assert graphs.score is not None
    q, k_min = torch.rand(3, width).half().to(F64) + 1, torch.rand(9, width).half().to(F64) + 1
    inputs = {"q": q, "k_min": k_min, "k_max": k_min + 1}
    computed = on_tensor_cores(q[:, None] * inputs["k_max"]).amax(0)
    exact, bound = graph_spread(graphs.score, inputs, tensor_cores=True)
    rounding = graph_spread(graphs.score, inputs)[1]
    error = (computed - exact["scores"]).abs()
    assert 0.1 < float((error / bound["scores"]).max()) <= 1
    assert float((error / rounding["scores"]).max()) > 1


class MadeOnTheWay(Flow):
    """Multiplies by a matrix that it makes, and by a share of what it counts."""

    def score(self, q: torch.Tensor, pages: Any) -> torch.Tensor:
        ones = torch.ones(q.shape[-1], 3)
        counted = (pages["k"] > 0).sum((1, 2)) / 3
        return (pages["k"].sum(1) @ ones).sum(-1) * counted


def test_what_a_graph_makes_is_as_exact_as_what_it_is_given() -> None:
    graphs = trace_flow(MadeOnTheWay(), Geometry(4, 20, 20, 3))
    assert graphs.score is not None
    inputs = {"q": torch.randn(3, 20, dtype=F64), "k": torch.randn(9, 4, 20, dtype=F64)}
    exact, bound = graph_spread(graphs.score, inputs, tensor_cores=True)
    k = inputs["k"]
    wanted = 3 * k.sum((1, 2)) * ((k > 0).sum((1, 2)).to(F64) / 3)
    assert torch.allclose(exact["scores"], wanted, rtol=1e-13, atol=1e-13)
    assert bool((bound["scores"] > 0).all()) and bool(bound["scores"].isfinite().all())
