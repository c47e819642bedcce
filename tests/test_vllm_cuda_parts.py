"""The parts of the vLLM plug-in for CUDA that need neither: plans of fixed size, and steps on vLLM-shaped caches."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kvsieve import Budget, ConfigError
from kvsieve.integrations.vllm.fixed import DecodeMemory, FixedDecoding, filled_pages, leaves_pages_out
from kvsieve.integrations.vllm.group import refuse_what_does_not_fit
from kvsieve.integrations.vllm.plan import Batch, BatchPlan, Decoding
from test_vllm_parts import random_batch
from vllm_cuda_world import DEVICE, Cache, Captured, World, around

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
def test_what_a_mixed_step_fills(page: int, block: int) -> None:
    draw = random.Random(page)
    for _ in range(30):
        batch, lengths, *_ = random_batch(draw, block, draw.randint(1, 6))
        exact = BatchPlan(batch, page, block)
        padded = torch.cat([batch.slots, torch.full((draw.randint(0, 3),), -1)])
        filled = filled_pages(padded, page, len(lengths))
        assert filled[filled > 0].tolist() == exact.filled.tolist()
        assert not filled[len(exact.filled) :].any()


def test_whether_anything_is_left_out() -> None:
    asked = [(Budget(2, 1, 1), True), (Budget(5, 1, 1), False)]
    assert [leaves_pages_out(asked, length, 4) for length in (1, 16, 17)] == [False, False, True]
    assert not leaves_pages_out(asked[1:], 28, 4) and leaves_pages_out(asked[1:], 29, 4)


def test_plans_wait_for_no_device() -> None:
    """On tensors without values: whoever asks for one fails."""
    budget, nowhere = Budget(2, ratio=0.1), torch.device("meta")
    memory = DecodeMemory(4, 300, 4, 16, nowhere)
    lengths, blocks = (torch.zeros(shape, dtype=torch.int32, device=nowhere) for shape in ((4,), (4, 19)))
    slots = torch.zeros(4, dtype=torch.int64, device=nowhere)
    quota = FixedDecoding(memory, lengths, blocks, 300, [(budget, True)]).quota(budget, True)
    assert quota.window is not None and (quota.width, quota.window.width) == (7, 75 - 3)
    memory.fill_pages(slots), filled_pages(slots, 4, 4)
    with pytest.raises(RuntimeError, match="meta tensors"):
        int(quota.count.max())


QUEST = "gqa_quest_sparse_attention"
SMALL = {"topk": 2, "sink": 1, "recent": 1}
CASES = [  # flow, budget, page, block, heads, group, width, dtype
    (QUEST, SMALL, 16, 32, 2, 3, 20, torch.float32),
    (QUEST, SMALL, 16, 48, 1, 7, 80, torch.float16),
    (QUEST, {"topk": 3, "sink": 2, "recent": 2}, 1, 16, 2, 3, 20, torch.float32),
    ("gqa_block_sparse_attention", {"ratio": 0.3, "sink": 0, "recent": 1}, 5, 15, 3, 3, 20, torch.float16),
    ("gqa_h2o_sparse_attention", SMALL, 16, 16, 2, 4, 64, torch.float16),
    ("streaming_llm", {"sink": 1, "recent": 2}, 33, 33, 2, 7, 20, torch.float32),
]


@pytest.mark.parametrize(("flow", "budget", "page", "block", "heads", "group", "width", "dtype"), CASES, ids=str)
def test_a_captured_step_serves_later_batches(
    flow: str,
    budget: dict,
    page: int,
    block: int,
    heads: int,
    group: int,
    width: int,
    dtype: torch.dtype,
) -> None:
    """Captured on a dummy batch; then the same objects run batches of other requests at other lengths, as a graph does.

    Every step is held against the float64 reference: around the ends of pages, blocks and the budget, with blocks that
    hold what an ended request has left there, tables full of old numbers, and padding.
    """
    kept = Budget(**{"topk": 0, **budget})
    lengths = around(page, block, kept)
    cache = Cache(heads, width, block, 60 + sum(lengths) // block, dtype)
    world = World({"flow": flow, "budget": budget, "page_size": page}, cache, group, longest=lengths[-1] + 2 * block)
    captured = Captured(world, 6)
    draw = random.Random(page)
    live = [world.admit(length - 1) for length in lengths]
    for _ in range(4):
        some = draw.sample(live, min(len(live), draw.randint(3, 6)))
        batch = cache.step(some, 6, world.columns)
        out = captured.run(batch)
        assert not out[: len(some)].isnan().any() and not out[len(some) :].any(), "padding is 0"
        gone = live.pop(draw.randrange(len(live)))
        cache.end(gone)
        live.append(world.admit(draw.choice(lengths) - 1))
    seen = world.oracle.numbers
    assert seen.checked["output"] >= 12 * heads and seen.selections > 3
    assert world.engine.counters.sparse_rows > 3


def test_mixed_and_single_steps_without_graphs() -> None:
    """Rows of a mixed batch by their places; the last token of a prompt, alone in its chunk, is not decoded."""
    cache = Cache(2, 20, 32, 60)
    settings = {"flow": QUEST, "budget": SMALL, "page_size": 16, "audit_every": 1}
    world = World(settings, cache, 3, longest=512, graphs=False)
    live = [world.admit(length) for length in (70, 130, 33)]
    new = cache.admit(0)
    for count, decoding in ((31, [1, 0]), (1, [0, 2]), (0, [2, 1, 0])):
        batch = cache.step(decoding, len(decoding), world.columns)
        if count:
            chunk = cache.chunk(new, count, world.columns)
            batch = Batch(
                torch.cat([chunk.starts, batch.starts[1:] + count]),
                *(torch.cat([getattr(chunk, name), getattr(batch, name)]) for name in ("lengths", "prefilling")),
                *(torch.cat([getattr(chunk, name), getattr(batch, name)]) for name in ("blocks", "slots")),
            )
        step = world.planner.step(world.facts(batch))
        assert isinstance(step.decoding, FixedDecoding) and step.decoding.count == len(decoding)
        assert (step.dense is None) == (not count)
        if step.dense is not None:
            assert step.dense.tolist() == [cache.lengths[new]] + [0] * len(decoding)
        out = world.run(step, len(batch.slots))
        assert out[:count].isnan().all() and not out[count:].isnan().any()
    assert world.oracle.steps == 7 and len(live) == 3
    counted = world.engine.counters.as_dict()
    assert counted["audits"] == 3 and 0.3 < counted["captured_mass"] < 1


def test_an_audit_where_one_layer_keeps_everything() -> None:
    """The step is sparse by another layer's budget: nothing is left out here, and nothing is measured."""
    cache = Cache(2, 20, 32, 60)
    world = World(
        {"flow": QUEST, "budget": SMALL, "page_size": 16, "audit_every": 1}, cache, 3, longest=512, graphs=False
    )
    world.admit(70)
    batch = cache.step([0], 1, world.columns)
    world.layer.budget = Budget(99)
    step = world.planner.step(world.facts(batch))
    assert not world.run(step, 1).isnan().any()
    counted = world.engine.counters.as_dict()
    assert counted["sparse_steps"] == 1 and counted["audits"] == 0 and counted["captured_mass"] == 0


