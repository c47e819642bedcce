"""Reference-counted blocks: consecutive runs preferred, so that whole requests can be read as views."""

from __future__ import annotations

import bisect
from typing import NewType

from kvsieve.errors import OutOfPages

BlockId = NewType("BlockId", int)
"""A block's place in the pool."""
PageIndex = NewType("PageIndex", int)
"""A page's place in its request. Never the same thing as a BlockId, even where the numbers agree."""

NULL_BLOCK = BlockId(0)
"""Never allocated: padding points here."""


class BlockAllocator:
    """Hands out blocks ``1 .. capacity - 1``; block 0 is the null block.

    Args:
        capacity: blocks of the pool, the null block included; None: grows without limit.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.limit = capacity
        self.capacity = 1
        self._free: list[BlockId] = []  # ascending
        self._references: dict[BlockId, int] = {}
        if capacity is not None:
            self._grow(capacity)

    @property
    def idle_blocks(self) -> int:
        """Blocks that exist and are free, whether or not the pool may grow."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks that somebody holds."""
        return len(self._references)

    def allocate(self, count: int, after: BlockId | None = None) -> list[BlockId]:
        """``count`` blocks with one reference each, following ``after`` where free, else the first long enough run.

        Raises:
            OutOfPages: fewer are free; nothing is changed.
        """
        if count == 0:
            return []
        if count > len(self._free):
            if self.limit is not None:
                raise OutOfPages(count, len(self._free))
            self._grow(max(2 * self.capacity, self.capacity + count))
        start = self._run(count, after)
        blocks = self._free[start : start + count]
        del self._free[start : start + count]
        self._references.update(dict.fromkeys(blocks, 1))
        return blocks

    def reserve(self, count: int) -> None:
        """See to it that ``count`` blocks are free, if the pool may grow."""
        if self.limit is None and count > len(self._free):
            self._grow(self.capacity + count - len(self._free))

    def share(self, blocks: list[BlockId]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            self._references[block] += 1

    def release(self, blocks: list[BlockId]) -> None:
        """Drop a reference from each block; a block without one is free."""
        freed = []
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                del self._references[block]
                freed.append(block)
        if freed:
            self._free = sorted(self._free + freed)  # runs are merged, not sorted anew

    def references(self, block: BlockId) -> int:
        """How many hold a block; 0 for a free one and for the null block."""
        return self._references.get(block, 0)

    def _grow(self, capacity: int) -> None:
        self._free.extend(BlockId(i) for i in range(self.capacity, capacity))
        self.capacity = max(self.capacity, capacity)

    def _run(self, count: int, after: BlockId | None) -> int:
        """Index into the free list from which to take ``count`` blocks."""
        if after is not None:
            start = bisect.bisect_left(self._free, after + 1)
            if start + count <= len(self._free) and self._free[start + count - 1] == after + count:
                return start
        for start in range(len(self._free) - count + 1):
            if self._free[start + count - 1] - self._free[start] == count - 1:
                return start
        return 0
