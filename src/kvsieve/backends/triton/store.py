"""Storing a call's tokens, and adding what a step gave them to the attention mass of the selected ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvsieve.backends.base import Backend, Selection
from kvsieve.backends.triton.elementary import exp
from kvsieve.backends.triton.launch import (
    ONCE_WAITED,
    launch_options,
    let_next_start,
    power_of_two,
    wait_for_inputs,
)
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.slots import POSITION
from kvsieve.plan import MassRows, Rows, Writes


@triton.jit
def _write_kernel(
    k, v, blocks, offsets, k_pool, v_pool, rows, slots, positions, position, mass,
    k_t, k_h, k_d, v_t, v_h, v_d, kp_h, kp_b, kp_t, vp_h, vp_b, vp_t, pos_h, pos_r, mass_h, mass_r,
    D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, MASS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """K and V of one token and head; where tokens are evicted also its position, and no mass."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    block, offset = tl.load(blocks + token), tl.load(offsets + token)
    d = tl.arange(0, BLOCK).to(tl.int64)  # features may lie far apart
    key = tl.load(k + token * k_t + h * k_h + d * k_d, mask=d < D, other=0.0)
    tl.store(k_pool + h * kp_h + block * kp_b + offset * kp_t + d, key, mask=d < D)
    value = tl.load(v + token * v_t + h * v_h + d * v_d, mask=d < DV, other=0.0)
    tl.store(v_pool + h * vp_h + block * vp_b + offset * vp_t + d, value, mask=d < DV)
    if SLOTS:
        row, slot = tl.load(rows + token), tl.load(slots + token)
        tl.store(position + h * pos_h + row * pos_r + slot, tl.load(positions + token))
        if MASS:
            tl.store(mass + h * mass_h + row * mass_r + slot, 0.0)
    let_next_start(PDL)


def write(pool: LayerPool, writes: Writes, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store k [T, H, D] and v [T, H, Dv], as they lie.

    A copy's memory would be free for the results of the next kernel while this one still reads it: a score does not
    always wait (:func:`wait_for_inputs`).
    """
    rows, slots, positions = writes.slots or (None, None, None)
    position, mass = pool.state.get(POSITION), pool.state.get("mass") if writes.slots else None
    widest = max(k.shape[2], v.shape[2])
    _write_kernel[k.shape[0], k.shape[1]](
        k, v, writes.blocks, writes.offsets, pool.k, pool.v, rows, slots, positions, position, mass,
        *(*k.stride(), *v.stride(), *pool.k.stride()[:3], *pool.v.stride()[:3]),
        *(*_row_strides(position), *_row_strides(mass)),
        D=k.shape[2], DV=v.shape[2], BLOCK=power_of_two(widest), SLOTS=rows is not None, MASS=mass is not None,
        num_warps=1, **launch_options(k.device, when=ONCE_WAITED),
    )  # fmt: skip


@triton.jit
def _enter_kernel(rows, fields, initial, strides, SIZES: tl.constexpr, PDL: tl.constexpr):
    """The initial value of all state fields, for one row and head. Rows come from the host."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    wait_for_inputs(PDL)
    if row != 0:  # the null row is nobody's
        for one in tl.static_range(len(SIZES)):
            place = h * strides[2 * one] + row * strides[2 * one + 1]
            _fill(fields[one] + place, initial[one], SIZES[one])
    let_next_start(PDL)


@triton.jit
def _fill(target, source, SIZE: tl.constexpr):
    BLOCK: tl.constexpr = triton.next_power_of_2(SIZE) if SIZE < 1024 else 1024
    for first in range(0, SIZE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < SIZE, other=0), mask=at < SIZE)


def enter(pool: LayerPool, rows: torch.Tensor) -> None:
    """Start the state rows [C] at the flow's initial values."""
    if len(rows) and pool.state:
        fields, initial = tuple(pool.state.values()), tuple(pool.initial[name] for name in pool.state)
        _enter_kernel[len(rows), pool.num_kv_heads](
            rows, fields, initial, tuple(stride for field in fields for stride in field.stride()[:2]),
            SIZES=tuple(value.numel() for value in initial),
            num_warps=1, **launch_options(pool.device, when=ONCE_WAITED),
        )  # fmt: skip


