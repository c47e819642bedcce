"""Evicting tokens of requests whose K and V lie in slots: which go, and how the others move together.

A request's slots are numbered through its blocks. Every KV head keeps tokens of its own, in any order; ``position``, a
state field, says which token a slot holds. After a trim they fill the first slots, so the next token's slot is the same
for all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvsieve.graph import FieldSpec
from kvsieve.paging.pool import LayerPool

POSITION = "position"
"""State field [p]: the position in its request of each slot's token."""
_STAYS = torch.iinfo(torch.int64).max


def slot_fields(page_size: int, with_mass: bool) -> dict[str, FieldSpec]:
    """The state fields of a layer whose tokens are evicted."""
    fields = {POSITION: FieldSpec((page_size,), torch.int64, torch.zeros(page_size, dtype=torch.int64))}
    if with_mass:
        fields["mass"] = FieldSpec((page_size,), torch.float32, torch.zeros(page_size, dtype=torch.float32))
    return fields


@dataclass(frozen=True)
class Trim:
    """Requests that hold ``stored`` tokens and keep ``kept``: ``blocks`` and state ``rows`` [B, S] of their slots.

    Tokens before position ``sink``, and those from ``recent`` [B] on, stay.
    """

    blocks: torch.Tensor
    rows: torch.Tensor
    stored: int
    kept: int
    sink: int
    recent: torch.Tensor


def occupy(pool: LayerPool, rows: torch.Tensor, offsets: torch.Tensor, positions: torch.Tensor) -> None:
    """New tokens [T] lie at (state row, offset): nothing of those that lay there before is left."""
    pool.state[POSITION][:, rows, offsets] = positions
    if "mass" in pool.state:
        pool.state["mass"][:, rows, offsets] = 0.0


def trim(pool: LayerPool, one: Trim) -> None:
    """Keep the tokens of most mass, and move them to the first ``kept`` slots.

    At equal mass the older token stays; NaN ranks below everything. Only the tokens that lie behind the first ``kept``
    slots move, each into the slot of one that goes.
    """
    rows = _places(pool, one.rows, pool.rows, one.stored)
    position = pool.flat(pool.state[POSITION]).flatten()[rows]
    protected = (position < one.sink) | (position >= one.recent[:, None, None])
    rank = _rank(pool, rows, position).masked_fill_(protected, _STAYS)
    gone = rank.topk(one.stored - one.kept, -1, largest=False).indices
    source, target = _moves(gone, one.stored, one.kept)
    _move(pool, list(pool.state.values()), rows, source, target)
    _move(pool, [pool.k, pool.v], _places(pool, one.blocks, pool.k.shape[1], one.stored), source, target)


def _rank(pool: LayerPool, rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """One integer per slot that orders by mass, then age: mass is never negative, so its bits order like itself."""
    older = (1 << 31) - 1 - position
    if "mass" not in pool.state:
        return older
    mass = pool.flat(pool.state["mass"]).flatten()[rows]
    bits = torch.where(mass.isnan(), -1, mass.view(torch.int32)).to(torch.int64)
    return (bits << 32) + older


def _moves(gone: torch.Tensor, stored: int, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots (from, to) [B, H, m] that fill the gaps among the first ``kept``; what need not move goes to itself."""
    stays = torch.ones(*gone.shape[:2], stored, dtype=torch.bool, device=gone.device).scatter_(-1, gone, False)
    count = min(kept, stored - kept)
    slot = torch.arange(stored, device=gone.device).expand_as(stays)
    movers = torch.where(stays, slot, slot + stored)[..., kept:].topk(count, -1, largest=False).values
    gaps = torch.where(stays, slot + stored, slot)[..., :kept].topk(count, -1, largest=False).values
    real = movers < stored
    source = torch.where(real, movers, movers - stored)
    return source, torch.where(real, gaps, source)


def _places(pool: LayerPool, table: torch.Tensor, size: int, slots: int) -> torch.Tensor:
    """Where slots lie in a flat field [H * size * p, ...]: [B, H, slots]."""
    slot = torch.arange(slots, device=table.device)
    page = pool.places(table[:, None, slot // pool.page_size], size)
    return page * pool.page_size + slot % pool.page_size


def _move(
    pool: LayerPool, fields: Sequence[torch.Tensor], places: torch.Tensor, source: torch.Tensor, target: torch.Tensor
) -> None:
    origin, goal = (places.gather(-1, slots).flatten() for slots in (source, target))
    for field in fields:
        flat = pool.flat(field).flatten(0, 1)
        flat[goal] = flat[origin]
