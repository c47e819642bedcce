"""Fields of several axes as matrices of tensor cores, and elements that are picked from what is stored, beside the
flow's own code in float64."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import torch

pytest.importorskip("triton")

from generated_world import close, make_world, run_beside_float64, store_token_by_token
from kvsieve.backends.triton.generate import generate_score, generate_summarize
from kvsieve.backends.triton.generate.program import Variant
from kvsieve.flow import Flow
from kvsieve.graph import Geometry, trace_flow
from kvsieve.mass import AttentionMass
from test_generate_flows import BOUNDS
from triton_device import DEVICE, NEEDS_GPU_OR_INTERPRETER

pytestmark = NEEDS_GPU_OR_INTERPRETER
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
WIDTHS = (1, 9, 0, 40)


class Labels(Flow):
    """A few channels of every key, stored channel by channel or token by token; scored as stored or turned.

    ``computed``: the query rows are no stored values.
    """

    def __init__(self, channels: int, across: bool, turned: bool, computed: bool = False) -> None:
        self.channels, self.across, self.turned, self.computed = channels, across, turned, computed

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        label = k[:, : self.channels]
        return {"label": label.T if self.across else label}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        q, label = q[:, : self.channels], pages["label"]
        q = q / (1.0 + q.square().sum(-1, keepdim=True)) if self.computed else q
        label = label if self.across else label.transpose(1, 2)  # [W, channels, p]
        products = (label.transpose(1, 2) @ q.T).transpose(1, 2) if self.turned else q @ label  # [W, G, p]
        return products.amax(2).sum(1)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize(
    ("channels", "page", "group", "dots", "loaded"),
    [
        (8, 16, 3, 1, True),  # half of the sum is zeros
        (12, 4, 7, 1, True),  # padded, then zeros
        (20, 32, 24, 1, True),
        (16, 1, 3, 1, True),  # pages of one token
        (7, 16, 3, 0, False),  # too short a sum
        (20, 5, 7, 1, False),  # rows of pages are padded
        (8, 33, 3, 0, False),
    ],
)
def test_fields_are_loaded_as_matrices(
    channels: int, page: int, group: int, dots: int, loaded: bool, across: bool, dtype: torch.dtype
) -> None:
    """Whichever axis is summed, if no other one is padded."""
    flow = Labels(channels, across, page == 4)
    graphs = trace_flow(flow, Geometry(page, 80, 80, group))
    (kernel,) = generate_score(graphs).built(Variant(3, dtype)).kernels
    assert kernel.dots == dots and ("label_matrix = tl.load(" in kernel.source) == loaded
    assert not loaded or not re.search(r"tl\.(permute|reshape)\(label", kernel.source)
    run_beside_float64(make_world(graphs, WIDTHS, 3, dtype, device=DEVICE), close(BOUNDS[dtype]))


@pytest.mark.parametrize("channels", [8, 12, 40])
def test_computed_rows_times_labels(channels: int) -> None:
    graphs = trace_flow(Labels(channels, True, False, True), Geometry(4, 80, 80, 3))
    (kernel,) = generate_score(graphs).built(Variant(3)).kernels
    assert kernel.dots == kernel.source.count("f.in_parts(") == kernel.source.count("label_matrix = tl.load(") == 1
    run_beside_float64(make_world(graphs, WIDTHS, 3, BF16, device=DEVICE), close(BOUNDS[BF16]))


class Crossed(Flow):
    """Two axes beside the summed one, apart in memory, and a first axis of size 1."""

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"parts": k.unflatten(1, (16, 2))[None], "low": k[None, :1]}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        parts = torch.einsum("gd,wtdh->wtgh", q[:, :16], pages["parts"][:, 0])
        return parts.amax((1, 3)).sum(1) + (pages["low"][:, 0, 0] @ q.T).amax(1)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_axes_apart_in_memory(dtype: torch.dtype) -> None:
    graphs = trace_flow(Crossed(), Geometry(4, 32, 32, 3))
    source = generate_score(graphs).source
    assert source.count("parts_matrix = tl.load(") == source.count("low_matrix = tl.load(") == 1
    run_beside_float64(make_world(graphs, WIDTHS, 3, dtype, device=DEVICE), close(BOUNDS[dtype]))


class Strongest(Flow):
    """Channels of every key where the queries are largest: SparQ's (arXiv 2312.04985) first step."""

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        channels = q.abs().sum(0).topk(8).indices
        return (pages["k"][:, :, channels] @ q[:, channels].T).amax((1, 2))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("page", [1, 5, 16])
def test_channels_that_queries_choose(page: int, dtype: torch.dtype) -> None:
    """They are chosen once, ahead of all stages; of K nothing else is read."""
    graphs = trace_flow(Strongest(), Geometry(page, 80, 80, 3))
    built = generate_score(graphs).built(Variant(4, dtype if dtype != FP32 else None))
    (kernel,), ((ahead, _),) = built.kernels, built.ahead
    assert kernel.loaded == 8 * page and not kernel.wide and "tl.gather(" not in kernel.source
    assert not any("q_ptr" in one.name for one in kernel.arguments) and "q_ptr" in ahead.source
    run_beside_float64(make_world(graphs, WIDTHS, 4, dtype, device=DEVICE), close(BOUNDS[dtype]))