def test_a_batch_of_single_tokens_is_one_plan_where_graphs_are() -> None:
    """A graph cannot tell the last token of a prompt: its row is planned as a decode step, whoever runs it."""
    cache = Cache(1, 20, 16, 60)
    world = World({"flow": QUEST, "budget": SMALL, "page_size": 16}, cache, 3, longest=512)
    request = world.admit(100)
    batch = cache.chunk(request, 1, world.columns)
    step = world.planner.step(world.facts(batch))
    assert isinstance(step.decoding, FixedDecoding) and step.dense is None and step.decoding.tokens is None
    out = world.run(step, 1)
    assert not out.isnan().any() and world.oracle.steps == 1


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("graphs", [True, False])
def test_planning_waits_for_no_gpu(graphs: bool) -> None:
    cache = Cache(2, 20, 32, 60)
    world = World({"flow": QUEST, "budget": SMALL, "page_size": 16}, cache, 3, longest=512, graphs=graphs)
    live = [world.admit(length) for length in (70, 130, 33)]
    steps = [world.facts(cache.step(live, 3, world.columns)) for _ in range(2)]
    world.planner.step(steps[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = world.planner.step(steps[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(step.decoding, FixedDecoding) and step.decoding.count == 3


def test_a_cache_in_another_order_is_refused() -> None:
    cache = Cache(2, 20, 32, 9)
    world = World({"flow": QUEST, "budget": SMALL, "page_size": 16}, cache, 3, longest=64)
    head_major = torch.zeros(9, 2, 32, 40)
    with pytest.raises(ConfigError, match="VLLM_KV_CACHE_LAYOUT=NHD"):
        world.layer.pool(head_major)


def test_a_larger_cache_in_the_same_place() -> None:
    """vLLM first tries a small cache; the real one may lie where that was."""
    cache = Cache(2, 20, 32, 9)
    world = World({"flow": QUEST, "budget": SMALL, "page_size": 16}, cache, 3, longest=64)
    small, all_of_it = (world.layer.pool(cache.tensor[:blocks]) for blocks in (4, 9))
    assert small.k.shape[1] == 8 and all_of_it.k.shape[1] == all_of_it.summaries["k_max"].shape[1] == 18
    assert world.layer.pool(cache.tensor) is all_of_it
    fields = world.layer.pool(cache.tensor).summaries.values()
    side = sum(field.numel() * 4 for field in fields)
    assert world.group.side_bytes(18, cache.dtype) == side
    config = SimpleNamespace(num_gpu_blocks=9, block_size=32, gpu_memory_utilization=0.5)
    refuse_what_does_not_fit(world.group, config, cache.dtype, 2 * side)
    with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
        refuse_what_does_not_fit(world.group, config, cache.dtype, 2 * side - 2)
