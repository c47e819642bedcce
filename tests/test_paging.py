"""Blocks, tables and the pool: no block twice, no stale tail, nothing of a finished request is ever read."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvsieve.budget import Budget
from kvsieve.errors import ConfigError, OutOfPages
from kvsieve.graph import FieldSpec
from kvsieve.paging.allocator import NULL_BLOCK, BlockAllocator, BlockId
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.table import RequestId, RequestTables
from kvsieve.verify.data import LayerShape
from support import Twin

CPU = torch.device("cpu")


def snapshot(tables: RequestTables) -> dict[str, Any]:
    """The complete state of the tables, as plain values."""
    state: dict[str, Any] = copy.deepcopy(vars(tables))
    state["blocks"], state["rows"] = tables.blocks.tolist(), tables.rows.tolist()
    for name in ("block_allocator", "row_allocator"):
        state[name] = vars(state[name])
    state["prefixes"] = list(vars(tables.prefixes)["_blocks"].items())
    return state


class AllocatorMachine(RuleBasedStateMachine):
    """Random allocate, share and release beside a plain count of references."""

    held = Bundle("held")

    @initialize(limit=st.one_of(st.none(), st.integers(1, 24)))
    def create(self, limit: int | None) -> None:
        self.limit = limit
        self.allocator = BlockAllocator(limit)
        self.references: Counter[int] = Counter()

    @rule(target=held, count=st.integers(0, 8), after=st.one_of(st.none(), st.integers(0, 24)))
    def allocate(self, count: int, after: int | None) -> list[BlockId]:
        before = copy.deepcopy(vars(self.allocator))
        try:
            blocks = self.allocator.allocate(count, None if after is None else BlockId(after))
        except OutOfPages as error:
            assert self.limit is not None and count > self.limit - 1 - len(+self.references)
            assert (error.needed, error.free) == (count, self.limit - 1 - len(+self.references))
            assert vars(self.allocator) == before
            return []
        assert len(blocks) == len(set(blocks)) == count
        assert all(not self.references[block] for block in blocks), "a block that is in use was handed out"
        assert NULL_BLOCK not in blocks
        self._check_run(blocks, before["_free"], after)
        self.references.update(blocks)
        return blocks

    def _check_run(self, blocks: list[BlockId], free: list[int], after: int | None) -> None:
        """Where the free blocks held a long enough run, the result is one; if it could follow ``after``, it does."""
        count = len(blocks)
        if not count or len(free) < count:
            return
        runs = [i for i in range(len(free) - count + 1) if free[i + count - 1] - free[i] == count - 1]
        if runs:
            assert blocks == list(range(blocks[0], blocks[0] + count))
        if after is not None and set(range(after + 1, after + 1 + count)) <= set(free):
            assert blocks[0] == after + 1

    @rule(target=held, blocks=held)
    def share(self, blocks: list[BlockId]) -> list[BlockId]:
        self.allocator.share(blocks)
        self.references.update(blocks)
        return blocks

    @rule(blocks=consumes(held))
    def release(self, blocks: list[BlockId]) -> None:
        self.allocator.release(blocks)
        self.references.subtract(blocks)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "allocator"):
            return
        used = +self.references
        assert self.allocator.used_blocks == len(used)
        assert all(self.allocator.references(BlockId(block)) == count for block, count in used.items())
        free = self.allocator._free
        assert free == sorted(set(free)) and not set(free) & set(used) and NULL_BLOCK not in free
        assert len(free) + len(used) == self.allocator.capacity - 1, "a block was lost"
        if self.limit is not None:
            assert self.allocator.idle_blocks == self.limit - 1 - len(used)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=150, stateful_step_count=30)


class TablesMachine(RuleBasedStateMachine):
    """Requests that grow and end: tables say exactly what was allocated, tails are null, OutOfPages changes nothing."""

    requests = Bundle("requests")

    @initialize(page_size=st.integers(1, 5), blocks=st.one_of(st.none(), st.integers(1, 20)), stateful=st.booleans())
    def create(self, page_size: int, blocks: int | None, stateful: bool) -> None:
        self.tables = RequestTables(page_size, None if blocks is None else blocks + 1, stateful)
        self.lengths: dict[RequestId, int] = {}

    @rule(target=requests)
    def admit(self) -> RequestId:
        request = self.tables.admit()
        assert request not in self.lengths
        self.lengths[request] = 0
        return request

    @rule(requests=st.lists(requests, min_size=1, max_size=4, unique=True), data=st.data())
    def append(self, requests: list[RequestId], data: st.DataObject) -> None:
        alive = [request for request in requests if request in self.lengths]
        counts = [data.draw(st.integers(0, 12)) for _ in alive]
        before = snapshot(self.tables)
        old_rows = {request: set(self.tables[request].rows) for request in alive}
        try:
            entered = self.tables.append(alive, counts).entered
        except OutOfPages as error:
            assert error.needed > error.free
            assert snapshot(self.tables) == before
            return
        for request, count in zip(alive, counts, strict=True):
            self.lengths[request] += count
        new_rows = [row for request in alive for row in self.tables[request].rows if row not in old_rows[request]]
        assert entered == new_rows

    @rule(request=consumes(requests))
    def finish(self, request: RequestId) -> None:
        self.tables.finish(request)
        del self.lengths[request]
        with pytest.raises(ConfigError, match="finished or unknown"):
            self.tables[request]

    @invariant()
    def tables_agree(self) -> None:
        if not hasattr(self, "tables"):
            return
        tables, p = self.tables, self.tables.page_size
        assert len(tables) == len(self.lengths)
        entries = {request: tables[request] for request in self.lengths}
        slots = [entry.slot for entry in entries.values()]
        assert len(set(slots)) == len(slots)
        for allocator, lists, table in (
            (tables.block_allocator, [entry.blocks for entry in entries.values()], tables.blocks),
            (tables.row_allocator, [entry.rows for entry in entries.values()], tables.rows),
        ):
            owned = [block for blocks in lists for block in blocks]
            assert len(owned) == len(set(owned)) == allocator.used_blocks
            assert NULL_BLOCK not in owned
            for slot, blocks in zip(slots, lists, strict=True):
                row = table[slot].tolist()
                assert row[: len(blocks)] == blocks and set(row[len(blocks) :]) <= {NULL_BLOCK}
            for slot in set(range(len(table))) - set(slots):
                assert set(table[slot].tolist()) <= {NULL_BLOCK}, "a finished request left its pages in the table"
        for request, entry in entries.items():
            assert entry.length == self.lengths[request]
            assert len(entry.blocks) == -(-entry.length // p)
            assert len(entry.rows) == (len(entry.blocks) if tables.stateful else 0)


TestTables = TablesMachine.TestCase
TestTables.settings = settings(max_examples=150, stateful_step_count=30)


def test_a_growing_request_stays_one_run() -> None:
    tables = RequestTables(4, 20, False)
    first, second = tables.admit(), tables.admit()
    tables.append([first], [8])
    tables.append([second], [8])
    tables.finish(first)
    third = tables.admit()
    tables.append([third], [12])
    assert tables[third].blocks == [5, 6, 7], "two free blocks at the front do not hold three pages in a row"
    tables.append([third], [9])
    assert tables[third].blocks == [5, 6, 7, 8, 9, 10]


def test_growth_keeps_content_and_writes_nothing_else() -> None:
    fields = {"a": FieldSpec((3,), None), "n": FieldSpec((), torch.int64)}
    state = {"s": FieldSpec((), torch.float32, torch.tensor(2.5))}
    pool = LayerPool(2, 4, 6, 5, torch.float32, CPU, fields, state)
    pool.reserve(3, 2)
    everything = [pool.k, pool.v, *pool.summaries.values(), *pool.state.values()]
    kept = [field.copy_(torch.arange(field.numel()).reshape(field.shape)).clone() for field in everything]
    pool.reserve(7, 9)
    for old, new in zip(kept, [pool.k, pool.v, *pool.summaries.values(), *pool.state.values()], strict=True):
        assert torch.equal(new[:, : old.shape[1]], old)
        fresh = new[:, old.shape[1] :]
        assert fresh.isnan().all() if fresh.is_floating_point() else (fresh > 2**60).all()
    assert pool.k.shape == (2, 7, 4, 6) and pool.v.shape == (2, 7, 4, 5) and pool.state["s"].shape == (2, 9)
    before = pool.k
    pool.reserve(5, 5)
    assert pool.k is before, "reserve never shrinks or copies without need"


def test_entering_rows_start_at_the_initial_value_and_touch_no_other() -> None:
    initial = torch.tensor([1.0, -2.0])
    pool = LayerPool(3, 1, 2, 2, torch.float32, CPU, {}, {"s": FieldSpec((2,), torch.float32, initial)})
    pool.reserve(2, 6)
    pool.enter(torch.tensor([2, 4]))
    assert torch.equal(pool.state["s"][:, [2, 4]], initial.expand(3, 2, 2))
    assert pool.state["s"][:, [0, 1, 3, 5]].isnan().all()


@pytest.mark.parametrize(
    "name", ["gqa_quest_sparse_attention", "h2o_sparse_attention", "gqa_h2o_token_sparse_attention"]
)
def test_recycled_blocks_leak_nothing(name: str) -> None:
    """A tiny pool, poisoned on finish: every block is used many times over, and everything equals the reference."""
    page_size = 1 if "token" in name else 3
    twin = Twin(name, Budget(2, 1, 1), page_size, [LayerShape(2, 3, 8, 6)], num_blocks=22, seed=5)
    used: Counter[int] = Counter()
    alive: list[RequestId] = []
    for turn in range(12):
        (request,) = twin.admit()
        twin.extend([request], [(5, 9, 7)[turn % 3] * (1 if page_size == 1 else 2)], compare=False)
        alive.append(request)
        for _ in range(2):
            if sum(len(twin.runtime.tables[request].blocks) for request in alive) <= 18:
                twin.step(alive)
        used.update(twin.runtime.tables[request].blocks)
        twin.check_storage()
        if len(alive) == 2:
            twin.finish([alive.pop(turn % 2)])
    assert max(used.values()) >= 3, "blocks were recycled"


def test_state_of_a_recycled_row_starts_afresh() -> None:
    """Without poison: a row that keeps the finished request's accumulator is a plausible number, and wrong."""
    twin = Twin("gqa_h2o_token_sparse_attention", Budget(2, 1, 1), 1, [LayerShape(1, 2, 8, 8)])
    for turn in range(3):
        requests = twin.admit(2)
        twin.extend(requests, [6 + turn, 4], compare=False)
        for _ in range(3):
            twin.step(requests)
        twin.check_storage()
        twin.finish(requests, poisoned=False)


