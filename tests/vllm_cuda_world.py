"""vLLM's CUDA cache without vLLM: blocks in random order, tokens outermost in a block, NaN where nothing is stored."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvsieve import Budget
from kvsieve.integrations.vllm.plan import Batch


@dataclass
class Cache:
    """A layer's cache ``[blocks, H, block_size, 2 * D]``, in memory ``[blocks, block_size, H, 2 * D]``, and who has
    which of its blocks. Block 0 is nobody's."""

    heads: int
    width: int
    block_size: int
    blocks: int
    dtype: torch.dtype = torch.float32
    tables: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.blocks, self.block_size, self.heads, 2 * self.width
        self.memory = torch.full(shape, float("nan"), dtype=self.dtype)
        self.draw = torch.Generator().manual_seed(self.blocks)
        self.free = (torch.randperm(self.blocks - 1, generator=self.draw) + 1).tolist()

    @property
    def tensor(self) -> torch.Tensor:
        """The cache as vLLM hands it over."""
        return self.memory.transpose(1, 2)

    def admit(self, length: int) -> int:
        """A request with so many random tokens; its place."""
        self.tables.append([])
        self.lengths.append(0)
        self.grow(len(self.tables) - 1, length)
        return len(self.tables) - 1

    def grow(self, request: int, count: int) -> torch.Tensor:
        """Store random tokens; their slots."""
        first, table = self.lengths[request], self.tables[request]
        while len(table) * self.block_size < first + count:
            table.append(self.free.pop(0))
        at = torch.arange(first, first + count)
        slots = torch.tensor(table)[at // self.block_size] * self.block_size + at % self.block_size
        values = torch.randn(count, self.heads, 2 * self.width, generator=self.draw).to(self.dtype)
        self.memory.flatten(0, 1)[slots] = values
        self.lengths[request] += count
        return slots

    def end(self, request: int) -> None:
        """Its blocks are the next that others get; what they hold stays."""
        self.free = self.tables[request] + self.free
        self.tables[request], self.lengths[request] = [], 0

    def tokens(self, request: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [T, D] of a request."""
        length = self.lengths[request]
        at = torch.arange(length)
        slots = torch.tensor(self.tables[request])[at // self.block_size] * self.block_size + at % self.block_size
        found = self.memory.flatten(0, 1)[slots, head]
        return found[:, : self.width], found[:, self.width :]

    def step(self, requests: list[int], rows: int, columns: int) -> Batch:
        """Each request gets a token: what vLLM says of that, padded to so many rows, its table full of old numbers."""
        slots = torch.full((rows,), -1)
        table = torch.randint(0, self.blocks, (rows, columns), generator=self.draw).to(torch.int32)
        lengths = torch.zeros(rows, dtype=torch.int32)
        for row, request in enumerate(requests):
            slots[row] = self.grow(request, 1)
            table[row, : len(self.tables[request])] = torch.tensor(self.tables[request], dtype=torch.int32)
            lengths[row] = self.lengths[request]
        table[len(requests) :] = 0
        starts = torch.arange(rows + 1).clamp(max=len(requests)).to(torch.int32)
        return Batch(starts, lengths, torch.zeros(rows, dtype=torch.bool), table, slots)


def around(page: int, block: int, budget: Budget) -> list[int]:
    """Lengths about the ends of pages, blocks and the budget."""
    edges = {page, block, 2 * block, budget.kept(1) * page, (budget.kept(1) + 1) * page}
    return sorted({max(2, edge + more) for edge in edges for more in (-1, 0, 1)})
