"""Faults of eviction: who goes, how the others move together, and what a request's life makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import kvsieve.backends.base as base
from kvsieve.backends.base import Backend
from kvsieve.mass import EVICT_DECAY, AttentionMass, MassLedger
from kvsieve.paging import slots
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.slots import POSITION, Trim
from kvsieve.paging.table import Request, RequestId, RequestTables
from kvsieve.runtime import Runtime
from kvsieve.verify.mutants.base import EVICTION, Table

TABLE = Table(EVICTION)
fault = TABLE.fault


def _trims(original: Any, change: Any) -> Any:
    """``trim`` of something else."""
    return lambda self, pool, one: original(self, pool, change(one))


@fault("sinks may be evicted", 7, Backend, "trim")
def _(original: Any) -> Any:
    return _trims(original, lambda one: replace(one, sink=0))


@fault("the last sink may be evicted", 28, Backend, "trim")
def _(original: Any) -> Any:
    return _trims(original, lambda one: replace(one, sink=one.sink - 1))


@fault("recent tokens may be evicted: new ones leave at once", 6, Backend, "trim")
def _(original: Any) -> Any:
    return _trims(original, lambda one: replace(one, recent=one.recent + 10))


@fault("the oldest recent token may be evicted", None, Backend, "trim")
def _(original: Any) -> Any:
    return _trims(original, lambda one: replace(one, recent=one.recent + 1))


@fault("one recent token too many stays", None, Backend, "trim")
def _(original: Any) -> Any:
    return _trims(original, lambda one: replace(one, recent=one.recent - 1))


@fault("all requests share the recent tokens of the first", 1, Backend, "trim")
def _(original: Any) -> Any:
    return _trims(original, lambda one: replace(one, recent=one.recent[:1].expand_as(one.recent)))


@fault("the heaviest token is evicted", None, slots, "_rank")
def _(original: Any) -> Any:
    return lambda *arguments: -original(*arguments)


@fault("at equal mass the younger token stays", None, slots, "_rank")
def _(original: Any) -> Any:
    def rank(pool: LayerPool, rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = original(pool, rows, position)
        return value if "mass" not in pool.state else value + 2 * position

    return rank


@fault("mass is ranked in 29 bits", 17, slots, "_rank")
def _(original: Any) -> Any:
    return lambda pool, rows, position: original(pool, rows, position) >> 35 << 35 | ((1 << 31) - 1 - position)


@fault("mass is ranked in 16 bits", 17, slots, "_rank")
def _(original: Any) -> Any:
    return lambda pool, rows, position: original(pool, rows, position) >> 48 << 48 | ((1 << 31) - 1 - position)


@fault("every KV head evicts what head 0 does", 5, slots, "_rank")
def _(original: Any) -> Any:
    def rank(pool: LayerPool, rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = original(pool, rows, position)
        order = position[:, :1].argsort(-1).expand_as(position)
        place = order.gather(-1, position.argsort(-1).argsort(-1))
        return value[:, :1].gather(-1, place.flatten(1)[:, None]).view_as(value)

    return rank


@fault("what is evicted is the age's choice, not the mass's", 4, slots, "_rank")
def _(original: Any) -> Any:
    return lambda pool, rows, position: position


def _left_behind(original: Any, name: str) -> Any:
    """``_move`` that forgets a field of a pool."""

    def trim(self: Backend, pool: LayerPool, one: Trim) -> None:
        fields = {"k": pool.k, "v": pool.v, **pool.state}
        before = fields[name].clone() if name in fields else None
        original(self, pool, one)
        if before is not None:
            fields[name].copy_(before)

    return trim


@fault("a token's mass stays behind when it moves", None, Backend, "trim")
def _(original: Any) -> Any:
    return _left_behind(original, "mass")


@fault("a token's value stays behind when it moves", None, Backend, "trim")
def _(original: Any) -> Any:
    return _left_behind(original, "v")


@fault("a token's key stays behind when it moves", None, Backend, "trim")
def _(original: Any) -> Any:
    return _left_behind(original, "k")


@fault("a token's position stays behind when it moves", None, Backend, "trim")
def _(original: Any) -> Any:
    return _left_behind(original, POSITION)


@fault("a slot keeps the mass of the token before", 10, base, "occupy")
def _(original: Any) -> Any:
    def occupy(pool: LayerPool, rows: torch.Tensor, offsets: torch.Tensor, positions: torch.Tensor) -> None:
        before = {name: field.clone() for name, field in pool.state.items() if name != POSITION}
        original(pool, rows, offsets, positions)
        for name, field in before.items():
            pool.state[name].copy_(field)

    return occupy


@fault("positions count from what is stored", None, base, "occupy")
def _(original: Any) -> Any:
    return lambda pool, rows, offsets, positions: original(
        pool, rows, offsets, (rows - rows.min()) * pool.page_size + offsets
    )


@fault("a chunk of a prompt is trimmed before the next", 27, Runtime, "_limits")
def _(original: Any) -> Any:
    def limits(self: Runtime, requests: Sequence[RequestId], counts: Sequence[int], decode: bool) -> Any:
        return original(self, requests, counts, True)

    return limits


@fault("a second turn still attends the token that went", None, Runtime, "_limits")
def _(original: Any) -> Any:
    def limits(self: Runtime, requests: Sequence[RequestId], counts: Sequence[int], decode: bool) -> Any:
        return original(self, requests, counts, decode) if decode else [None] * len(requests)

    return limits


@fault("a second turn is trimmed between its chunks", 27, Runtime, "_open")
def _(original: Any) -> Any:
    def open_call(self: Runtime, requests: Sequence[RequestId], counts: Sequence[int], decode: bool) -> Any:
        stepped = [self.tables[request].stepped for request in requests]
        result = original(self, requests, counts, decode)
        for request, before in zip(requests, stepped, strict=True):
            self.tables[request].stepped |= before
        return result

    return open_call


@fault("NaN weighs as much as no mass", None, slots, "_rank")
def _(original: Any) -> Any:
    def rank(pool: LayerPool, rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = original(pool, rows, position)
        return torch.where(value < 0, value + (1 << 32), value)

    return rank


@fault("what a trim leaves is free before all layers have read it", 32, RequestTables, "_cut")
def _(original: Any) -> Any:
    def cut(self: RequestTables, entry: Request, kept: int, pages: int) -> Any:
        result = original(self, entry, kept, pages)
        self.settle()
        return result

    return cut


@fault("a fork's shared blocks are trimmed in place", None, RequestTables, "_shared_and_written")
def _(original: Any) -> Any:
    return lambda self, entry, *sizes: original(self, entry, *sizes) if sizes[1] == entry.stored else []


@fault("queries that were kept never count", 4, MassLedger, "call")
def _(original: Any) -> Any:
    def call(self: MassLedger, *arguments: Any) -> Any:
        result = original(self, *arguments)
        return replace(result, committed=None)

    return call


@fault("a preempted request forgets that it decodes", None, RequestTables, "release")
def _(original: Any) -> Any:
    def release(self: RequestTables, request: RequestId) -> None:
        original(self, request)
        self[request].stepped = False

    return release


@fault("a fork forgets that it decodes", None, RequestTables, "fork")
def _(original: Any) -> Any:
    def fork(self: RequestTables, request: RequestId) -> Any:
        twin, rows = original(self, request)
        self[twin].stepped = False
        return twin, rows

    return fork


@fault("the decay is that of Keep", None, Runtime, "_limits")
def _(original: Any) -> Any:
    def limits(self: Runtime, *arguments: Any) -> Any:
        if isinstance(self.mass, AttentionMass) and self.mass.decay == EVICT_DECAY:
            self.mass = replace(self.mass, decay=0.9)
        return original(self, *arguments)

    return limits