@dataclass(frozen=True)
class Logits:
    """What a step attended with: raw logits [B, H, G, K * p], lse [B, H, G], and how probabilities of a group become
    one number."""

    raw: torch.Tensor
    lse: torch.Tensor
    reduction: str


@triton.jit
def listed_tokens(listed, length, P: tl.constexpr):
    """Tokens of so many listed pages, the last of which is the request's last."""
    return (listed - (length + P - 1) // P) * P + length


@triton.jit
def rows_of_pages(pages, rows, p_b, p_h, r_b, b, h, first, listed, PAGES: tl.constexpr):
    """State rows of some listed pages of one segment."""
    place = first + tl.arange(0, PAGES)
    page = tl.load(pages + b * p_b + h * p_h + place, mask=place < listed, other=0)
    return tl.load(rows + b * r_b + page, mask=place < listed, other=0)


@triton.jit
def mass_of_pages(
    raw, lse, row, unit, mass, mass_sum, raw_g, m_h, m_r, s_h, s_r, b, h, segment, first, listed, length,
    P: tl.constexpr, GROUP: tl.constexpr, BLOCK_P: tl.constexpr, PAGES: tl.constexpr, REDUCTION: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """Add the mass of some listed pages of one segment, whose state rows are ``row``.

    A list names a page once and a state row has one request, so that each number is added to once: the memory does it,
    and no program waits for what was there."""
    tokens = listed_tokens(listed, length, P)
    place = first + tl.arange(0, PAGES)
    offset = tl.arange(0, BLOCK_P)
    token = place[:, None] * P + offset[None, :]
    there = (offset < P)[None, :] & (token < tokens)
    at = mass + h * m_h + (row * m_r)[:, None] + offset[None, :]
    new = tl.zeros([PAGES, BLOCK_P], tl.float32)
    for one in tl.static_range(GROUP):  # all on their way at once
        logits = tl.load(raw + (segment * GROUP + one) * raw_g + token, mask=there, other=float("-inf"))
        p = tl.where(there, exp(logits - tl.load(lse + segment * GROUP + one)), 0.0)
        new = tl.maximum(new, p) if REDUCTION == "max" else new + p
    if REDUCTION == "mean":
        new = new / GROUP
    new = new * tl.load(unit + b)
    tl.atomic_add(at, new, mask=there, sem="relaxed")
    if SUM:
        tl.atomic_add(mass_sum + h * s_h + row * s_r, tl.sum(new, 1), mask=place < listed, sem="relaxed")


@triton.jit
def _mass_kernel(
    raw, lse, count, lengths, pages, rows, unit, mass, mass_sum, raw_g, p_b, p_h, r_b, m_h, m_r, s_h, s_r,
    P: tl.constexpr, GROUP: tl.constexpr, BLOCK_P: tl.constexpr, PAGES: tl.constexpr, REDUCTION: tl.constexpr,
    SUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Mass of some listed pages of one segment."""
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * PAGES
    listed = tl.load(count + b)
    length = tl.load(lengths + b)
    wait_for_inputs(PDL)
    if first < listed:
        row = rows_of_pages(pages, rows, p_b, p_h, r_b, b, h, first, listed, PAGES)
        mass_of_pages(
            raw, lse, row, unit, mass, mass_sum, raw_g, m_h, m_r, s_h, s_r,
            b, h, b * tl.num_programs(0) + h, first, listed, length, P, GROUP, BLOCK_P, PAGES, REDUCTION, SUM,
        )  # fmt: skip
    let_next_start(PDL)


TILE = 512
"""Tokens whose mass a program adds at a time."""
THREADS = 128
"""Of the largest program that adds mass."""
CLEARED = 4096
"""Elements of a program that forgets mass."""
NO_MASS: tuple[tuple[torch.Tensor | None, ...], tuple[int, ...], dict[str, Any]] = (
    (None,) * 5, (0,) * 7, {"GROUP": 1, "BLOCK_P": 1, "PAGES": 1, "REDUCTION": "", "SUM": False},
)  # fmt: skip
"""In place of :func:`mass_arguments`, for a kernel that adds none."""


@triton.jit
def _clear_kernel(
    table, mass, mass_sum, t_b, m_h, m_r, s_h, s_r, width, heads,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr, PAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Forget the mass of those of a request's pages that hold any: few do."""
    b = tl.program_id(1).to(tl.int64)
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    head, offset = tl.arange(0, BLOCK_H).to(tl.int64), tl.arange(0, BLOCK_P)
    wait_for_inputs(PDL)
    row = tl.load(table + b * t_b + page, mask=page < width, other=0)[:, None]
    at = mass_sum + head[None, :] * s_h + row * s_r
    held = tl.load(at, mask=(page < width)[:, None] & (head < heads)[None, :], other=0.0) != 0.0
    if tl.max(tl.max(held.to(tl.int32), 1), 0) > 0:
        tl.store(at, tl.zeros([PAGES, BLOCK_H], tl.float32), mask=held)
        tokens = (mass + head[None, :] * m_h + row * m_r)[:, :, None] + offset[None, None, :]
        tl.store(
            tokens, tl.zeros([PAGES, BLOCK_H, BLOCK_P], tl.float32), mask=held[:, :, None] & (offset < P)[None, None, :]
        )
    let_next_start(PDL)


def rebase(pool: LayerPool, rows: Rows, mass: MassRows) -> None:
    """Rebase the stored mass of the requests where ``mass`` says so."""
    if not mass.clear or "mass_sum" not in pool.state:
        Backend.rebase(pool, rows, mass)
        return
    stored, sums = pool.state["mass"], pool.state["mass_sum"]
    batch, width = mass.table.shape
    block, heads = power_of_two(pool.page_size), power_of_two(pool.num_kv_heads)
    tile = max(1, CLEARED // (block * heads))
    _clear_kernel[-(-width // tile), batch](
        mass.table, stored, sums, mass.table.stride(0), *_row_strides(stored), *_row_strides(sums), width,
        pool.num_kv_heads, P=pool.page_size, BLOCK_P=block, BLOCK_H=heads, PAGES=tile,
        num_warps=4, **launch_options(pool.device),
    )  # fmt: skip


def mass_arguments(
    pool: LayerPool, selection: Selection, mass: MassRows, group: int, reduction: str, tile: int
) -> tuple[tuple[torch.Tensor | None, ...], tuple[int, ...], dict[str, Any]]:
    """Fields, strides (of page lists, of the table of state rows, of mass and page sums) and constants that
    :func:`mass_of_pages` takes. ``tile``: tokens whose mass is added at a time, about, if there are as many; at least
    as many as threads."""
    stored, sums = pool.state["mass"], pool.state.get("mass_sum")
    block, listed = power_of_two(pool.page_size), power_of_two(selection.pages.shape[2])
    pages = max(1, THREADS // block, min(listed, tile // block))
    sizes = {"GROUP": group, "BLOCK_P": block, "PAGES": pages}
    return (
        (selection.pages, mass.table, mass.unit, stored, sums),
        (*selection.pages.stride()[:2], mass.table.stride(0), *_row_strides(stored), *_row_strides(sums)),
        {**sizes, "REDUCTION": reduction, "SUM": sums is not None},
    )


def add_mass(pool: LayerPool, rows: Rows, mass: MassRows, selection: Selection, logits: Logits) -> None:
    """Add the probabilities of the listed tokens to their stored mass."""
    batch, heads, listed = selection.pages.shape
    fields, strides, constants = mass_arguments(pool, selection, mass, logits.raw.shape[2], logits.reduction, TILE)
    programs = -(-listed // constants["PAGES"])
    _mass_kernel[heads, batch, programs](
        logits.raw, logits.lse, selection.count, rows.lengths_tensor, *fields, logits.raw.stride(2), *strides,
        P=pool.page_size, **constants,
        num_warps=2, **launch_options(pool.device, heads * batch * programs),
    )  # fmt: skip


def _row_strides(field: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if field is None else (field.stride(0), field.stride(1))
