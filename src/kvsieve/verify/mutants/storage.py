"""Faults of pools and allocators: what is stored, copied, saved, initialised, counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvsieve.paging import pool as pool_module
from kvsieve.paging.allocator import BlockAllocator, BlockId
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.prefix import PrefixCache
from kvsieve.verify.mutants.base import LIFE_CYCLE, Table

TABLE = Table(LIFE_CYCLE)
fault = TABLE.fault


@fault("a grown buffer keeps half of what was stored", 9, LayerPool, "_grown")
def _(original: Any) -> Any:
    def grown(self: Any, old: torch.Tensor, size: int) -> torch.Tensor:
        new: torch.Tensor = original(self, old, size)
        if new is not old and old.shape[1]:
            half = slice(old.shape[1] // 2, old.shape[1])
            new[:, half] = pool_module.uninitialised(new[:, half].shape, new.dtype, new.device)
        return new

    return grown


@fault("rows of a grown buffer are not initialised", 9, LayerPool, "enter")
def _(original: Any) -> Any:
    sizes: dict[int, int] = {}

    def enter(self: LayerPool, rows: torch.Tensor) -> None:
        for field in self.state.values():
            first = sizes.setdefault(id(self), field.shape[1])
            rows = rows[rows < first]
        original(self, rows)

    return enter


@fault("a recycled row keeps the state of the request before", 10, LayerPool, "enter")
def _(original: Any) -> Any:
    seen: set[tuple[int, int]] = set()

    def enter(self: LayerPool, rows: torch.Tensor) -> None:
        fresh = [row for row in rows.tolist() if (id(self), row) not in seen]
        seen.update((id(self), row) for row in fresh)
        original(self, torch.tensor(fresh, dtype=torch.int64))

    return enter


@fault("state starts at 0, not at the flow's initial value", 10, LayerPool, "enter")
def _(original: Any) -> Any:
    def enter(self: LayerPool, rows: torch.Tensor) -> None:
        for field in self.state.values():
            field[:, rows] = 0

    return enter


@fault("only KV head 0 starts its state", 10, LayerPool, "enter")
def _(original: Any) -> Any:
    def enter(self: LayerPool, rows: torch.Tensor) -> None:
        kept = {name: field[1:, rows].clone() for name, field in self.state.items()}
        original(self, rows)
        for name, field in self.state.items():
            field[1:, rows] = kept[name]

    return enter


@fault("K and V of KV heads are written in another order", 3, LayerPool, "write")
def _(original: Any) -> Any:
    def write(self: LayerPool, blocks: Any, offsets: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        original(self, blocks, offsets, k.flip(1), v.flip(1))

    return write


@fault("a call writes only the first 8 tokens of a page", None, LayerPool, "write")
def _(original: Any) -> Any:
    def write(self: LayerPool, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        original(self, blocks, offsets.clamp(max=2), k, v)

    return write


@fault("a fork does not copy state", None, LayerPool, "copy")
def _(original: Any) -> Any:
    def copy(self: LayerPool, blocks: Any, rows: Any) -> None:
        original(self, blocks, [])
        self.enter(torch.tensor([target for _, target in rows], dtype=torch.int64))

    return copy


@fault("copy-on-write does not copy V", None, LayerPool, "copy")
def _(original: Any) -> Any:
    def copy(self: LayerPool, blocks: Any, rows: Any) -> None:
        kept = self.v[:, [target for _, target in blocks]].clone()
        original(self, blocks, rows)
        self.v[:, [target for _, target in blocks]] = kept

    return copy


@fault("copy-on-write copies in the other direction", None, LayerPool, "copy")
def _(original: Any) -> Any:
    def copy(self: LayerPool, blocks: Any, rows: Any) -> None:
        original(self, [pair[::-1] for pair in blocks], rows)

    return copy


@fault("preemption forgets summaries", None, LayerPool, "load")
def _(original: Any) -> Any:
    def load(self: LayerPool, saved: Any, blocks: Sequence[int], rows: Sequence[int]) -> None:
        places = list(blocks)
        kept = {name: field[:, places].clone() for name, field in self.summaries.items()}
        original(self, saved, blocks, rows)
        for name, field in self.summaries.items():
            field[:, places] = kept[name]

    return load


@fault("preemption starts state afresh", None, LayerPool, "load")
def _(original: Any) -> Any:
    def load(self: LayerPool, saved: Any, blocks: Any, rows: Any) -> None:
        original(self, saved, blocks, rows)
        self.enter(torch.tensor(rows, dtype=torch.int64))

    return load


@fault("a request is resumed into the wrong blocks", None, LayerPool, "load")
def _(original: Any) -> Any:
    def load(self: LayerPool, saved: Any, blocks: Sequence[int], rows: Any) -> None:
        original(self, saved, [*blocks[1:], *blocks[:1]], rows)

    return load


@fault("preemption saves K and V in bfloat16", None, LayerPool, "save")
def _(original: Any) -> Any:
    def save(self: LayerPool, blocks: Any, rows: Any) -> dict[str, torch.Tensor]:
        saved: dict[str, torch.Tensor] = original(self, blocks, rows)
        return {name: x.bfloat16().to(x.dtype) if name in "kv" else x for name, x in saved.items()}

    return save


@fault("a block is handed out twice", 8, BlockAllocator, "allocate")
def _(original: Any) -> Any:
    calls = [0]

    def allocate(self: BlockAllocator, count: int, after: Any = None) -> list[BlockId]:
        blocks: list[BlockId] = original(self, count, after)
        calls[0] += 1
        held = [block for block in self._references if block not in blocks]
        return [*blocks[:-1], held[0]] if blocks and held and calls[0] % 7 == 0 else blocks

    return allocate


@fault("a block with other holders is freed", 8, BlockAllocator, "release")
def _(original: Any) -> Any:
    def release(self: BlockAllocator, blocks: list[BlockId]) -> None:
        shared = [block for block in blocks if self.references(block) > 1]
        original(self, [block for block in blocks if block in self._references])
        self._free = sorted({*self._free, *shared})

    return release


@fault("the last block of a request is never freed", None, BlockAllocator, "release")
def _(original: Any) -> Any:
    def release(self: BlockAllocator, blocks: list[BlockId]) -> None:
        original(self, blocks[:-1] if len(blocks) > 1 else blocks)

    return release


@fault("a shared block is counted once", None, BlockAllocator, "share")
def _(original: Any) -> Any:
    def share(self: BlockAllocator, blocks: list[BlockId]) -> None:
        original(self, [block for block in blocks if self._references[block] < 2])

    return share


@fault("prefixes that requests hold are evicted", None, PrefixCache, "evict")
def _(original: Any) -> Any:
    def evict(self: PrefixCache, count: int) -> None:
        for key in list(self._blocks)[: max(0, count)]:
            self._allocator.release([self._blocks.pop(key)])

    return evict


@fault("a prefix is found in the middle of the keys", 11, PrefixCache, "match")
def _(original: Any) -> Any:
    def match(self: PrefixCache, keys: Sequence[Any]) -> list[BlockId]:
        known = [key for key in keys if key in self._blocks]
        found: list[BlockId] = original(self, known)
        return found

    return match


@fault("pages of a prefix come in reverse order", None, PrefixCache, "match")
def _(original: Any) -> Any:
    def match(self: PrefixCache, keys: Sequence[Any]) -> list[BlockId]:
        found: list[BlockId] = original(self, keys)
        return found[::-1]

    return match