@pytest.mark.parametrize("page_size", [1, 2, 5])
def test_page_boundaries_token_by_token(page_size: int) -> None:
    """One token at a time across five pages: what is stored, and when a page is summarised."""
    twin = Twin("gqa_h2o_sparse_attention", Budget(1, 1, 1), page_size, [LayerShape(2, 2, 6, 4)])
    (request,) = twin.admit()
    twin.extend([request], [1])
    for length in range(2, 5 * page_size + 2):
        twin.step([request])
        pool, blocks = twin.pool(0), twin.runtime.tables[request].blocks
        twin.check_storage()
        unfilled = blocks[length // page_size :]
        for field in pool.summaries.values():
            assert field[:, unfilled].isnan().all(), "a page is summarised when it is full, not before"


def test_out_of_pages_is_clear_and_harmless() -> None:
    twin = Twin("h2o_token_sparse_attention", Budget(2, 1, 1), 1, [LayerShape(2, 2, 8, 8)], num_blocks=10)
    first, second = twin.admit(2)
    twin.extend([first, second], [5, 4])
    memory = {name: field.clone() for name, field in (("k", twin.pool(0).k), ("s", twin.pool(0).state["heavy"]))}
    before, steps = snapshot(twin.runtime.tables), twin.runtime.stats
    for action in (lambda: twin.runtime.step([first, second]), lambda: twin.runtime.extend([first, second], [0, 2])):
        with pytest.raises(OutOfPages, match=r"needs 2 free blocks, the pool has 1.*nothing was changed"):
            action()
    assert snapshot(twin.runtime.tables) == before and twin.runtime.stats == steps
    assert torch.equal(twin.pool(0).k.nan_to_num(7.0), memory["k"].nan_to_num(7.0))
    assert torch.equal(twin.pool(0).state["heavy"].nan_to_num(7.0), memory["s"].nan_to_num(7.0))
    twin.step([second])
    twin.finish([first])
    for _ in range(5):
        twin.step([second])
    twin.check_storage()
    with pytest.raises(OutOfPages):
        twin.step([second])
