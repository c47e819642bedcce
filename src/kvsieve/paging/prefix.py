"""Full blocks that later requests with the same beginning may share. The caller names them; tokens are never seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from kvsieve.paging.allocator import BlockAllocator, BlockId


class PrefixCache:
    """Key of a page (such as a chain hash of tokens, model and adapter) to the block that holds it.

    The cache owns a reference of each block; blocks that nobody else holds are given back when the pool runs short,
    the least recently used first.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._blocks: OrderedDict[Hashable, BlockId] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, keys: Sequence[Hashable]) -> list[BlockId]:
        """Blocks of the longest known beginning of ``keys``, with a new reference each."""
        blocks = []
        for key in keys:
            if key not in self._blocks:
                break
            self._blocks.move_to_end(key)
            blocks.append(self._blocks[key])
        self._allocator.share(blocks)
        return blocks

    def insert(self, key: Hashable, block: BlockId) -> None:
        """Remember a full block; the first block of a key stays."""
        if key not in self._blocks:
            self._allocator.share([block])
            self._blocks[key] = block

    def clear(self) -> None:
        """Know no prefix any more; blocks that nobody else holds are free."""
        self._allocator.release(list(self._blocks.values()))
        self._blocks.clear()

    @property
    def evictable(self) -> int:
        """Blocks that only the cache holds."""
        return sum(self._allocator.references(block) == 1 for block in self._blocks.values())

    def evict(self, count: int) -> None:
        """Give back up to ``count`` blocks that nobody else holds."""
        unused = [key for key, block in self._blocks.items() if self._allocator.references(block) == 1]
        for key in unused[: max(0, count)]:
            self._allocator.release([self._blocks.pop(key)])
