"""The parts of the vLLM plug-in for CUDA that need neither: plans of fixed size, and steps on vLLM-shaped caches."""

from __future__ import annotations

import random

import pytest
import torch

from kvsieve import Budget
from kvsieve.integrations.vllm.fixed import (
    DecodeMemory,
    FixedDecoding,
    decode_places,
    filled_pages,
    is_sparse,
)
from kvsieve.integrations.vllm.plan import BatchPlan, Decoding
from test_vllm_parts import random_batch
from vllm_cuda_world import Cache, around

BUDGETS = [Budget(2), Budget(0, 0, 1, 0.3), Budget(7, 3, 4, 0.125), Budget(0, 1, 2)]
SIZES = [(1, 16), (5, 15), (16, 32), (16, 48), (33, 33)]


@pytest.mark.parametrize(("page", "block"), SIZES)
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_fixed_plans_are_the_exact_ones(page: int, block: int, budget: Budget) -> None:
    """Ragged batches one after another in the same memory, padded rows behind them, whatever stood there before."""
    lengths = around(page, block, budget)
    longest, draw = lengths[-1] + 3 * block, random.Random(page)
    cache = Cache(1, 2, block, 400)
    for length in lengths:
        cache.admit(length - 1)
    memory = DecodeMemory(len(lengths) + 3, longest, page, block, torch.device("cpu"))
    memory.table.fill_(-7)
    for _ in range(6):
        some = draw.sample(range(len(lengths)), draw.randint(1, len(lengths)))
        rows = len(some) + draw.randint(0, 3)
        batch = cache.step(some, rows, -(-longest // block))
        fixed = FixedDecoding(memory, batch.lengths, batch.blocks, longest, [(budget, True)])
        exact = Decoding(batch, torch.arange(len(some)), page, block)
        _same_plan(fixed, exact, budget, len(some))
        filled = memory.fill_pages(batch.slots)
        assert filled[filled > 0].tolist() == BatchPlan(batch, page, block).filled.tolist()
        assert filled.data_ptr() == memory.filled.data_ptr() and len(filled) == rows


def _same_plan(fixed: FixedDecoding, exact: Decoding, budget: Budget, real: int) -> None:
    mine, theirs = fixed.quota(budget, True), exact.quota(budget, True, False)
    assert torch.equal(mine.pages[:real], theirs.pages) and torch.equal(mine.count[:real], theirs.count)
    assert not mine.pages[real:].any() and not mine.count[real:].any()
    assert mine.width >= theirs.width and mine.sparse >= theirs.sparse
    assert mine.table is not None
    for row, pages in enumerate(theirs.pages.tolist()):
        assert torch.equal(mine.table[row, :pages], exact.table[row, :pages])
    if theirs.window is None:
        assert mine.window is None or not mine.window.widths.any()
        return
    assert mine.window is not None
    scored = theirs.window.requests
    others = torch.ones(fixed.count, dtype=torch.bool)
    others[scored] = False
    assert torch.equal(mine.window.requests, torch.arange(fixed.count))
    for name in ("widths", "topk"):
        assert torch.equal(getattr(mine.window, name)[scored], getattr(theirs.window, name))
        assert not getattr(mine.window, name)[others].any()
    assert mine.window.width >= theirs.window.width and mine.window.max_topk >= theirs.window.max_topk
    assert mine.window.total_pages >= theirs.window.total_pages


@pytest.mark.parametrize(("page", "block"), SIZES)
def test_what_a_mixed_step_fills_and_decodes(page: int, block: int) -> None:
    draw = random.Random(page)
    for _ in range(30):
        batch, lengths, *_ = random_batch(draw, block, draw.randint(1, 6))
        exact = BatchPlan(batch, page, block)
        places = decode_places(batch)
        assert places.tolist() == ([] if exact.decoding is None else exact.decoding.places.tolist())
        padded = torch.cat([batch.slots, torch.full((draw.randint(0, 3),), -1)])
        filled = filled_pages(padded, page, len(lengths))
        assert filled[filled > 0].tolist() == exact.filled.tolist()
        assert not filled[len(exact.filled) :].any()


def test_whether_anything_is_left_out() -> None:
    asked = [(Budget(2, 1, 1), True), (Budget(5, 1, 1), False)]
    assert [is_sparse(asked, length, 4) for length in (1, 16, 17)] == [False, False, True]
    assert not is_sparse(asked[1:], 28, 4) and is_sparse(asked[1:], 29, 4)
