"""What a step must leave alone, and what no launch may miss: recycled pages, the null block, late starts, long rows."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

pytest.importorskip("triton")

from generated_world import close, make_world, run_beside_float64
from kvsieve.backends import get_backend
from kvsieve.backends.triton.generate import generate_score, generate_summarize, stages
from kvsieve.backends.triton.generate.program import Variant
from kvsieve.backends.triton.select import select
from kvsieve.budget import Budget
from kvsieve.flow import Flow, build_flow
from kvsieve.graph import Geometry, trace_flow
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import Writes
from kvsieve.runtime import Runtime
from triton_device import DEVICE, NEEDS_GPU_OR_INTERPRETER
from triton_world import quota_of

pytestmark = NEEDS_GPU_OR_INTERPRETER


@pytest.mark.parametrize("heads", [2, 3])
def test_recycled_pages_and_the_null_block(heads: int) -> None:
    """A page that a step does not fill gets no summary of what lay there before; padding writes nothing at all."""
    page, width, v_width = 4, 16, 8
    graphs = trace_flow(build_flow("gqa_quest_sparse_attention"), Geometry(page, width, v_width, 3))
    pool = LayerPool(
        heads, page, width, v_width, torch.float32, DEVICE, graphs.summary_fields, graphs.state_fields, page_major=True
    )
    pool.reserve(9, 1)
    torch.manual_seed(0)
    fields = {"k": pool.k, "v": pool.v, **pool.summaries}
    for field in fields.values():
        field.copy_(torch.randn(field.shape))
    before = {name: field.clone() for name, field in fields.items()}
    blocks, offsets = (torch.tensor(x, device=DEVICE) for x in ([7, 0, 3, 0, 5, 2], [1, 3, 3, 0, 2, 0]))
    new = torch.randn(6, heads, width + v_width, device=DEVICE)
    k, v = new.split((width, v_width), -1)
    backend = get_backend("triton")
    filled = blocks[offsets == page - 1]
    backend.store(backend.prepare(graphs, DEVICE), pool, Writes(blocks, offsets, filled, blocks[:0], step=True), k, v)
    real = blocks > 0
    for name, given in (("k", k), ("v", v)):
        before[name][:, blocks[real], offsets[real]] = given[real].transpose(0, 1)
    before["k_max"][:, 3], before["k_min"][:, 3] = pool.k[:, 3].amax(1), pool.k[:, 3].amin(1)
    for name, field in fields.items():
        assert torch.equal(field, before[name]), name


class Later(Flow):
    """A projected query beside what all pages together hold: known only once they have been seen."""

    def __init__(self) -> None:
        self.basis = torch.randn(20, 6, generator=torch.Generator().manual_seed(1)) / 4

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        low, mean = q @ self.basis, pages["k"][:, 0].mean(0) @ self.basis
        return (pages["k"][:, 0] @ self.basis @ (low * mean).T).amax(1) + (low @ mean).sum()


def test_queries_that_meet_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "HOISTED_PRODUCTS", 1)
    graphs = trace_flow(Later(), Geometry(3, 20, 20, 3))
    assert [op.kind for op in generate_score(graphs).plan.hoisted] == ["contract"]
    run_beside_float64(make_world(graphs, (3, 0, 40), 2, device=DEVICE), close(5e-6))


@pytest.mark.parametrize("name", ["h2o", "gqa_block_sparse_attention", "h2o_token_sparse_attention"])
def test_only_the_first_kernel_of_a_score_may_start_early(name: str) -> None:
    """Those behind it read what it has stored; a summary reads what the kernel before has written."""
    graphs = trace_flow(build_flow(name), Geometry(1, 16, 16, 3))
    kernels = generate_score(graphs).built(Variant(2, None)).kernels
    assert [kernel.first for kernel in kernels] == [True] + [False] * (len(kernels) - 1) and len(kernels) > 1
    assert all("LATE" not in kernel.source for kernel in kernels[1:])
    if graphs.summarize is not None:
        assert not generate_summarize(graphs).built(Variant(2, None)).kernels[0].first


@pytest.mark.parametrize(("width", "k"), [(140_000, 64), (37_000, 33_000)])
def test_more_pages_than_sixteen_bits_count(width: int, k: int) -> None:
    """The last ones are the best."""
    quota = quota_of([width], k, [0])
    scores = torch.arange(width, dtype=torch.float32)[None, None].to(DEVICE)
    chosen = select(scores, quota, 1).pages[0, 0]
    assert torch.equal(chosen[quota.sink : quota.sink + k].cpu(), torch.arange(width - k, width) + quota.sink)


def test_the_list_of_requests_under_their_budget() -> None:
    """All pages in order, of every request and head; mass is added by it."""
    runtime = Runtime("h2o", Budget(5, 1, 1), page_size=2, backend="triton")
    requests = [runtime.admit() for _ in range(2)]
    for tokens, call in ((9, runtime.extend(requests, [3, 6])), (2, None)):
        new = [torch.randn(tokens, heads, 16, device=DEVICE) for heads in (6, 2, 2)]
        result = (call or runtime.step(requests)).attend(0, *new)
    assert result.selection is not None and result.selection.count.tolist() == [2, 4]
    for listed, count in zip(result.selection.pages.tolist(), (2, 4), strict=True):
        assert [head[:count] for head in listed] == [list(range(count))] * 2