class Picking(Flow):
    """Picks from K, from V, from fields and from the queries; one of them differs by query head."""

    def __init__(self) -> None:
        self.twice = torch.tensor([2, 2, 0])

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"ends": k[[0, -1]], "few": v[:, self.twice]}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        own = torch.gather(q, 1, torch.arange(q.shape[0])[:, None] * 2)  # [G, 1]
        ends = pages["ends"].flip(1) * q.flip(-1)[0]
        few = pages["few"][:, :, self.twice]
        return ends.abs().sum((1, 2)) + few.abs().sum((1, 2)) + own.abs().sum()  # no sum that cancels


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("page", "width", "heads"), [(1, 80, 3), (5, 20, 3), (16, 16, 4)])
def test_picked_elements(page: int, width: int, heads: int, dtype: torch.dtype) -> None:
    """Summaries load the tokens and channels that they keep."""
    graphs = trace_flow(Picking(), Geometry(page, width, width, 3))
    kernel = generate_summarize(graphs).built(Variant(heads, None)).kernels[0]
    assert kernel.loaded == min(2, page) * width + 3 * page and not kernel.wide
    run_beside_float64(make_world(graphs, WIDTHS, heads, dtype, device=DEVICE), close(BOUNDS[dtype]))


@pytest.mark.parametrize(("page", "pages", "warps"), [(1, 32, 2), (16, 8, 1), (64, 2, 1), (512, 1, 4)])
def test_tiles_of_many_rows(page: int, pages: int, warps: int) -> None:
    """A warp for 128 rows of a product, of a page at least; two for fewer."""
    built = generate_score(trace_flow(Labels(16, False, False), Geometry(page, 16, 16, 4))).built(Variant())
    (kernel,), (tile,) = built.kernels, built.tilings
    assert kernel.fewest_rows == kernel.most_rows == page
    assert (tile.pages, tile.warps) == (pages, warps)


class Twice(Flow):
    """One field in two products and as it is; another product is taller."""

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"ends": k[[0, -1]]}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        ends = pages["ends"]
        low, high = (ends @ q.T).amin((1, 2)), (ends @ q.clamp(min=0).T).amax((1, 2))
        return low + high + ends.square().sum((1, 2)) + (pages["k"] @ q.T).amax((1, 2))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_matrix_is_loaded_once(dtype: torch.dtype) -> None:
    graphs = trace_flow(Twice(), Geometry(4, 80, 80, 3))
    (kernel,) = generate_score(graphs).built(Variant(3)).kernels
    assert kernel.dots == 3 and (kernel.fewest_rows, kernel.most_rows) == (2, 4)
    assert kernel.source.count("tl.load(ends_ptr") + kernel.source.count("tl.load(\n            ends_ptr") == 2
    run_beside_float64(make_world(graphs, WIDTHS, 3, dtype, device=DEVICE), close(BOUNDS[dtype]))


class Scaled(Flow):
    """Picked channels in a product of a later stage, behind a maximum over the window."""

    def __init__(self) -> None:
        self.channels = torch.arange(16)

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"mean": k.mean(0)}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scale = pages["mean"].abs().amax(0)[:16]
        few = pages["k"][:, :, self.channels]
        return ((q[:, self.channels] * scale) @ few.transpose(1, 2)).amax((1, 2))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_picked_elements_are_loaded_where_they_are_needed(dtype: torch.dtype) -> None:
    """Storing them for a later stage would move more."""
    graphs = trace_flow(Scaled(), Geometry(16, 64, 64, 4))
    program = generate_score(graphs)
    assert not any(stage.stored for stage in program.plan.stages)
    assert [kernel.loaded for kernel in program.built(Variant(4)).kernels] == [64, 256]
    run_beside_float64(make_world(graphs, WIDTHS, 4, dtype, device=DEVICE), close(BOUNDS[dtype]))


class Everything(Flow):
    """Matrices of three heights, and picks from K, from mass, and from a state field that is written back."""

    mass = AttentionMass()

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"label": k[:, :8].T, "few": k[:4, :12], "low": k[:2, :16].unflatten(1, (4, 4)).flatten(1)}

    def init_state(self, page_size: int, head_dim: int) -> Mapping[str, torch.Tensor]:
        return {"trail": torch.zeros(4, 8)}

    def score(
        self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        scores = (q[:, :8] @ pages["label"]).amax((1, 2)) + (pages["few"] @ q[:, :12].T).amin((1, 2))
        scores = (
            scores + (pages["low"] @ q[:, 4:20].T).amax((1, 2)) + (pages["trail"].flip(2) @ q[:, :8].T).amax((1, 2))
        )
        scores = scores + pages["mass"][:, [0, -1]].sum(1) + 0.1 * pages["k"][:, [-1, 0, 1]].sum((1, 2))
        trail = pages["trail"].flip(1)[:, :, [7, 6, 5, 4, 3, 2, 1, 0]]
        return scores + pages["trail"][:, [3, 0]].sum((1, 2)), {"trail": 0.5 * trail}


class Keys(Flow):
    """All of K as a matrix."""

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.einsum("wpd,gd->wpg", pages["k"], q).amax((1, 2))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("flow", "page", "heads"), [(Everything(), 16, 3), (Everything(), 5, 4), (Keys(), 16, 3)])
def test_wherever_fields_lie(flow: Flow, page: int, heads: int, dtype: torch.dtype, apart: bool) -> None:
    """Blocks or state rows, pages whole or token by token, mass in its unit."""
    world = make_world(trace_flow(flow, Geometry(page, 80, 80, 3)), WIDTHS, heads, dtype, device=DEVICE)
    if apart:
        store_token_by_token(world.pool)
    run_beside_float64(world, close(BOUNDS[dtype]))
