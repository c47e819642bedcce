"""Exact attention of one query token over listed pages: split over tokens, merged in a fixed order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvsieve.backends.base import AttentionOptions, Selection
from kvsieve.backends.triton.elementary import exp, tanh
from kvsieve.backends.triton.launch import (
    INTERPRETED,
    launch_options,
    let_next_start,
    multiprocessors,
    power_of_two,
    wait_for_inputs,
)
from kvsieve.backends.triton.store import NO_MASS, listed_tokens, mass_arguments, mass_of_pages, rebase, rows_of_pages
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import Rows


@triton.jit
def logits_of(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Scaled products, soft-capped."""
    logits = products * scale
    if SOFTCAP:
        logits = tanh(logits / softcap) * softcap
    return logits


@triton.jit
def _attend_kernel(
    q, k, v, blocks, count, lengths, sinks, out, lse, part, part_lse, raw, pages, rows, unit, mass, mass_sum,
    q_b, q_h, q_g, k_h, k_b, k_t, v_h, v_b, v_t, list_b, list_h, raw_g, scale, softcap, heads, group, chunk, splits,
    p_b, p_h, r_b, m_h, m_r, s_h, s_r,
    P: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    RAW: tl.constexpr, WIDE: tl.constexpr, TIMES: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, MASS: tl.constexpr, GROUP: tl.constexpr, BLOCK_P: tl.constexpr, PAGES: tl.constexpr,
    REDUCTION: tl.constexpr, SUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of one segment's tokens. Listed tokens follow each other: only the last page may be partial.

    ``MASS``: the chunk is the whole list, and its mass is added as well.
    """
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths + b)  # from the host, like the counts: no kernel writes them
    listed = tl.load(count + b)
    tokens = listed_tokens(listed, length, P).to(tl.int32)
    first = split * chunk
    segment = b * heads + h
    row = tl.arange(0, ROWS)
    head = row % HEADS  # rows beyond these are the heads again
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    real = head < group
    wait_for_inputs(PDL)
    if first < tokens:
        last = tl.minimum(first + chunk, tokens)
        queries = tl.load(
            q + b * q_b + h * q_h + head.to(tl.int64)[:, None] * q_g + d[None, :],
            mask=real[:, None] & (d < D)[None, :],
            other=0.0,
        )
        if WIDE:
            queries = queries.to(tl.float32)
        if MASS:  # on their way while K and V come
            state_row = rows_of_pages(pages, rows, p_b, p_h, r_b, b, h, 0, listed, PAGES)
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        blocks += b * list_b + h * list_h
        lane = tl.arange(0, TOKENS)
        for start in tl.range(first, last, TOKENS, num_stages=STAGES):
            token = start + lane
            there = token < last
            block = tl.load(blocks + token // P, mask=there, other=0)
            place = (token % P).to(tl.int64)
            keys = tl.load(
                k + h * k_h + (block * k_b + place * k_t)[:, None] + d[None, :],
                mask=there[:, None] & (d < D)[None, :],
                other=0.0,
            )
            values = tl.load(
                v + h * v_h + (block * v_b + place * v_t)[:, None] + dv[None, :],
                mask=there[:, None] & (dv < DV)[None, :],
                other=0.0,
            )
            if WIDE:
                keys = keys.to(tl.float32)
            products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            logits = tl.where(there[None, :], logits_of(products, scale, softcap, SOFTCAP), float("-inf"))
            if RAW:
                tl.store(
                    raw + (segment * group + row)[:, None] * raw_g + token[None, :],
                    logits,
                    mask=(row < group)[:, None] & there[None, :],
                )
            now = tl.maximum(highest, tl.max(logits, 1))
            base = tl.where(now == float("-inf"), 0.0, now)  # of keys that are infinite
            p = exp(logits - base[:, None])
            fade = exp(highest - base)
            highest = now
            total = total * fade + tl.sum(p, 1)
            acc = acc * fade[:, None]
            acc = _weighted(p, values, acc, row // HEADS, TIMES, PARTS, ROWS // HEADS, WIDE)
        _deliver(
            acc / TIMES, highest, total, sinks, out, lse, part, part_lse, h, segment, group, dv, split, splits,
            tokens <= chunk, DV, SINKS, ROWS, HEADS, SPLITS, BLOCK_DV,
        )  # fmt: skip
        if MASS:
            tl.debug_barrier()  # logits and lse lie in memory
            for some in range(0, listed, PAGES):
                if some > 0:
                    state_row = rows_of_pages(pages, rows, p_b, p_h, r_b, b, h, some, listed, PAGES)
                mass_of_pages(
                    raw, lse, state_row, unit, mass, mass_sum, raw_g, m_h, m_r, s_h, s_r,
                    b, h, segment, some, listed, length, P, GROUP, BLOCK_P, PAGES, REDUCTION, SUM,
                )  # fmt: skip
    let_next_start(PDL)


@triton.jit
def _weighted(p, values, acc, slot, TIMES: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr):
    """Add p [ROWS, T] times values [T, Dv].

    16-bit probabilities enter in parts: rounded once, they would err as much as the output does by its own rounding.
    Small groups leave room for a slot of rows per part, so that one product does; others take a product per part.
    """
    if WIDE:
        acc = tl.dot(p, values.to(tl.float32), acc, input_precision="ieee")
    else:
        rest = p * TIMES
        rows = tl.zeros_like(rest)
        for number in tl.static_range(PARTS):
            part = rest.to(values.dtype).to(tl.float32)
            rest -= part
            if SLOTS > 1:
                rows = tl.where((slot == number)[:, None], part, rows)
            else:
                acc = tl.dot(part.to(values.dtype), values, acc)
        if SLOTS > 1:
            acc = tl.dot(rows.to(values.dtype), values, acc)
    return acc


@triton.jit
def _deliver(
    acc, highest, total, sinks, out, lse, part, part_lse, h, segment, group, dv, split, splits, whole,
    DV: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Store a chunk's result: the segment's if it is the ``whole``, else a part of it."""
    if HEADS < ROWS:
        acc = tl.sum(tl.reshape(acc, [ROWS // HEADS, HEADS, BLOCK_DV]), 0)
        highest = tl.max(tl.reshape(highest, [ROWS // HEADS, HEADS]), 0)  # all slots are the same
        total = tl.max(tl.reshape(total, [ROWS // HEADS, HEADS]), 0)
    each = tl.arange(0, HEADS)
    present = each < group
    if SPLITS > 1:
        if whole:
            _finish(acc, highest, total, sinks, out, lse, h, segment, group, each, dv, 0, present, DV, SINKS)
        else:
            base = (segment * splits + split) * group + each
            tl.store(part_lse + base, highest + tl.log(total), mask=present)
            tl.store(
                part + base[:, None] * DV + dv[None, :],
                acc / tl.where(total == 0.0, 1.0, total)[:, None],
                mask=present[:, None] & (dv < DV)[None, :],
            )
    else:
        _finish(acc, highest, total, sinks, out, lse, h, segment, group, each, dv, 0, present, DV, SINKS)


@triton.jit
def _parts(part, at, there, dv, DV: tl.constexpr):
    """Outputs of chunks [PART, GROUP, Dv] that other programs stored."""
    return tl.load(
        part + at[:, :, None] * DV + dv[None, None, :],
        mask=there[:, :, None] & (dv < DV)[None, None, :],
        other=0.0,
    )


@triton.jit
def _merge_kernel(
    count, lengths, sinks, out, lse, part, part_lse, heads, group, chunk, splits,
    P: tl.constexpr, DV: tl.constexpr, SINKS: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
    PART: tl.constexpr, BLOCK_DV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge some columns of the parts of one segment, if it has several. A kernel of its own: the last of the programs
    that made them would have to wait for a fence, which takes longer."""
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + b)
    tokens = listed_tokens(tl.load(count + b), length, P)
    used = ((tokens + chunk - 1) // chunk).to(tl.int32)
    piece = tl.program_id(2)
    dv = piece * BLOCK_DV + tl.arange(0, BLOCK_DV)
    wait_for_inputs(PDL)
    if used > 1:
        _merge(part, part_lse, sinks, out, lse, h, b * heads + h, group, dv, piece, used, splits, DV, SINKS, GROUP,
               SPLITS, PART, BLOCK_DV)  # fmt: skip
    let_next_start(PDL)


@triton.jit
def _merge(
    part, part_lse, sinks, out, lse, h, segment, group, dv, piece, used, splits,
    DV: tl.constexpr, SINKS: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, PART: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Add up the first ``used`` parts of a segment, always in the same order."""
    row = tl.arange(0, GROUP)
    real = row < group
    one = tl.arange(0, SPLITS)
    first = segment * splits * group + row
    there = (one < used)[:, None] & real[None, :]
    at = first[None, :] + one[:, None] * group
    each = tl.load(part_lse + at, mask=there, other=float("-inf"))
    if PART == SPLITS:  # all parts on their way before the first is needed
        values = _parts(part, at, there, dv, DV)
    highest = tl.where(real, tl.max(each, 0), 0.0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = exp(each - base[None, :])
    total = tl.sum(weight, 0)
    if PART == SPLITS:
        acc = tl.sum(values * weight[:, :, None], 0)
    else:
        acc = tl.zeros([GROUP, BLOCK_DV], tl.float32)
        for start in range(0, used, PART):
            some = start + tl.arange(0, PART)
            held = (some < used)[:, None] & real[None, :]
            here = first[None, :] + some[:, None] * group
            found = tl.load(part_lse + here, mask=held, other=float("-inf"))
            acc += tl.sum(_parts(part, here, held, dv, DV) * exp(found - base[None, :])[:, :, None], 0)
    _finish(acc, highest, total, sinks, out, lse, h, segment, group, row, dv, piece, real, DV, SINKS)


@triton.jit
def _finish(
    acc, highest, total, sinks, out, lse, h, segment, group, row, dv, piece, real,
    DV: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Divide by the sum and store a segment's result; its lse with the first piece of its columns."""
    if SINKS:
        sink = tl.load(sinks + h * group + row, mask=real, other=float("-inf")).to(tl.float32)
        now = tl.maximum(highest, sink)
        fade = exp(highest - now)
        total = total * fade + exp(sink - now)
        acc = acc * fade[:, None]
        highest = now
    base = segment * group + row
    tl.store(lse + base, highest + tl.log(total), mask=row + piece * group < group)
    tl.store(
        out + base[:, None] * DV + dv[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=real[:, None] & (dv < DV)[None, :],
    )


PARTS = {torch.float16: (32768, 2), torch.bfloat16: (1, 3)}
"""What probabilities are multiplied by before they are rounded to 16 bits, and the parts that hold 22 bits of them: so
far up, float16 keeps those bits of probabilities down to 2**-28, whose values may be large."""
MERGED = 8192
"""Elements of the parts that are merged at a time."""
MOST_PIECES = 8
"""Programs that share the columns of a segment's merge, where the GPU has room for them."""
MASS_TILE = 2048
"""Tokens whose mass a program that attends a whole list adds at a time."""
ONE_TILE = 128
"""Tokens of a program that has no loop, or a short one: in small batches its start is what takes time."""


@dataclass(frozen=True)
class Shape:
    """How an attend is cut: tokens an iteration, warps, stages, tokens a program and programs a segment."""

    tokens: int
    warps: int
    stages: int
    chunk: int
    splits: int


def shape_for(pool: LayerPool, batch: int, width: int) -> Shape:
    """The cut for lists of up to ``width`` pages: enough programs to fill the GPU, none shorter than its start."""
    longest = width * pool.page_size
    segments = batch * pool.num_kv_heads
    chunk = -(-longest // max(1, 4 * multiprocessors(pool.device) // segments))
    if chunk < 2 * ONE_TILE and pool.dtype.itemsize == 2:
        splits = -(-longest // ONE_TILE)
        return Shape(ONE_TILE, 4, 1, ONE_TILE, splits) if chunk <= ONE_TILE else Shape(64, 2, 2, ONE_TILE, splits)
    tokens = 32 if pool.dtype.itemsize == 2 else 16
    chunk = -(-chunk // tokens) * tokens
    return Shape(tokens, 2 if segments < 32 else 4, 5, chunk, -(-longest // chunk))


def product_rows(dtype: torch.dtype, group: int) -> dict[str, Any]:
    """Rows of a tensor-core product: padded query heads; a slot of them per part of a probability, if 16 hold all."""
    wide = dtype not in PARTS or (INTERPRETED and dtype == torch.bfloat16)
    times, parts = (1, 1) if wide else PARTS[dtype]
    slots = power_of_two(parts) if group * power_of_two(parts) <= 16 else 1
    heads = power_of_two(group, 16 // slots)
    return {"ROWS": slots * heads, "HEADS": heads, "WIDE": wide, "TIMES": times, "PARTS": parts}


def attend(
    q: torch.Tensor, pool: LayerPool, rows: Rows, selection: Selection, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q [B, H, G, D] -> out [B, H, G, Dv], lse [B, H, G]; with ``options.mass`` also raw logits [B, H, G, K * p].

    A program that attends a whole list adds the mass as well, to ``options.mass_rows``; no logits are returned then.
    """
    batch, heads, group, width = q.shape
    v_width, p, listed = pool.v.shape[-1], pool.page_size, selection.pages.shape[2]
    blocks = selection.blocks(rows.table)
    shape = shape_for(pool, batch, listed)
    out = torch.empty(batch, heads, group, v_width, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, group, dtype=torch.float32, device=q.device)
    part = part_lse = raw = None
    if shape.splits > 1:
        part_lse = lse.new_empty(batch, heads, shape.splits, group)
        part = lse.new_empty(*part_lse.shape, v_width)
    if options.mass is not None:
        raw = lse.new_empty(batch, heads, group, listed * p)
    added = options.mass_rows if shape.splits == 1 else None
    mass_fields, mass_strides, mass_constants = NO_MASS
    if added is not None:
        assert options.mass is not None
        rebase(pool, rows, added)
        mass_fields, mass_strides, mass_constants = mass_arguments(
            pool, selection, added, group, options.mass.group, MASS_TILE
        )
    q = q if q.stride(3) == 1 else q.contiguous()
    cut = heads, group, shape.chunk, shape.splits
    shared = {
        "P": p, "DV": v_width, "BLOCK_DV": power_of_two(v_width, 16), "SINKS": options.sinks is not None,
        "SPLITS": power_of_two(shape.splits),
    }  # fmt: skip
    _attend_kernel[heads, batch, shape.splits](
        q, pool.k, pool.v, blocks, selection.count, rows.lengths_tensor, options.sinks, out, lse, part, part_lse, raw,
        *(*mass_fields, *q.stride()[:3], *pool.k.stride()[:3], *pool.v.stride()[:3], *blocks.stride()[:2]),
        *(listed * p, float(options.scale), float(options.softcap or 0.0), *cut, *mass_strides),
        D=width, BLOCK_D=power_of_two(width, 16), TOKENS=shape.tokens, STAGES=shape.stages,
        SOFTCAP=options.softcap is not None, RAW=raw is not None, MASS=added is not None,
        **product_rows(q.dtype, group), **shared, **mass_constants,
        num_warps=shape.warps, **launch_options(q.device, heads * batch * shape.splits),
    )  # fmt: skip
    if shape.splits > 1:
        pieces = min(MOST_PIECES, max(1, multiprocessors(q.device) // (heads * batch)))
        columns = power_of_two(-(-v_width // pieces), 16)
        programs = heads, batch, -(-v_width // columns)
        each = power_of_two(group) * columns
        shared["BLOCK_DV"] = columns
        _merge_kernel[programs](
            selection.count, rows.lengths_tensor, options.sinks, out, lse, part, part_lse, *cut,
            GROUP=power_of_two(group), PART=min(power_of_two(shape.splits), max(1, MERGED // each)), **shared,
            num_warps=4, **launch_options(q.device, math.prod(programs)),
        )  # fmt: skip
    return out, lse, raw if added is None else None
