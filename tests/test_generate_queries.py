"""What generated kernels compute of the queries alone, once for each segment, beside the flow's own code in float64."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

pytest.importorskip("triton")

from generated_world import close, make_world, run_beside_float64
from kvsieve.backends.triton.generate import generate_score, stages
from kvsieve.backends.triton.generate.program import Variant
from kvsieve.flow import Flow, build_flow, load_flow
from kvsieve.graph import Geometry, trace_flow
from test_generate_flows import BOUNDS, GEOMETRIES
from triton_device import DEVICE, NEEDS_GPU_OR_INTERPRETER

pytestmark = NEEDS_GPU_OR_INTERPRETER


class Asking(Flow):
    """Projected queries as rows, reduced over the group, as a condition, and in a softmax over the window."""

    def __init__(self, rank: int = 24) -> None:
        self.basis = torch.randn(80, rank, generator=torch.Generator().manual_seed(1)) / 8

    def low(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.basis[: x.shape[-1]]

    def init_state(self, page_size: int, head_dim: int) -> Mapping[str, torch.Tensor]:
        return {"trail": torch.zeros(3)}

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"k_low": self.low(k.mean(0))}

    def score(
        self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        low = self.low(q)
        strong = low.amax() > 0
        shares = (pages["k_low"] @ low.T).softmax(0).amax(1)
        scores = torch.where(strong, shares, -shares) + 0.1 * (pages["k_low"] * low.amax(0)).sum(-1)
        return scores, {"trail": pages["trail"] * 0.5 + low.sum()}


@pytest.mark.parametrize(("page", "width", "group", "heads"), GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_projected_once(
    page: int, width: int, group: int, heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "HOISTED_PRODUCTS", 256)
    graphs = trace_flow(Asking(), Geometry(page, width, width, group))
    built = generate_score(graphs).built(Variant(heads, dtype if dtype != torch.float32 else None))
    ((ahead, _),) = built.ahead
    assert list(ahead.constants) and not any(kernel.constants for kernel in built.kernels)
    assert not any(kernel.first for kernel in built.kernels), "a score of stored queries starts late"
    world = make_world(graphs, (1, 6, 0, 17), heads, dtype, device=DEVICE)
    run_beside_float64(world, close(BOUNDS[dtype] * 4))


def test_kernels_of_both_forms_project_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads of a page in one tile, or one head at a time."""
    monkeypatch.setattr(stages, "HOISTED_PRODUCTS", 256)
    score = generate_score(trace_flow(Asking(32), Geometry(4, 16, 16, 4)))
    forms = [any(kernel.wide for kernel in score.built(Variant(heads, None)).kernels) for heads in (2, 3)]
    assert forms == [True, False]
    for heads in (2, 3):
        world = make_world(trace_flow(Asking(32), Geometry(4, 16, 16, 4)), (5, 0, 40), heads, device=DEVICE)
        run_beside_float64(world, close(BOUNDS[torch.float32] * 4))


def test_only_long_products_are_computed_ahead() -> None:
    """A mean of queries, or a short product, is cheaper to compute anew in each program than to wait for."""
    for flow in (build_flow("gqa_quest_sparse_attention"), build_flow("h2o"), Asking(1)):
        assert not generate_score(trace_flow(flow, Geometry(16, 20, 20, 3))).built(Variant()).ahead
    loki = generate_score(trace_flow(load_flow("examples/paper_flows.py:Loki"), Geometry(16, 128, 128, 4)))
    assert loki.source.count("slice_2_ptr +") == 1 and loki.source.startswith('"""Loki score')


class Backwards(Flow):
    """Elements picked from queries, in another order."""

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"mean": k.mean(0)}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return (pages["mean"] @ q.flip(-1).T).softmax(0).amax(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_of_queries_are_loaded_in_their_order(dtype: torch.dtype) -> None:
    """No kernel ahead of the stages, and no values that move."""
    graphs = trace_flow(Backwards(), Geometry(3, 20, 20, 3))
    built = generate_score(graphs).built(Variant(3, dtype if dtype != torch.float32 else None))
    assert not built.ahead and "tl.gather(" not in built.source
    assert sum(kernel.dots for kernel in built.kernels) == (dtype == torch.bfloat16)
    run_beside_float64(make_world(graphs, (1, 6, 0, 17), 3, dtype, device=DEVICE), close(BOUNDS[dtype]))
