"""Faults of the tables and of the runtime: fork, crop, reorder, preempt, resume, finish, prefixes, full pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kvsieve.backends.eager import EagerBackend
from kvsieve.paging.allocator import NULL_BLOCK, BlockId
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.table import Growth, Request, RequestId, RequestTables
from kvsieve.runtime import Runtime
from kvsieve.verify.mutants.base import LIFE_CYCLE, Table

TABLE = Table(LIFE_CYCLE)
fault = TABLE.fault


@fault("the tail of a table stays after a crop or the end", 12, RequestTables, "_detach")
def _(original: Any) -> Any:
    def detach(self: RequestTables, entry: Request, pages: int) -> None:
        blocks, rows = self.blocks[entry.slot].clone(), self.rows[entry.slot].clone()
        original(self, entry, pages)
        self.blocks[entry.slot], self.rows[entry.slot] = blocks, rows

    return detach


@fault("a crop keeps one page too many", 12, RequestTables, "_detach")
def _(original: Any) -> Any:
    def detach(self: RequestTables, entry: Request, pages: int) -> None:
        original(self, entry, pages + 1 if pages else 0)

    return detach


@fault("a crop keeps the state rows of its pages for the next ones", 10, RequestTables, "append")
def _(original: Any) -> Any:
    longest: dict[tuple[int, RequestId], int] = {}

    def append(
        self: RequestTables, requests: Sequence[RequestId], counts: Sequence[int], limits: Sequence[int | None] = ()
    ) -> Growth:
        growth: Growth = original(self, requests, counts, limits)
        entered = list(growth.entered)
        for request in requests:
            rows = self[request].rows
            before = longest.get((id(self), request), 0)
            entered = [row for row in entered if row not in rows[:before]]
            longest[id(self), request] = max(before, len(rows))
        return replace(growth, entered=entered)

    return append


@fault("a crop forgets nothing of its last page", 12, RequestTables, "crop")
def _(original: Any) -> Any:
    def crop(self: RequestTables, request: RequestId, length: int) -> None:
        original(self, request, min(self[request].length, self.pages(length) * self.page_size))

    return crop


@fault("a crop keeps the keys of the pages it drops", 11, RequestTables, "crop")
def _(original: Any) -> Any:
    def crop(self: RequestTables, request: RequestId, length: int) -> None:
        keys = self[request].keys
        original(self, request, length)
        self[request].keys = keys

    return crop


@fault("a crop into a step is taken for exact", None, RequestTables, "append")
def _(original: Any) -> Any:
    def append(self: RequestTables, requests: Sequence[RequestId], *arguments: Any) -> Growth:
        growth: Growth = original(self, requests, *arguments)
        for request in requests:
            self[request].__class__ = _Uncropped
        return growth

    return append


class _Uncropped(Request):
    """A request that believes in every crop."""

    def __getattribute__(self, name: str) -> Any:
        return 0 if name == "crop_floor" else super().__getattribute__(name)


@fault("a shared partial page is written in place", None, RequestTables, "_shared_and_written")
def _(original: Any) -> Any:
    return lambda self, entry, count, kept, wanted: []


@fault("a page that was cropped and written again keeps its summary", 8, EagerBackend, "summarize")
def _(original: Any) -> Any:
    done: dict[LayerPool, set[int]] = {}

    def summarize(self: Any, flow: Any, pool: LayerPool, blocks: torch.Tensor) -> None:
        seen = done.setdefault(pool, set())
        new = [block for block in blocks.tolist() if block not in seen]
        seen.update(new)
        original(self, flow, pool, torch.tensor(new, dtype=torch.int64))

    return summarize


@fault("a fork shares the state rows of its source", 10, RequestTables, "fork")
def _(original: Any) -> Any:
    def fork(self: RequestTables, request: RequestId) -> Any:
        twin, _ = original(self, request)
        entry, source = self[twin], self[request]
        self.row_allocator.release(entry.rows)
        self.row_allocator.share(source.rows)
        entry.rows = list(source.rows)
        self.rows[entry.slot] = self.rows[source.slot]
        return twin, []

    return fork


@fault("a fork forgets the newest token", None, RequestTables, "fork")
def _(original: Any) -> Any:
    def fork(self: RequestTables, request: RequestId) -> Any:
        twin, pairs = original(self, request)
        entry = self[twin]
        if (entry.length - 1) % self.page_size:
            entry.length -= 1
        return twin, pairs

    return fork


@fault("a fork's table lists the source's first page twice", 12, RequestTables, "fork")
def _(original: Any) -> Any:
    def fork(self: RequestTables, request: RequestId) -> Any:
        twin, pairs = original(self, request)
        slot, pages = self[twin].slot, len(self[twin].blocks)
        self.blocks[slot, 1:pages] = self.blocks[slot, : max(0, pages - 1)].clone()
        return twin, pairs

    return fork


@fault("a full pool stops a call half way", None, RequestTables, "_make_room")
def _(original: Any) -> Any:
    def make_room(self: RequestTables, needed: int) -> None:
        idle = self.block_allocator.idle_blocks
        self.prefixes.evict(needed - idle)

    return make_room


@fault("reorder reads places that it has already overwritten", None, Runtime, "reorder")
def _(original: Any) -> Any:
    def reorder(self: Runtime, requests: Sequence[RequestId], order: Sequence[int]) -> list[RequestId]:
        places = list(range(max(len(requests), len(order))))
        for place, source in enumerate(order):
            places[place] = places[source]
        wrong: list[RequestId] = original(self, requests, [place % len(requests) for place in places[: len(order)]])
        return wrong

    return reorder


@fault("reorder gives one request two places", None, Runtime, "reorder")
def _(original: Any) -> Any:
    def reorder(self: Runtime, requests: Sequence[RequestId], order: Sequence[int]) -> list[RequestId]:
        distinct = list(dict.fromkeys(order))
        kept = original(self, requests, distinct)
        return [kept[distinct.index(source)] for source in order]

    return reorder


@fault("reorder drops the last request that nobody continues", None, Runtime, "finish")
def _(original: Any) -> Any:
    def finish(self: Runtime, requests: Sequence[RequestId]) -> None:
        original(self, requests[:-1] if len(requests) > 1 else requests)

    return finish


@fault("a request with a known prefix takes over the state of its writer", 11, Runtime, "admit")
def _(original: Any) -> Any:
    def admit(self: Runtime, keys: Any = ()) -> RequestId:
        request: RequestId = original(self, keys)
        entry = self.tables[request]
        for other in self.tables:
            source = self.tables[other]
            shared = sum(a == b for a, b in zip(source.blocks, entry.blocks, strict=False)) if other != request else 0
            if shared:
                self._copy([], list(zip(source.rows[:shared], entry.rows[:shared], strict=False)))
        return request

    return admit


@fault("pages of a call that not every layer has attended are offered as a prefix", 11, Runtime, "_remember_prefixes")
def _(original: Any) -> Any:
    def remember(self: Runtime) -> None:
        call = self._newest
        for request in call.grown if call and call.attended else ():
            if request in self.tables:
                entry = self.tables[request]
                full = entry.length // self.page_size
                for key, block in zip(entry.keys[:full], entry.blocks, strict=False):
                    self.tables.prefixes.insert(key, block)

    return remember


@fault("a partial page is offered as a prefix", 11, Runtime, "_remember_prefixes")
def _(original: Any) -> Any:
    def remember(self: Runtime) -> None:
        original(self)
        call = self._newest
        for request in call.grown if call and self._layers_known else ():
            if request in self.tables:
                entry = self.tables[request]
                for key, block in zip(entry.keys, entry.blocks, strict=False):
                    self.tables.prefixes.insert(key, block)

    return remember


@fault("a resumed request is one token short", None, RequestTables, "restore")
def _(original: Any) -> Any:
    def restore(self: RequestTables, request: RequestId) -> None:
        original(self, request)
        entry = self[request]
        entry.length -= (entry.length - 1) % self.page_size > 0

    return restore


@fault("padding of a table is block 1, not the null block", 13, RequestTables, "_resize")
def _(original: Any) -> Any:
    def resize(self: RequestTables, slots: int, width: int) -> None:
        kept = self.blocks.shape
        original(self, slots, width)
        self.blocks[kept[0] :], self.blocks[:, kept[1] :] = BlockId(NULL_BLOCK + 1), BlockId(NULL_BLOCK + 1)

    return resize
