"""Evicting one token per segment, as every step of a request at its capacity does."""

from __future__ import annotations

import triton
import triton.language as tl

from kvsieve.backends.triton.launch import (
    ONCE_WAITED,
    launch_options,
    let_next_start,
    power_of_two,
    wait_for_inputs,
)
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.slots import POSITION, Trim

MOST_SLOTS = 16384
"""One program holds the ranks of a segment."""


@triton.jit
def _evict_kernel(
    k, v, position, mass, blocks, rows, recent, stored, sink,
    k_h, k_b, k_t, v_h, v_b, v_t, pos_h, pos_r, mass_h, mass_r, b_b, r_b,
    P: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, MASS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The token of least mass goes, the younger one at equal mass; the last slot's token moves into its place."""
    wait_for_inputs(PDL)
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    blocks += b * b_b
    rows += b * r_b
    position += h * pos_h
    last = stored - 1  # holds the newest token, which stays
    slot = tl.arange(0, BLOCK)
    there = slot < last
    row = tl.load(rows + slot // P, mask=there, other=0)
    where = tl.load(position + row * pos_r + slot % P, mask=there, other=0)
    rank = 2147483647 - where
    if MASS:
        mass += h * mass_h
        held = tl.load(mass + row * mass_r + slot % P, mask=there, other=0.0)
        bits = tl.where(held != held, -1, held.to(tl.int32, bitcast=True))  # never negative: bits order like values
        rank += bits.to(tl.int64) << 32
    stays = (where < sink) | (where >= tl.load(recent + b)) | (slot >= last)
    rank = tl.where(stays, 9223372036854775807, rank)
    gone = tl.sum(tl.where(rank == tl.min(rank, 0), slot, 0), 0)
    to_row, to_block = tl.load(rows + gone // P), tl.load(blocks + gone // P)
    from_row, from_block = tl.load(rows + last // P), tl.load(blocks + last // P)
    to_place, from_place = gone % P, last % P
    d = tl.arange(0, WIDTH)
    key = tl.load(k + h * k_h + from_block * k_b + from_place * k_t + d, mask=d < D, other=0.0)
    value = tl.load(v + h * v_h + from_block * v_b + from_place * v_t + d, mask=d < DV, other=0.0)
    tl.store(k + h * k_h + to_block * k_b + to_place * k_t + d, key, mask=d < D)
    tl.store(v + h * v_h + to_block * v_b + to_place * v_t + d, value, mask=d < DV)
    tl.store(position + to_row * pos_r + to_place, tl.load(position + from_row * pos_r + from_place))
    if MASS:
        tl.store(mass + to_row * mass_r + to_place, tl.load(mass + from_row * mass_r + from_place))
    let_next_start(PDL)


def evict_one(pool: LayerPool, one: Trim) -> None:
    """Evict one token of each segment of the trim's requests; ``stored`` is ``kept + 1``."""
    assert one.stored == one.kept + 1
    mass, (d, dv) = pool.state.get("mass"), (pool.k.shape[3], pool.v.shape[3])
    position = pool.state[POSITION]
    _evict_kernel[pool.num_kv_heads, len(one.recent)](
        pool.k, pool.v, position, mass, one.blocks, one.rows, one.recent, one.stored, one.sink,
        *(*pool.k.stride()[:3], *pool.v.stride()[:3], *position.stride()[:2]),
        *((0, 0) if mass is None else mass.stride()[:2]), *(one.blocks.stride(0), one.rows.stride(0)),
        P=pool.page_size, D=d, DV=dv, BLOCK=power_of_two(one.kept), WIDTH=power_of_two(max(d, dv)),
        MASS=mass is not None, num_warps=4, **launch_options(pool.device, when=ONCE_WAITED),
    )  # fmt: skip
