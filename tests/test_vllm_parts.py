"""The parts of the vLLM plug-in that need no vLLM: plans, pages of its cache, whose state is whose, counters."""

from __future__ import annotations

import random

import pytest
import torch

from kvsieve import Budget
from kvsieve.backends import get_backend
from kvsieve.backends.base import AttentionOptions
from kvsieve.flow import load_flow
from kvsieve.graph import Geometry, trace_flow
from kvsieve.integrations.vllm.cache import CachePool, PagePool, token_major_pages
from kvsieve.integrations.vllm.counters import Counters
from kvsieve.integrations.vllm.plan import Batch, BatchPlan, Decoding
from kvsieve.integrations.vllm.requests import RequestRows
from kvsieve.integrations.vllm.tally import LayerKind, Tally
from kvsieve.paging.pool import LayerPool

QUEST = "gqa_quest_sparse_attention"


def random_batch(draw: random.Random, block_size: int, requests: int) -> tuple[Batch, list[int], list[int], list[bool]]:
    """Requests of random lengths, some of them prompts; blocks in random order."""
    lengths = [
        draw.choice([1, 2, block_size - 1, block_size, block_size + 1, draw.randint(2, 200)]) for _ in range(requests)
    ]
    prefilling = [length == 1 or draw.random() < 0.4 for length in lengths]
    counts = [draw.randint(1, length) if new else 1 for length, new in zip(lengths, prefilling, strict=True)]
    wide = max(-(-length // block_size) for length in lengths)
    blocks = torch.randperm(requests * wide, generator=torch.Generator().manual_seed(draw.randrange(99))) + 1
    table = blocks.view(requests, wide).to(torch.int32)
    slots = [
        int(table[row, at // block_size]) * block_size + at % block_size
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
        for at in range(length - count, length)
    ]
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    batch = Batch(
        starts, torch.tensor(lengths, dtype=torch.int32), torch.tensor(prefilling), table, torch.tensor(slots)
    )
    return batch, lengths, counts, prefilling


@pytest.mark.parametrize(("page_size", "block_size"), [(1, 16), (5, 15), (16, 32), (33, 33)])
@pytest.mark.parametrize("budget", [Budget(2), Budget(0, 0, 1, 0.3), Budget(7, 3, 4, 0.125)])
def test_plans_against_loops(page_size: int, block_size: int, budget: Budget) -> None:
    draw = random.Random(page_size)
    for _ in range(20):
        batch, lengths, counts, prefilling = random_batch(draw, block_size, draw.randint(1, 6))
        plan = BatchPlan(batch, page_size, block_size)
        decoding = [i for i, length in enumerate(lengths) if counts[i] == 1 and not prefilling[i] and length > 1]
        others = [i for i in range(len(lengths)) if i not in decoding]
        assert (plan.prefilling.tolist() if plan.prefilling is not None else []) == others
        ends = [
            (int(batch.blocks[i, at // block_size]) * block_size + at % block_size) // page_size
            for i, (length, count) in enumerate(zip(lengths, counts, strict=True))
            for at in range(length - count, length)
            if at % page_size == page_size - 1
        ]
        assert sorted(plan.filled.tolist()) == sorted(ends)
        if not decoding:
            assert plan.decoding is None
            continue
        rows = plan.decoding
        assert rows is not None and rows.places.tolist() == decoding
        for stateful in (False, True):
            _check_quota(rows, [lengths[i] for i in decoding], batch, budget, stateful, block_size)


def _check_quota(
    rows: Decoding, lengths: list[int], batch: Batch, budget: Budget, stateful: bool, block_size: int
) -> None:
    p = rows.page_size
    quota = rows.quota(budget, True, stateful)
    pages = [-(-length // p) for length in lengths]
    kept = [min(one, budget.kept(one)) for one in pages]
    assert quota.pages.tolist() == pages and quota.count.tolist() == kept and quota.width == max(kept)
    assert quota.sparse == (kept != pages)
    assert quota.tokens == sum(n - p * (s - k) for n, s, k in zip(lengths, pages, kept, strict=True))
    scored = [i for i, s in enumerate(pages) if budget.window(s) and (s > kept[i] or stateful)]
    assert (quota.window is not None) == bool(scored)
    for row, length in enumerate(lengths):
        for page in range(pages[row]):
            block = int(batch.blocks[rows.places[row], page * p // block_size])
            assert int(rows.table[row, page]) == block * (block_size // p) + page % (block_size // p), length
    if quota.window is not None:
        window = quota.window
        assert window.requests.tolist() == scored
        assert window.topk.tolist() == [
            kept[i] - budget.sink - budget.recent if pages[i] > kept[i] else 0 for i in scored
        ]
        assert window.total_pages == sum(budget.window(pages[i]) for i in scored)
        for place, row in enumerate(scored):
            columns = budget.window(pages[row])
            assert window.valid[place].sum() == columns
            listed = rows.table[row, budget.sink : budget.sink + columns]
            assert torch.equal(window.blocks[place, :columns], listed)


@pytest.mark.parametrize(
    ("backend", "group", "width", "page_size", "tokens_first"),
    [
        *(("eager", 3, 20, 5, False), ("eager", 7, 80, 1, False), ("compiled", 3, 20, 5, False)),
        *(("eager", 3, 20, 5, True), ("eager", 7, 80, 1, True), ("eager", 1, 64, 16, True)),
        *(("triton", 3, 20, 5, True), ("triton", 7, 80, 1, True), ("triton", 1, 64, 16, True)),
    ],
)
def test_pages_of_the_cache_are_a_pool(
    backend: str, group: int, width: int, page_size: int, tokens_first: bool
) -> None:
    """The same tokens in a dense pool and in vLLM's blocks: the same summaries, scores, selection and output."""
    if backend == "triton":
        pytest.importorskip("triton")
    heads, share, batch, length = 2, 2, 2, 9 * page_size + 1
    draw = torch.Generator().manual_seed(1)
    flow, budget = load_flow(QUEST), Budget(2, 1, 1)
    graphs = trace_flow(flow, Geometry(page_size, width, width, group))
    runner = get_backend(backend)
    prepared = runner.prepare(graphs, torch.device("cpu"))
    blocks = torch.tensor([[3, 9, 1, 6, 2], [4, 10, 8, 5, 7]], dtype=torch.int32)
    nothing = float("nan")
    if tokens_first:
        cache = torch.full((11, share * page_size, heads, 2 * width), nothing, dtype=torch.bfloat16).transpose(1, 2)
        mine = PagePool(*token_major_pages(cache, page_size), graphs.summary_fields, {}, 0)
    else:
        cache = torch.full((11, heads, share * page_size, 2 * width), nothing, dtype=torch.bfloat16)
        mine = CachePool(cache, page_size, graphs.summary_fields, {}, 0)
    dense = LayerPool(heads, page_size, width, width, cache.dtype, cache.device, graphs.summary_fields, {})
    dense.reserve(11 * share, 0)
    decoding = _decoding(blocks, length, page_size, share * page_size)
    places = torch.arange(batch * length) % length
    tables = decoding.table.repeat_interleave(length, 0)
    pages, offsets = tables[torch.arange(len(places)), places // page_size], places % page_size
    k, v = (torch.randn(batch * length, heads, width, generator=draw).to(cache.dtype) for _ in range(2))
    slots = pages * page_size + offsets
    dense.write(pages, offsets, k, v)
    if isinstance(mine, CachePool):
        more = torch.full((2,), -1)
        mine.store(torch.cat([slots, more]), torch.cat([k, k[:2]]), torch.cat([v, v[:2]]))
        stored = mine.tokens_at(slots)
        assert torch.equal(stored[0], k) and torch.equal(stored[1], v)
    else:
        size = share * page_size
        cache[slots // size, :, slots % size] = torch.cat([k, v], -1)
    q = torch.randn(batch, heads, group, width, generator=draw).to(cache.dtype)
    quota = decoding.quota(budget, True, False)
    results = []
    for pool in (mine, dense):
        runner.summarize(prepared, pool, decoding.table[:, : length // page_size].flatten())
        assert quota.window is not None
        scores = runner.score(prepared, q, pool, quota.window)
        selection = runner.select(scores, quota, heads)
        out, lse, _ = runner.attend(q, pool, decoding.rows, selection, AttentionOptions(width**-0.5))
        results.append((scores, selection.pages, out, lse))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other) and not one.isnan().any()
    assert int((~mine.k.isnan()).sum()) == len(slots) * heads * width, "the padding went somewhere"


def _decoding(blocks: torch.Tensor, length: int, page_size: int, block_size: int) -> Decoding:
    batch = len(blocks)
    starts, lengths = torch.arange(batch + 1, dtype=torch.int32), torch.full((batch,), length, dtype=torch.int32)
    step = Batch(starts, lengths, torch.zeros(batch, dtype=torch.bool), blocks, torch.zeros(0, dtype=torch.int64))
    return Decoding(step, torch.arange(batch), page_size, block_size)


class SimulatedEngine:
    """Requests that come, share full blocks, decode, are preempted and end, in random order, on few blocks."""

    BLOCK, BLOCKS, PLACES = 4, 40, 5

    def __init__(self, seed: int, sharing: bool) -> None:
        self.draw, self.sharing = random.Random(seed), sharing
        self.free = list(range(1, self.BLOCKS))
        self.users = [0] * self.BLOCKS
        self.live: dict[int, list[int]] = {}  # request: its blocks
        self.length: dict[int, int] = {}
        self.prompt: dict[int, int] = {}  # tokens still to be computed as a prompt
        self.born = 0

    def admit(self) -> None:
        """A new request; it may begin with full blocks of another one."""
        request, self.born = self.born, self.born + 1
        shared: list[int] = []
        if self.live and self.sharing and self.draw.random() < 0.5:
            other = self.draw.choice(list(self.live))
            full = self.length[other] // self.BLOCK
            shared = self.live[other][: self.draw.randint(0, full)]
        for block in shared:
            self.users[block] += 1
        self.live[request], self.length[request] = list(shared), len(shared) * self.BLOCK
        self.prompt[request] = self.draw.randint(1, 9)

    def end(self, request: int) -> None:
        for block in self.live.pop(request):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.insert(self.draw.randint(0, len(self.free)), block)
        del self.length[request], self.prompt[request]

    def preempt(self, request: int) -> None:
        """All its blocks are freed; all its tokens will be computed anew, as a prompt."""
        length = self.length[request]
        pending = self.prompt[request]
        self.end(request)
        self.live[request], self.length[request], self.prompt[request] = [], 0, length + pending

    def step(self) -> tuple[Batch, list[int]]:
        """Requests in random order, one token or a chunk each; sometimes a few have to sit out."""
        some = self.draw.randint(1, len(self.live)) if self.draw.random() < 0.3 else len(self.live)
        chosen = self.draw.sample(list(self.live), some)
        counts, slots, scheduled = [], [], []
        for request in chosen:
            count = self.draw.randint(1, self.prompt[request]) if self.prompt[request] else 1
            need = -(-(self.length[request] + count) // self.BLOCK) - len(self.live[request])
            if need > len(self.free):
                continue
            for _ in range(need):
                block = self.free.pop(0)
                self.users[block] = 1
                self.live[request].append(block)
            slots += [
                self.live[request][at // self.BLOCK] * self.BLOCK + at % self.BLOCK
                for at in range(self.length[request], self.length[request] + count)
            ]
            self.length[request] += count
            counts.append(count)
            scheduled.append(request)
        wide = max((len(self.live[request]) for request in scheduled), default=1)
        table = torch.zeros(len(scheduled), wide, dtype=torch.int32)
        for row, request in enumerate(scheduled):
            table[row, : len(self.live[request])] = torch.tensor(self.live[request], dtype=torch.int32)
        prefilling = [bool(self.prompt[request]) for request in scheduled]
        for request, count in zip(scheduled, counts, strict=True):
            self.prompt[request] = max(0, self.prompt[request] - count)
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        lengths = torch.tensor([self.length[request] for request in scheduled], dtype=torch.int32)
        batch = Batch(
            starts, lengths, torch.tensor(prefilling, dtype=torch.bool), table, torch.tensor(slots, dtype=torch.int64)
        )
        return batch, scheduled


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("prompts", [False, True])
def test_state_follows_its_request(page_size: int, seed: int, prompts: bool) -> None:
    """Each request alone writes its state, whatever the order, the sharing and the reuse of blocks."""
    engine = SimulatedEngine(seed, sharing=not prompts)
    rows = RequestRows(engine.PLACES, engine.BLOCKS * engine.BLOCK // page_size, page_size, engine.BLOCK, prompts)
    written = torch.full((rows.total,), -1)  # by state row: who wrote it
    steps_of: dict[int, int] = {}
    checked = 0
    for _ in range(400):
        if len(engine.live) < engine.PLACES and engine.draw.random() < 0.4:
            engine.admit()
        if engine.live and engine.draw.random() < 0.08:
            engine.end(gone := engine.draw.choice(list(engine.live)))
            steps_of.pop(gone, None)
        if engine.live and engine.draw.random() < 0.08:
            engine.preempt(gone := engine.draw.choice(list(engine.live)))
            steps_of.pop(gone, None)
        if not engine.live:
            continue
        batch, scheduled = engine.step()
        if not scheduled:
            continue
        plan = BatchPlan(batch, page_size, engine.BLOCK)
        state = rows.step(batch, plan)
        if state is None:
            continue
        written[state.entered] = 10**6  # fresh
        for place, first in zip(state.places.tolist(), state.first.tolist(), strict=True):
            request = scheduled[place]
            length, count = engine.length[request], int(batch.starts[place + 1] - batch.starts[place])
            begun, pages = steps_of.get(request, 0), -(-length // page_size)
            held = written[first : first + pages]
            old = -(-(length - count) // page_size) if begun else 0
            assert (held[:old] == request).all(), "state of another request, or lost"
            assert (held[old:] == 10**6).all(), "new pages find fresh state"
            checked += bool(old)
            written[first : first + pages] = request
            steps_of[request] = begun + 1
    assert checked > 80


def test_state_that_is_lost_starts_afresh() -> None:
    """More requests at a time than were announced: the one that waited longest loses its row, and takes no other's."""
    rows, lengths = RequestRows(1, 8, 4, 4), [6, 6, 6]
    seen = []
    for request in (0, 1, 2, 0, 2):
        lengths[request] += 1
        at = lengths[request] - 1
        table = torch.tensor([[1, 2]], dtype=torch.int32) + 2 * request
        batch = Batch(
            torch.tensor([0, 1]),
            torch.tensor([lengths[request]]),
            torch.tensor([False]),
            table,
            table[0, at // 4][None].long() * 4 + at % 4,
        )
        state = rows.step(batch, BatchPlan(batch, 4, 4))
        assert state is not None
        seen.append((int(state.first), len(state.entered)))
    places = [first for first, _ in seen]
    assert [entered for _, entered in seen] == [2, 2, 2, 2, 0]
    assert places[0] != places[1] and places[2] == places[0] and places[3] == places[1] and places[4] == places[2]


def test_tally_and_counters() -> None:
    decoding = _decoding(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32), 60, 4, 16)
    plan = BatchPlan.__new__(BatchPlan)
    plan.decoding = decoding
    counters = Counters()
    kinds = [LayerKind(Budget(2, 1, 1), True, False, 3, 256, 40)] * 5 + [LayerKind(Budget(99), True, False, 3, 256, 40)]
    assert Tally(kinds, counters).count(plan, 7)
    segments = 5 * 3
    assert counters.as_dict() == {
        **Counters().as_dict(),
        "sparse_steps": 1,
        "sparse_rows": 2,
        "prefill_tokens": 5,
        "pages_seen": 2 * 15 * 18,
        "pages_kept": 2 * (4 * segments + 15 * 3),
        "bytes_dense": 2 * 6 * 3 * 256 * 60,
        "bytes_read": 2 * (256 * (60 * 3 + 16 * segments) + 40 * 13 * segments),
        "bytes_saved": 2 * segments * (256 * (60 - 16) - 40 * 13),
    }


def test_totals_never_fall() -> None:
    """A step in which scoring reads more than the selection saves."""
    plan = BatchPlan.__new__(BatchPlan)
    plan.decoding = _decoding(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32), 60, 4, 16)
    counters = Counters()
    Tally([LayerKind(Budget(2, 1, 1), True, False, 3, 256, 4000)], counters).count(plan, 2)
    counted = counters.as_dict()
    assert counted["bytes_saved"] < 0 and min(vars(counters).values()) >= 0
