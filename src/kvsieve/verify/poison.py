"""Memory that nobody has written is poison: NaN or a large number, or garbage where NaN does not exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

import kvsieve.paging.pool
from kvsieve.paging.allocator import NULL_BLOCK, BlockAllocator, BlockId
from kvsieve.paging.pool import LayerPool
from kvsieve.runtime import Runtime

NAN = float("nan")
_filling = NAN


def garbage(dtype: torch.dtype) -> float | int:
    """What a buffer of this dtype is filled with."""
    return _filling if dtype.is_floating_point else torch.iinfo(dtype).max if dtype is not torch.bool else 1


def poison(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Stands in for uninitialised memory."""
    return torch.full(tuple(shape), garbage(dtype), dtype=dtype, device=device)


@contextmanager
def poisoned_pools(filling: float = NAN) -> Iterator[None]:
    """Every pool buffer made inside is poison, NaN or another number."""
    global _filling
    before = kvsieve.paging.pool.uninitialised, _filling
    kvsieve.paging.pool.uninitialised, _filling = poison, filling
    try:
        yield
    finally:
        kvsieve.paging.pool.uninitialised, _filling = before


def spoil_free_memory(runtime: Runtime) -> None:
    """Poison every block and row that no request and no prefix holds, the null ones included."""
    tables = runtime.tables
    blocks = _unheld(tables.block_allocator)
    rows = _unheld(tables.row_allocator)
    assert NULL_BLOCK in blocks
    for _, layer in runtime.layers.items():
        _spoil(layer.pool, blocks, rows)


def _unheld(allocator: BlockAllocator) -> list[BlockId]:
    everything = (BlockId(block) for block in range(allocator.capacity))
    return [block for block in everything if not allocator.references(block)]


def _spoil(pool: LayerPool, blocks: Sequence[int], rows: Sequence[int]) -> None:
    for places, fields in ((blocks, [pool.k, pool.v, *pool.summaries.values()]), (rows, [*pool.state.values()])):
        for field in fields:
            field[:, [place for place in places if place < field.shape[1]]] = garbage(field.dtype)
