"""Exact page selection: the k-th largest score of a window by bits, then one scan that writes the list.

Scores become integers of the same order (-0 as +0, NaN below -inf), so that ties and specials need no care. The k-th
largest is searched bit by bit above a bound that at least k scores reach; the search stops when exactly k do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvsieve.backends.base import Selection
from kvsieve.backends.triton.launch import (
    launch_options,
    let_next_start,
    multiprocessors,
    power_of_two,
    wait_for_inputs,
)
from kvsieve.backends.triton.longrow import MOST, PIECE, bitmap_of, finish_row, row_of
from kvsieve.backends.triton.ranking import choose, kth_largest, order_keys
from kvsieve.plan import Quota

IN_REGISTERS = 8192
"""Pages of the widest window that one program holds at once."""
PAIRED = 2048
"""Pages of the widest window in which a search goes by two bits a pass, if programs have the GPU to themselves."""
LIST = 128


@triton.jit
def _write_all(listed, pages_out, table, total, LIST: tl.constexpr):
    """The list of a request all of whose pages are kept."""
    for start in range(0, total, LIST):
        page = start + tl.arange(0, LIST)
        here = page < total
        tl.store(pages_out + page, page.to(tl.int64), mask=here)
        tl.store(listed + page, tl.load(table + page, mask=here, other=0), mask=here)


@triton.jit
def _write_ends(listed, pages_out, table, sink, recent, kept, total, LIST: tl.constexpr):
    """The sink pages at a list's start and the recent ones at its end, in one go."""
    for start in range(0, sink + recent, LIST):
        one = start + tl.arange(0, LIST)
        here = one < sink + recent
        place = tl.where(one < sink, one, one + kept - sink - recent)
        page = tl.where(one < sink, one, one + total - sink - recent).to(tl.int64)
        tl.store(pages_out + place, page, mask=here)
        tl.store(listed + place, tl.load(table + page, mask=here, other=0), mask=here)


@triton.jit
def _select_kernel(
    scores, bitmap, found, requests, scored, pages, count, table, pages_out, blocks_out,
    words, s_b, s_h, t_b, o_b, o_h, sink, recent,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr, ALL: tl.constexpr, REQUESTS: tl.constexpr,
    RANKED: tl.constexpr, LIST: tl.constexpr, MOST: tl.constexpr, PIECE: tl.constexpr, PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The list of one segment."""
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    total = tl.load(pages + b).to(tl.int32)
    kept = tl.load(count + b).to(tl.int32)
    table += b * t_b
    pages_out += b * o_b + h * o_h
    blocks_out += b * o_b + h * o_h
    k, width = kept - sink - recent, total - sink - recent
    if RANKED and WHOLE:
        page = tl.arange(0, BLOCK)
        there = page < tl.where((k > 0) & (total > kept), width, 0)
        block = tl.load(table + sink + page, mask=there, other=0)  # from the host: on its way before scores are there
    wait_for_inputs(PDL)
    if total == kept:
        _write_all(blocks_out, pages_out, table, total, LIST)
    else:
        if RANKED:
            row = row_of(requests, scored, b, ALL, REQUESTS)
            scores += row * s_b + h * s_h
        if RANKED and WHOLE:
            values = tl.load(scores + page, mask=there, other=0.0)
        _write_ends(blocks_out, pages_out, table, sink, recent, kept, total, LIST)
        if RANKED and WHOLE:
            if k > 0:
                keys = order_keys(values, there)
                threshold, reached = kth_largest(keys, k, BLOCK, GROUPS, False, PAIRS)
                chosen, place = choose(keys, k, threshold, reached)
                tl.store(pages_out + sink + place, (sink + page).to(tl.int64), mask=chosen)
                tl.store(blocks_out + sink + place, block, mask=chosen)
        elif RANKED:
            heads = tl.num_programs(0)
            if k > 0:
                finish_row(
                    scores, bitmap + (row * heads + h) * words, found + (row * heads + h) * MOST, table, pages_out,
                    blocks_out, sink, width, k, BLOCK // 32, MOST, GROUPS, PIECE,
                )  # fmt: skip
    let_next_start(PDL)


def warps_for(block: int) -> int:
    """Warps of a program that holds a window of up to so many pages."""
    return max(1, min(8, block // 512))


def select(scores: torch.Tensor | None, quota: Quota, heads: int) -> Selection:
    """Lists of pages and of their blocks, int64 [B, H, K], from float32 scores [Bs, H, W] of the requests in
    ``quota.window``; None scores nothing: sink and recent pages are listed then."""
    table, window, batch = quota.table, quota.window, len(quota.count)
    assert table is not None
    if not quota.sparse:
        pages = quota.everything.expand(batch, heads, -1)
        return Selection(pages, quota.count).in_blocks(table[:, None, : quota.width].expand(-1, heads, -1))
    shape = batch, heads, max(1, quota.width)
    pages, blocks = (torch.empty(shape, dtype=torch.int64, device=table.device) for _ in range(2))
    ranked = scores is not None and window is not None and window.max_topk > 0
    width, k, requests, scored, strides = 2, 1, table, 0, (0, 0)
    bitmap, found, words = None, None, 0
    if ranked:
        assert scores is not None and window is not None
        scores = scores if scores.stride(2) == 1 else scores.contiguous()
        width, k, requests, scored = scores.shape[2], window.max_topk, window.requests, len(window.requests)
        strides = scores.stride(0), scores.stride(1)
        if width > IN_REGISTERS:
            bitmap, found = bitmap_of(scores, quota, window)
            words = bitmap.shape[2]
    block, whole = power_of_two(width, 64), bitmap is None
    _select_kernel[heads, batch](
        scores, bitmap, found, requests, scored, quota.pages, quota.count, table, pages, blocks,
        *(words, *strides, table.stride(0), pages.stride(0), pages.stride(1), quota.sink, quota.recent),
        BLOCK=block, GROUPS=min(block if whole else MOST, power_of_two(k)), WHOLE=whole, ALL=scored == batch,
        REQUESTS=power_of_two(max(1, scored)), RANKED=ranked, LIST=LIST, MOST=MOST, PIECE=PIECE,
        PAIRS=heads * batch <= multiprocessors(table.device) and block <= PAIRED,
        num_warps=warps_for(block), **launch_options(table.device, heads * batch),
    )  # fmt: skip
    return Selection(pages, quota.count).in_blocks(blocks)
