"""Which blocks and state rows belong to which request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NewType

import torch

from kvsieve.errors import ConfigError, OutOfPages
from kvsieve.paging.allocator import NULL_BLOCK, BlockAllocator, BlockId

RequestId = NewType("RequestId", int)


@dataclass
class Request:
    """Tokens stored and, page by page, the blocks and state rows that hold them."""

    slot: int
    length: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    rows: list[BlockId] = field(default_factory=list)


class RequestTables:
    """Requests of one runtime. All layers share them: a token has the same place in every layer.

    ``blocks`` and ``rows`` are int64 ``[slots, pages]`` on the CPU; entries past a request's last page are the null
    block, so a stale tail cannot be read.
    """

    def __init__(self, page_size: int, num_blocks: int | None, stateful: bool) -> None:
        self.page_size = page_size
        self.block_allocator = BlockAllocator(num_blocks)
        self.row_allocator = BlockAllocator(None)
        self.stateful = stateful
        self.blocks = torch.full((1, 1), NULL_BLOCK, dtype=torch.int64)
        self.rows = torch.full((1, 1), NULL_BLOCK, dtype=torch.int64)
        self._requests: dict[RequestId, Request] = {}
        self._free_slots: list[int] = [0]
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

    def admit(self) -> RequestId:
        """A new, empty request."""
        if not self._free_slots:
            self._resize(2 * self.blocks.shape[0], self.blocks.shape[1])
        request = RequestId(self._next)
        self._next += 1
        self._requests[request] = Request(self._free_slots.pop())
        return request

    def finish(self, request: RequestId) -> None:
        """Forget a request; blocks that nobody else holds become free."""
        entry = self[request]
        self.block_allocator.release(entry.blocks)
        self.row_allocator.release(entry.rows)
        self.blocks[entry.slot] = NULL_BLOCK
        self.rows[entry.slot] = NULL_BLOCK
        self._free_slots.append(entry.slot)
        del self._requests[request]

    def pages(self, length: int) -> int:
        """Pages of a request of ``length`` tokens."""
        return -(-length // self.page_size)

    def append(self, requests: Sequence[RequestId], counts: Sequence[int]) -> list[BlockId]:
        """Make room for ``counts`` new tokens; returns the state rows of the pages that entered.

        Raises:
            OutOfPages: nothing is changed.
        """
        entries = [self[request] for request in requests]
        new = [
            self.pages(entry.length + count) - len(entry.blocks) for entry, count in zip(entries, counts, strict=True)
        ]
        free = self.block_allocator.free_blocks
        if free is not None and sum(new) > free:
            raise OutOfPages(sum(new), free)
        entered: list[BlockId] = []
        for entry, count, pages in zip(entries, counts, new, strict=True):
            entry.length += count
            entered += self._grow_request(entry, pages)
        return entered

    def _grow_request(self, entry: Request, pages: int) -> list[BlockId]:
        if pages == 0:
            return []
        first, last = len(entry.blocks), len(entry.blocks) + pages
        if last > self.blocks.shape[1]:
            self._resize(self.blocks.shape[0], max(last, 2 * self.blocks.shape[1]))
        blocks = self.block_allocator.allocate(pages, entry.blocks[-1] if entry.blocks else None)
        entry.blocks += blocks
        self.blocks[entry.slot, first:last] = torch.tensor(blocks)
        if not self.stateful:
            return []
        rows = self.row_allocator.allocate(pages, entry.rows[-1] if entry.rows else None)
        entry.rows += rows
        self.rows[entry.slot, first:last] = torch.tensor(rows)
        return rows

    def _resize(self, slots: int, width: int) -> None:
        old_slots, old_width = self.blocks.shape
        for name in ("blocks", "rows"):
            bigger = torch.full((slots, width), NULL_BLOCK, dtype=torch.int64)
            bigger[:old_slots, :old_width] = getattr(self, name)
            setattr(self, name, bigger)
        self._free_slots += range(old_slots, slots)
