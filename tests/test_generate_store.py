"""A step's tokens are stored and the pages they fill summarized by one generated kernel: beside the flow's own code."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvsieve.backends import get_backend
from kvsieve.backends.triton.generate import SummarizeProgram
from kvsieve.budget import Budget
from kvsieve.flow import build_flow
from kvsieve.graph import Geometry, trace_flow
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import Writes
from kvsieve.runtime import Runtime
from kvsieve.stepgraph import StepGraph
from kvsieve.verify.poison import poisoned_pools
from triton_device import DEVICE, NEEDS_GPU_OR_INTERPRETER

pytestmark = NEEDS_GPU_OR_INTERPRETER


@pytest.mark.parametrize(
    ("page", "width", "v_width", "heads"), [(5, 20, 12, 3), (33, 80, 80, 2), (1, 20, 12, 3), (4, 16, 16, 2)]
)
@pytest.mark.parametrize("page_major", [True, False])
@pytest.mark.parametrize("strided", [False, True])
def test_a_step_is_stored_and_summarized(
    page: int, width: int, v_width: int, heads: int, page_major: bool, strided: bool
) -> None:
    """Requests at every offset of a page; only those at the last one get a summary, of all tokens of their page."""
    torch.manual_seed(page)
    graphs = trace_flow(build_flow("gqa_quest_sparse_attention"), Geometry(page, width, v_width, 3))
    with poisoned_pools():
        fields = graphs.summary_fields, graphs.state_fields
        pool = LayerPool(heads, page, width, v_width, torch.float32, DEVICE, *fields, page_major=page_major)
        pool.reserve(page + 9, 1)
    offsets = torch.tensor([*range(page), page - 1, 0, page - 1], device=DEVICE)
    blocks = (torch.randperm(len(offsets) + 4) + 1)[: len(offsets)].to(DEVICE)
    for block, offset in zip(blocks.tolist(), offsets.tolist(), strict=True):
        pool.k[:, block, :offset] = torch.randn(heads, offset, width)
        pool.v[:, block, :offset] = torch.randn(heads, offset, v_width)
    before_k, before_v = pool.k.clone(), pool.v.clone()
    shape = (heads, width + v_width, len(offsets)) if strided else (len(offsets), heads, width + v_width)
    new = torch.randn(shape).to(DEVICE)
    k, v = (new.permute(2, 0, 1) if strided else new).split((width, v_width), -1)
    backend = get_backend("triton")
    flow = backend.prepare(graphs, DEVICE)
    filled = blocks[offsets == page - 1]
    backend.store(flow, pool, Writes(blocks, offsets, filled, blocks[:0], step=True), k, v)
    before_k[:, blocks, offsets], before_v[:, blocks, offsets] = k.transpose(0, 1), v.transpose(0, 1)
    for stored, wanted in ((pool.k, before_k), (pool.v, before_v)):
        torch.testing.assert_close(stored, wanted, rtol=0, atol=0, equal_nan=True)
    for name, wanted in (("k_max", before_k.amax(2)), ("k_min", before_k.amin(2))):
        others = torch.ones(wanted.shape[1], dtype=torch.bool, device=DEVICE)
        others[filled] = False
        assert torch.equal(pool.summaries[name][:, filled], wanted[:, filled])
        assert pool.summaries[name][:, others].isnan().all()


def test_which_steps_take_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step always, as it may fill pages later; one by itself if it fills a page; a prompt never."""
    stored: list[int] = []
    own = SummarizeProgram.store
    monkeypatch.setattr(SummarizeProgram, "store", lambda self, *rest: (stored.append(1), own(self, *rest))[1])
    runtime = Runtime(build_flow("gqa_quest_sparse_attention"), Budget(1, 1, 1), page_size=4, backend="triton")
    request = runtime.admit()

    def new(tokens: int) -> list[torch.Tensor]:
        return [torch.randn(tokens, heads, 16, device=DEVICE) for heads in (4, 2, 2)]

    runtime.extend([request], [8]).attend(0, *new(8))
    assert not stored
    for count in (0, 0, 0, 1, 1):  # tokens 9 to 13
        runtime.step([request]).attend(0, *new(1))
        assert len(stored) == count
    draw = new(1)
    graph = StepGraph(runtime, [request], 20, lambda call: call.attend(0, *draw).out, DEVICE)
    graph.step()
    assert len(stored) == 2
