"""Values that are the same for every page, where pages meet: generated kernels beside the flows' code in float64."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

pytest.importorskip("triton")

from generated_world import close, make_world, run_beside_float64
from kvsieve.backends.triton.generate import generate_score, stages
from kvsieve.flow import Flow
from kvsieve.graph import Geometry, trace_flow
from triton_device import DEVICE, NEEDS_GPU_OR_INTERPRETER

pytestmark = NEEDS_GPU_OR_INTERPRETER


class SameForAll(Flow):
    """A number of each query, the same for all pages: by itself, and the sum, mean, votes and running sum of it."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.basis = torch.randn(80, 5, generator=torch.Generator().manual_seed(1))

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        low = q @ self.basis[: q.shape[-1]]
        same = low.amax(1)[:, None].expand(-1, pages["position"].shape[0])  # [G, W]
        if self.what == "votes":
            return torch.nn.functional.avg_pool1d(same, 3, 1, 1).sum(0)
        if self.what == "late votes":  # of what is known once all pages have been seen
            shares = (same + 0.1 * pages["position"]).softmax(1).amax(1)[:, None].expand(same.shape)
            return torch.nn.functional.avg_pool1d(shares, 3, 1, 1).sum(0)
        if self.what == "best":
            return torch.nn.functional.max_pool1d(same, 3, 1, 1).sum(0) + same.mean(1).sum()
        return same.amax(0) if self.what == "itself" else same.cumsum(1).sum(0) * 0.01


@pytest.mark.parametrize("what", ["itself", "votes", "late votes", "best", "running"])
@pytest.mark.parametrize(("page", "width", "group", "heads"), [(5, 20, 3, 3), (4, 16, 4, 2)])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_value_without_pages(
    what: str, page: int, width: int, group: int, heads: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that read no field; a neighbour's value is the page's own, and nothing beyond the window's ends."""
    monkeypatch.setattr(stages, "HOISTED_PRODUCTS", 1 if ahead else 1 << 30)
    graphs = trace_flow(SameForAll(what), Geometry(page, width, width, group))
    assert len(generate_score(graphs).plan.hoisted) == ahead
    run_beside_float64(make_world(graphs, (1, 6, 0, 17), heads, device=DEVICE), close(5e-6))
