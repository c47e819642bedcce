"""Which blocks and state rows belong to which request."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NewType

import torch

from kvsieve.errors import ConfigError, OutOfPages
from kvsieve.mass import MassLedger
from kvsieve.paging.allocator import NULL_BLOCK, BlockAllocator, BlockId
from kvsieve.paging.prefix import PrefixCache

RequestId = NewType("RequestId", int)

CROP_ROWS = 64
"""A multi-token call of at most so many rows can be cropped into even by a flow that keeps state."""


@dataclass
class Request:
    """A request's tokens and, page by page, the blocks and state rows that hold them.

    ``length`` tokens it has, of which ``evicted`` are no longer stored. ``stepped``: its last call was a decode step.
    ``keys`` name full pages for the prefix cache. ``crop_floor`` is the length down to which a crop leaves state exact.
    ``mass`` accounts for the request's attention mass.
    """

    slot: int
    length: int = 0
    evicted: int = 0
    stepped: bool = False
    keys: tuple[Hashable, ...] = ()
    crop_floor: int = 0
    mass: MassLedger = field(default_factory=MassLedger)
    blocks: list[BlockId] = field(default_factory=list)
    rows: list[BlockId] = field(default_factory=list)

    @property
    def stored(self) -> int:
        """Tokens that are stored."""
        return self.length - self.evicted


@dataclass(frozen=True)
class Cut:
    """A request that a call trims first: ``stored`` tokens in ``blocks`` and state ``rows``, of which ``kept`` stay."""

    blocks: list[BlockId]
    rows: list[BlockId]
    stored: int
    kept: int


@dataclass
class Growth:
    """What a call did to the tables: state rows that entered, blocks (from, to) to copy before writing, and by request
    what is trimmed."""

    entered: list[BlockId] = field(default_factory=list)
    copied: list[tuple[BlockId, BlockId]] = field(default_factory=list)
    cuts: list[Cut | None] = field(default_factory=list)


class RequestTables:
    """Requests of one runtime. All layers share them: a token has the same place in every layer.

    ``blocks`` and ``rows`` are int64 ``[slots, pages]`` on the CPU; entries past a request's last page are the null
    block, so a stale tail cannot be read.
    """

    def __init__(self, page_size: int, num_blocks: int | None, stateful: bool) -> None:
        self.page_size = page_size
        self.block_allocator = BlockAllocator(num_blocks)
        self.row_allocator = BlockAllocator(None)
        self.prefixes = PrefixCache(self.block_allocator)
        self.stateful = stateful
        self.blocks, self.rows = _null_table(1, 1), _null_table(1, 1)
        self.changes = 0
        """Counts what changed the pages of a request otherwise than by growing or trimming it."""
        self._requests: dict[RequestId, Request] = {}
        self._free_slots: list[int] = [0]
        self._retired: list[tuple[list[BlockId], list[BlockId]]] = []
        self._next = 0

    def __getitem__(self, request: RequestId) -> Request:
        if request not in self._requests:
            raise ConfigError(
                f"request {request}: expected an admitted request, received one that is finished or unknown"
            )
        return self._requests[request]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._requests)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._requests

    def admit(self, keys: Sequence[Hashable] = ()) -> RequestId:
        """A new request; it begins with the pages that the prefix cache knows under ``keys``, one key a full page."""
        request, entry = self._new(keys)
        blocks = self.prefixes.match(keys)
        self._attach(entry, blocks, self._new_rows(len(blocks)))
        entry.length = entry.crop_floor = len(blocks) * self.page_size
        return request

    def finish(self, request: RequestId) -> None:
        """Forget a request; blocks that nobody else holds become free."""
        entry = self[request]
        self._detach(entry, 0)
        self._free_slots.append(entry.slot)
        del self._requests[request]

    def fork(self, request: RequestId) -> tuple[RequestId, list[tuple[BlockId, BlockId]]]:
        """A second request with the same past: blocks are shared, state rows are new; returns the rows to copy."""
        source = self[request]
        twin, entry = self._new(source.keys[: source.length // self.page_size])
        self.block_allocator.share(source.blocks)
        rows = self._new_rows(len(source.rows))
        self._attach(entry, source.blocks, rows)
        entry.length, entry.crop_floor = source.length, source.crop_floor
        entry.evicted, entry.stepped = source.evicted, source.stepped
        entry.mass = replace(source.mass)
        return twin, list(zip(source.rows, rows, strict=True))

    def crop(self, request: RequestId, length: int) -> None:
        """Forget the tokens from ``length`` on; pages without a token leave the request."""
        entry = self[request]
        entry.mass.crop(entry.length - length)
        entry.length, entry.crop_floor = length, min(entry.crop_floor, length)
        entry.keys = entry.keys[: length // self.page_size]
        self._detach(entry, self.pages(entry.stored))

    def release(self, request: RequestId) -> None:
        """Give back a request's blocks and rows; its length stays, so that :meth:`restore` can bring it back."""
        self._detach(self[request], 0)

    def restore(self, request: RequestId) -> None:
        """New blocks and rows for a released request.

        Raises:
            OutOfPages: nothing is changed.
        """
        entry = self[request]
        pages = self.pages(entry.stored)
        self._make_room(pages)
        self.changes += 1
        self._attach(entry, self.block_allocator.allocate(pages), self._new_rows(pages))

    def pages(self, length: int) -> int:
        """Pages of a request of ``length`` tokens."""
        return -(-length // self.page_size)

    def append(self, requests: Sequence[RequestId], counts: Sequence[int], limits: Sequence[int | None] = ()) -> Growth:
        """Make room for ``counts`` new tokens; blocks that are shared and written to become the request's own first.

        ``limits``: a request that stores more tokens is trimmed to its limit first. The blocks and rows that it no
        longer needs are not free until :meth:`settle`: every layer has to read them.

        Raises:
            OutOfPages: nothing is changed.
        """
        entries = [self[request] for request in requests]
        limits = limits or [None] * len(entries)
        kept = [
            entry.stored if limit is None else min(entry.stored, limit)
            for entry, limit in zip(entries, limits, strict=True)
        ]
        wanted = [self.pages(keep + count) for keep, count in zip(kept, counts, strict=True)]
        written = [self._shared_and_written(*row) for row in zip(entries, counts, kept, wanted, strict=True)]
        new = [max(0, pages - len(entry.blocks)) for entry, pages in zip(entries, wanted, strict=True)]
        self._make_room(sum(new) + sum(map(len, written)))
        growth = Growth()
        for entry, count, keep, last, places, pages in zip(entries, counts, kept, wanted, written, new, strict=True):
            growth.copied += [self._own(entry, place) for place in places]
            growth.cuts.append(self._cut(entry, keep, last) if keep < entry.stored else None)
            entry.length += count
            before = entry.blocks[-1] if entry.blocks else None
            blocks = self.block_allocator.allocate(pages, before)
            rows = self._new_rows(pages, entry.rows[-1] if entry.rows else None)
            self._attach(entry, blocks, rows)
            growth.entered += rows
        return growth

    def reserve(self, requests: Sequence[RequestId], lengths: Sequence[int]) -> None:
        """Let blocks and rows exist for requests that will store so many tokens each.

        Raises:
            OutOfPages: the pool is limited and too small.
        """
        wanted = zip(requests, lengths, strict=True)
        missing = sum(max(0, self.pages(length) - len(self[request].blocks)) for request, length in wanted)
        self._make_room(missing)
        self.block_allocator.reserve(missing)
        if self.stateful:
            self.row_allocator.reserve(missing)

    def settle(self) -> None:
        """Free what trimmed requests no longer need."""
        for blocks, rows in self._retired:
            self.block_allocator.release(blocks)
            self.row_allocator.release(rows)
        self._retired = []

    def _cut(self, entry: Request, kept: int, pages: int) -> Cut:
        """Trim a request, which goes on with its first ``pages`` pages: a layer is trimmed before it is written to."""
        cut = Cut(list(entry.blocks), list(entry.rows), entry.stored, kept)
        entry.evicted += cut.stored - kept
        self._retired.append(self._shorten(entry, pages))
        return cut

    def _new(self, keys: Sequence[Hashable]) -> tuple[RequestId, Request]:
        if not self._free_slots:
            self._resize(2 * self.blocks.shape[0], self.blocks.shape[1])
        request = RequestId(self._next)
        self._next += 1
        self._requests[request] = Request(self._free_slots.pop(), keys=tuple(keys))
        return request, self._requests[request]

    def _make_room(self, needed: int) -> None:
        """See to it that ``needed`` blocks can be allocated, at the cost of cached prefixes that nobody uses."""
        idle = self.block_allocator.idle_blocks
        if needed <= idle:
            return
        evictable = self.prefixes.evictable
        if self.block_allocator.limit is not None and needed > idle + evictable:
            raise OutOfPages(needed, idle + evictable)
        self.prefixes.evict(needed - idle)

    def _shared_and_written(self, entry: Request, count: int, kept: int, wanted: int) -> list[int]:
        """Pages that a call of ``count`` tokens writes to and that others hold too: the last, all that stay if it
        trims."""
        if kept < entry.stored:
            pages = range(min(wanted, len(entry.blocks)))
        else:
            last = self.pages(kept)
            pages = range(last - 1, last) if count and kept % self.page_size else range(0)
        return [page for page in pages if self.block_allocator.references(entry.blocks[page]) > 1]

    def _own(self, entry: Request, page: int) -> tuple[BlockId, BlockId]:
        """Copy-on-write: a block of its own for a page; returns (from, to)."""
        self.changes += 1
        (block,) = self.block_allocator.allocate(1)
        old, entry.blocks[page] = entry.blocks[page], block
        self.blocks[entry.slot, page] = block
        self.block_allocator.release([old])
        return old, block

    def _new_rows(self, count: int, after: BlockId | None = None) -> list[BlockId]:
        return self.row_allocator.allocate(count, after) if self.stateful else []

    def _attach(self, entry: Request, blocks: Sequence[BlockId], rows: Sequence[BlockId]) -> None:
        """Append pages to a request: lists and table tails are written together."""
        first, last = len(entry.blocks), len(entry.blocks) + len(blocks)
        if last > self.blocks.shape[1]:
            self._resize(self.blocks.shape[0], max(last, 2 * self.blocks.shape[1]))
        entry.blocks += blocks
        entry.rows += rows
        if blocks:
            self.blocks[entry.slot, first:last] = torch.tensor(blocks)
        if rows:
            self.rows[entry.slot, first:last] = torch.tensor(rows)

    def _detach(self, entry: Request, pages: int) -> None:
        """Free a request's pages from ``pages`` on."""
        self.changes += 1
        blocks, rows = self._shorten(entry, pages)
        self.block_allocator.release(blocks)
        self.row_allocator.release(rows)

    def _shorten(self, entry: Request, pages: int) -> tuple[list[BlockId], list[BlockId]]:
        """Take a request's pages from ``pages`` on out of it: lists and table tails are written together."""
        taken = entry.blocks[pages:], entry.rows[pages:]
        del entry.blocks[pages:], entry.rows[pages:]
        self.blocks[entry.slot, pages:] = NULL_BLOCK
        self.rows[entry.slot, pages:] = NULL_BLOCK
        return taken

    def _resize(self, slots: int, width: int) -> None:
        old_slots, old_width = self.blocks.shape
        for name in ("blocks", "rows"):
            bigger = _null_table(slots, width)
            bigger[:old_slots, :old_width] = getattr(self, name)
            setattr(self, name, bigger)
        self._free_slots += range(old_slots, slots)


@torch.inference_mode(False)  # tables outlive a caller's inference mode
def _null_table(slots: int, width: int) -> torch.Tensor:
    return torch.full((slots, width), NULL_BLOCK, dtype=torch.int64)
