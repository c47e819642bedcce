"""Faults that were found by attack once, each as the right value."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvsieve import Budget, ConfigError, Flow, FlowError, Runtime, build_flow
from kvsieve.graph import Geometry, trace_flow
from kvsieve.verify.data import IidData, LayerShape
from kvsieve.verify.twin import Twin, TwinOptions

TABLE = torch.linspace(-1, 1, 64)


class Reinterpreted(Flow):
    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"m": k.mean(0)}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return pages["m"].view(torch.int32).float().sum(-1)


class NarrowCounter(Flow):
    """An int8 counter that wraps around: a 0-dim operand must not widen it."""

    def init_state(self, page_size: int, head_dim: int) -> Mapping[str, torch.Tensor]:
        return {"c": torch.zeros((), dtype=torch.int8)}

    def score(
        self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        c = pages["c"] * 2 + (q.sum(0) > 0).sum() * 20
        return torch.where(c < 0, -1.0, 1.0) * pages["k"].sum((1, 2)), {"c": c}


class ModuleConstant(Flow):
    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return pages["k"].mean(1) @ TABLE[: q.shape[-1]]


def test_bits_are_never_reinterpreted() -> None:
    with pytest.raises(FlowError, match=r"op view on .* not in the op set"):
        trace_flow(Reinterpreted(), Geometry(4, 8, 8, 2))


@pytest.mark.parametrize("flow", [NarrowCounter(), ModuleConstant()])
def test_flows_that_the_batch_once_read_otherwise(flow: Flow) -> None:
    twin = Twin(flow, Budget(2, 1, 1), TwinOptions(3, (LayerShape(2, 3, 8, 8),)), IidData(0))
    requests = [twin.admit(), twin.admit()]
    twin.extend(requests, [31, 20])
    for _ in range(12):
        twin.step(requests)
    assert twin.numbers.agreed == twin.numbers.selections > 40


def test_requests_named_twice_change_nothing() -> None:
    runtime = Runtime("block_sparse_attention", Budget(2), page_size=1)
    request = runtime.admit()
    x = torch.randn(8, 1, 4)
    runtime.extend([request], [8]).attend(0, x, x, x)
    for act in (
        lambda: runtime.crop([request, request], [3, 5]),
        lambda: runtime.reorder([request, request], [0]),
        lambda: runtime.finish([request, request]),
        lambda: runtime.reorder([request, request + 7], [1]),
    ):
        with pytest.raises(ConfigError, match=r"distinct|unknown"):
            act()
    assert runtime.length(request) == 8 and len(runtime.tables[request].blocks) == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        graphs = trace_flow(build_flow("h2o_token_sparse_attention"), Geometry(1, 8, 8, 2))
    finally:
        torch.set_default_dtype(torch.float32)
    assert graphs.state_fields["heavy"].dtype is torch.float32


def test_threads_may_trace_at_once() -> None:
    flows = [build_flow("gqa_quest_sparse_attention") for _ in range(6)]
    with ThreadPoolExecutor(3) as pool:
        traced = list(pool.map(lambda flow: trace_flow(flow, Geometry(4, 8, 8, 2)).score_reads, flows))
    assert traced == [("k_max", "k_min")] * 6


def test_memory_made_in_inference_mode_is_written_outside_it() -> None:
    runtime, x = Runtime("h2o_token_sparse_attention", Budget(2)), torch.randn(9, 2, 4)
    with torch.inference_mode():
        request = runtime.admit()
        runtime.extend([request], [9]).attend(0, x, x, x)
    out = runtime.step([request]).attend(0, x[:1], x[:1], x[:1]).out
    runtime.finish([request])
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"flow": 3}, "flow: expected"),
        ({"flow": NarrowCounter}, "flow: expected"),
        ({"budget": None}, "budget: expected"),
        ({"budget": {}}, "budget: expected"),
        ({"budget": {0: 4}}, "budget: expected"),
        ({"num_blocks": 2.5}, "num_blocks: expected"),
        ({"num_blocks": -5}, "num_blocks: expected"),
    ],
)
def test_wrong_arguments_are_answered(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Runtime(**{"flow": "streaming_llm", "budget": Budget(0), **arguments})
