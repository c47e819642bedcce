"""Selection in windows that no program holds at once: a bound from samples, a bitmap of what reaches it, and a program
that ends the search among those few.

If fewer than k pages reach the bound, or more than fit, the row is read once per bit: as exact, and slower.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvsieve.backends.triton.launch import launch_options, let_next_start, power_of_two, wait_for_inputs
from kvsieve.backends.triton.ranking import choose, kth_largest, order_keys, take
from kvsieve.plan import Quota
from kvsieve.window import Window

PIECE = 4096
"""Scores that a program looks at together."""
SAMPLES = 4096
MOST = 8192
"""Pages among which the search ends."""


@triton.jit
def row_of(requests, scored, b, ALL: tl.constexpr, REQUESTS: tl.constexpr):
    """The row of scores of a request."""
    row = b
    if not ALL:
        one = tl.arange(0, REQUESTS)
        row = tl.sum((tl.load(requests + one, mask=one < scored, other=b) < b).to(tl.int64), 0)
    return row


@triton.jit
def _width_and_k(requests, pages, count, row, fixed):
    """Window pages of a row of scores, and how many of them are chosen."""
    b = tl.load(requests + row)
    return (tl.load(pages + b) - fixed).to(tl.int32), (tl.load(count + b) - fixed).to(tl.int32)


@triton.jit
def _bound_kernel(
    scores, requests, pages, count, bounds, s_b, s_h, heads, fixed, STRIDE_BITS: tl.constexpr, SAMPLES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A score (as an integer) that somewhat more than k pages of a row should reach."""
    h = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    width, k = _width_and_k(requests, pages, count, row, fixed)
    wait_for_inputs(PDL)
    if (k > 0) & (k < width):
        sample = tl.arange(0, SAMPLES)
        # one of each stretch, at a place that differs from stretch to stretch
        place = (sample << STRIDE_BITS) + (((sample * 40503) >> 4) & ((1 << STRIDE_BITS) - 1))
        there = place < width
        keys = order_keys(tl.load(scores + row * s_b + h * s_h + place, mask=there, other=0.0), there)
        sampled = tl.sum(there.to(tl.int32), 0)
        rank = (k.to(tl.float32) * sampled / width).to(tl.int32)
        rank = tl.minimum(rank + rank // 4 + 16, sampled)
        bound, _ = kth_largest(keys, rank, SAMPLES, 64, True)
        tl.store(bounds + row * heads + h, bound.to(tl.int64))
    let_next_start(PDL)


@triton.jit
def _bitmap_kernel(
    scores, requests, pages, count, bounds, bitmap, s_b, s_h, heads, fixed, words, PIECE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Which pages of a piece of a row reach its bound: 32 of them a word."""
    h = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    width, k = _width_and_k(requests, pages, count, row, fixed)
    start = tl.program_id(0) * PIECE
    wait_for_inputs(PDL)
    if (k > 0) & (k < width) & (start < width):
        bound = tl.load(bounds + row * heads + h).to(tl.uint32)
        word, lane = tl.arange(0, PIECE // 32), tl.arange(0, 32)
        place = start + word[:, None] * 32 + lane[None, :]
        there = place < width
        keys = order_keys(tl.load(scores + row * s_b + h * s_h + place, mask=there, other=0.0), there)
        bits = tl.sum(tl.where(there & (keys >= bound), 1 << lane[None, :], 0), 1)
        tl.store(bitmap + (row * heads + h) * words + start // 32 + word, bits)
    let_next_start(PDL)


@triton.jit
def _ones(word):
    """Bits that are set in uint32 words."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def finish_row(
    scores, bitmap, found, table, pages_out, blocks_out, sink, width, k,
    WORDS: tl.constexpr, MOST: tl.constexpr, GROUPS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The chosen pages of one row, by what its bitmap says; ``found`` is memory for MOST places."""
    word = tl.arange(0, WORDS)
    left = tl.load(bitmap + word, mask=word * 32 < width, other=0).to(tl.uint32, bitcast=True)
    each = _ones(left)
    upto = tl.cumsum(each, 0)
    total = tl.sum(each, 0)
    if (total >= k) & (total <= MOST):
        at = upto - each
        for _ in range(tl.max(each, 0)):
            lowest = left & (0 - left)
            tl.store(found + at, word * 32 + _ones(lowest - 1), mask=left != 0)
            at += 1
            left = left ^ lowest
        tl.debug_barrier()
        candidate = tl.arange(0, MOST)
        there = candidate < total
        page = tl.load(found + candidate, mask=there, other=0)
        keys = order_keys(tl.load(scores + page, mask=there, other=0.0), there)
        threshold, reached = kth_largest(keys, k, MOST, GROUPS)
        chosen, place = choose(keys, k, threshold, reached)
        tl.store(pages_out + sink + place, (sink + page).to(tl.int64), mask=chosen)
        tl.store(blocks_out + sink + place, tl.load(table + sink + page, mask=chosen, other=0), mask=chosen)
    else:
        _every_bit(scores, table, pages_out, blocks_out, sink, width, k, PIECE)


@triton.jit
def _every_bit(scores, table, pages_out, blocks_out, sink, width, k, BLOCK: tl.constexpr):
    """The same for a window that does not fit in registers: it is read once per bit."""
    page = tl.arange(0, BLOCK)
    threshold = tl.zeros([], tl.uint32)
    bit = threshold + 1 << 31
    count = width
    while (bit > 0) & (count != k):
        candidate = threshold | bit
        reached = 0
        for start in range(0, width, BLOCK):
            there = start + page < width
            keys = order_keys(tl.load(scores + start + page, mask=there, other=0.0), there)
            reached += tl.sum((keys >= candidate).to(tl.int32), 0)
        if reached >= k:
            threshold = candidate
            count = reached
        bit = bit >> 1
    greater = 0
    for start in range(0, width, BLOCK):
        there = start + page < width
        keys = order_keys(tl.load(scores + start + page, mask=there, other=0.0), there)
        greater += tl.sum((keys > threshold).to(tl.int32), 0)
    ties = k - greater
    greaters, equals = 0, 0
    for start in range(0, width, BLOCK):
        there = start + page < width
        keys = order_keys(tl.load(scores + start + page, mask=there, other=0.0), there)
        chosen, place = take(keys, threshold, ties, greaters, equals)
        chosen = chosen & there
        at = sink + place
        tl.store(pages_out + at, (sink + start + page).to(tl.int64), mask=chosen)
        tl.store(blocks_out + at, tl.load(table + sink + start + page, mask=chosen, other=0), mask=chosen)
        greaters += tl.sum((keys > threshold).to(tl.int32), 0)
        equals += tl.sum((keys == threshold).to(tl.int32), 0)


def bitmap_of(scores: torch.Tensor, quota: Quota, window: Window) -> tuple[torch.Tensor, torch.Tensor]:
    """For scores [Bs, H, W]: the bitmap [Bs, H, words], and memory for :func:`finish_row` [Bs, H, MOST]."""
    scored, heads, width = scores.shape
    device, fixed = scores.device, quota.sink + quota.recent
    words = -(-width // PIECE) * (PIECE // 32)
    bounds = torch.empty(scored, heads, dtype=torch.int64, device=device)
    bitmap = torch.empty(scored, heads, words, dtype=torch.int32, device=device)
    found = torch.empty(scored, heads, MOST, dtype=torch.int32, device=device)
    shared = scores, window.requests, quota.pages, quota.count, bounds
    strides = scores.stride(0), scores.stride(1), heads, fixed
    bits = max(0, (power_of_two(width) // SAMPLES).bit_length() - 1)
    _bound_kernel[heads, scored](
        *shared, *strides, STRIDE_BITS=bits, SAMPLES=SAMPLES, num_warps=8, **launch_options(device, heads * scored)
    )
    _bitmap_kernel[-(-width // PIECE), heads, scored](
        *shared, bitmap, *strides, words, PIECE=PIECE, num_warps=4, **launch_options(device)
    )
    return bitmap, found
