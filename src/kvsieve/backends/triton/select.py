"""Exact page selection: the k-th largest score of a window by bits, then one scan that writes the list.

Scores become integers of the same order (-0 as +0, NaN below -inf), so that ties and specials need no care. The k-th
largest is searched bit by bit above a bound that at least k scores reach; the search stops when exactly k do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvsieve.backends.base import Selection
from kvsieve.backends.triton.launch import dependent_launch, let_next_start, power_of_two, wait_for_inputs
from kvsieve.plan import Quota

IN_REGISTERS = 8192
"""Pages of the widest window that one program holds at once."""
PIECE = 4096
"""Pages of a wider window that it looks at together."""
LIST = 256


@triton.jit
def _order(scores, there):
    """float32 scores as uint32 of the same order; 1 for NaN, 0 where there is no page."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (flipped ^ -2147483648).to(tl.uint32, bitcast=True)
    keys = tl.where(scores != scores, 1, keys)
    return tl.where(there, keys, 0).to(tl.uint32)


@triton.jit
def _kth_largest(keys, k, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """The largest T that at least k of the keys reach, or one that exactly k reach."""
    groups = tl.max(tl.reshape(keys, [BLOCK // GROUPS, GROUPS]), 0)
    low = tl.min(groups, 0)  # every group has a key that reaches it
    above = tl.where(keys >= low, keys - low, 0)
    reach = (keys >= low).to(tl.int32)
    span = tl.max(above, 0)
    found = span ^ span
    bit = found + 1
    while (bit << 1) - 1 < span:
        bit = bit << 1
    count = tl.sum(reach, 0)
    while (bit > 0) & (count != k):
        candidate = found | bit
        reached = tl.sum((reach != 0) & (above >= candidate), 0).to(tl.int32)
        if reached >= k:
            found = candidate
            count = reached
        bit = bit >> 1
    return low + found


@triton.jit
def _take(keys, threshold, ties, greater_before, equal_before, BLOCK: tl.constexpr):
    """Which of the keys are chosen, and the place of each in the list; ties by age: counts of those before."""
    greater = keys > threshold
    equal = keys == threshold
    packed = tl.where(greater, 65536, 0) + tl.where(equal, 1, 0)
    running = tl.cumsum(packed, 0)
    greaters = greater_before + (running >> 16)
    equals = equal_before + (running & 65535)
    chosen = greater | (equal & (equals <= ties))
    return chosen, greaters + tl.minimum(equals, ties) - 1


@triton.jit
def _write_list(listed, pages_out, table, first, last, shift, LIST: tl.constexpr):
    """Places first .. last of a list, page = place + shift."""
    for start in range(first, last, LIST):
        place = start + tl.arange(0, LIST)
        here = place < last
        page = place.to(tl.int64) + shift
        tl.store(pages_out + place, page, mask=here)
        tl.store(listed + place, tl.load(table + page, mask=here, other=0), mask=here)


@triton.jit
def _select_kernel(
    scores, requests, scored, pages, count, table, pages_out, blocks_out,
    s_b, s_h, t_b, o_b, o_h, sink, recent,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr, ALL: tl.constexpr, REQUESTS: tl.constexpr,
    RANKED: tl.constexpr, LIST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The list of one segment."""
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    total = tl.load(pages + b).to(tl.int32)
    kept = tl.load(count + b).to(tl.int32)
    table += b * t_b
    pages_out += b * o_b + h * o_h
    blocks_out += b * o_b + h * o_h
    wait_for_inputs(PDL)
    if total == kept:
        _write_list(blocks_out, pages_out, table, 0, kept, 0, LIST)
    else:
        _write_list(blocks_out, pages_out, table, 0, sink, 0, LIST)
        _write_list(blocks_out, pages_out, table, kept - recent, kept, total - kept, LIST)
        if RANKED:
            k = kept - sink - recent
            width = total - sink - recent
            row = b
            if not ALL:
                one = tl.arange(0, REQUESTS)
                row = tl.sum((tl.load(requests + one, mask=one < scored, other=b) < b).to(tl.int64), 0)
            scores += row * s_b + h * s_h
            if k > 0:
                if WHOLE:
                    page = tl.arange(0, BLOCK)
                    there = page < width
                    keys = _order(tl.load(scores + page, mask=there, other=0.0), there)
                    threshold = _kth_largest(keys, k, BLOCK, GROUPS)
                    ties = k - tl.sum((keys > threshold).to(tl.int32), 0)
                    chosen, place = _take(keys, threshold, ties, 0, 0, BLOCK)
                    at = sink + place
                    tl.store(pages_out + at, (sink + page).to(tl.int64), mask=chosen)
                    tl.store(blocks_out + at, tl.load(table + sink + page, mask=chosen, other=0), mask=chosen)
                else:
                    _long_row(scores, table, pages_out, blocks_out, sink, width, k, BLOCK)
    let_next_start(PDL)


@triton.jit
def _long_row(scores, table, pages_out, blocks_out, sink, width, k, BLOCK: tl.constexpr):
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
            keys = _order(tl.load(scores + start + page, mask=there, other=0.0), there)
            reached += tl.sum((keys >= candidate).to(tl.int32), 0)
        if reached >= k:
            threshold = candidate
            count = reached
        bit = bit >> 1
    greater = 0
    for start in range(0, width, BLOCK):
        there = start + page < width
        keys = _order(tl.load(scores + start + page, mask=there, other=0.0), there)
        greater += tl.sum((keys > threshold).to(tl.int32), 0)
    ties = k - greater
    greaters, equals = 0, 0
    for start in range(0, width, BLOCK):
        there = start + page < width
        keys = _order(tl.load(scores + start + page, mask=there, other=0.0), there)
        chosen, place = _take(keys, threshold, ties, greaters, equals, BLOCK)
        chosen = chosen & there
        at = sink + place
        tl.store(pages_out + at, (sink + start + page).to(tl.int64), mask=chosen)
        tl.store(blocks_out + at, tl.load(table + sink + start + page, mask=chosen, other=0), mask=chosen)
        greaters += tl.sum((keys > threshold).to(tl.int32), 0)
        equals += tl.sum((keys == threshold).to(tl.int32), 0)


def warps_for(block: int) -> int:
    """Warps of a program that holds a window of up to so many pages."""
    return max(1, min(16, block // 512))


def select(scores: torch.Tensor | None, quota: Quota, heads: int) -> Selection:
    """Lists of pages and of their blocks, from scores [Bs, H, W]."""
    table = quota.table
    assert table is not None
    batch, window = len(quota.count), quota.window
    ranked = scores is not None and window is not None and window.max_topk > 0
    shape = batch, heads, max(1, quota.width)
    pages, blocks = (torch.empty(shape, dtype=torch.int64, device=table.device) for _ in range(2))
    width, k, requests = 2, 1, table
    strides: tuple[int, ...] = (0, 0)
    if ranked:
        assert scores is not None and window is not None
        scores = scores if scores.stride(2) == 1 else scores.contiguous()
        width, k, requests, strides = scores.shape[2], window.max_topk, window.requests, scores.stride()[:2]
    whole = width <= IN_REGISTERS
    block = power_of_two(width, 64) if whole else PIECE
    scored = len(requests) if ranked else 0
    _select_kernel[heads, batch](
        scores, requests, scored, quota.pages, quota.count, table, pages, blocks,
        *(*strides, table.stride(0), pages.stride(0), pages.stride(1), quota.sink, quota.recent),
        BLOCK=block, GROUPS=min(block, power_of_two(k)), WHOLE=whole, ALL=scored == batch,
        REQUESTS=power_of_two(max(1, scored)), RANKED=ranked, LIST=LIST,
        num_warps=warps_for(block) if whole else 16, **dependent_launch(table.device, heads * batch),
    )  # fmt: skip
    return Selection(pages, quota.count).in_blocks(blocks)
