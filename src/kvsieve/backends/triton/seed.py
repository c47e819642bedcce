"""Decayed column sums of the causal attention of prompt queries: one pass for the lse of each, one for the columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvsieve.backends.base import AttentionOptions
from kvsieve.backends.triton.attend import logits_of
from kvsieve.backends.triton.elementary import exp
from kvsieve.backends.triton.launch import INTERPRETED, UNFUSED, power_of_two
from kvsieve.paging.pool import LayerPool

ROWS, TOKENS = 64, 64
"""Query rows (of all heads of a group) and tokens that meet at a time."""


@triton.jit
def _queries(q, q_n, q_g, first_row, rows, group, D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
             BLOCK_D: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Rows (query, head of the group) of a tile: their values, query and head, and whether they are real."""
    row = first_row + tl.arange(0, ROWS)
    query, g = row // GROUP, row % GROUP
    real = (query < rows) & (g < group)
    d = tl.arange(0, BLOCK_D)
    at = q + query.to(tl.int64)[:, None] * q_n + g.to(tl.int64)[:, None] * q_g + d[None, :]
    values = tl.load(at, mask=real[:, None] & (d < D)[None, :], other=0.0)
    if WIDE:
        values = values.to(tl.float32)
    return values, query, g, real


@triton.jit
def _keys(k, blocks, k_b, k_t, token, length, P: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
          WIDE: tl.constexpr):  # fmt: skip
    """Keys [TOKENS, D] of a request's tokens."""
    d = tl.arange(0, BLOCK_D)
    block = tl.load(blocks + token // P, mask=token < length, other=0)
    at = k + (block * k_b + (token % P).to(tl.int64) * k_t)[:, None] + d[None, :]
    values = tl.load(at, mask=(token < length)[:, None] & (d < D)[None, :], other=0.0)
    return values.to(tl.float32) if WIDE else values


@triton.jit
def _lse_kernel(
    q, k, blocks, sinks, lse, q_n, q_h, q_g, k_h, k_b, k_t, scale, softcap, start, rows, group,
    P: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """lse of a tile of rows; row r of the first query lies at position ``start``."""
    h = tl.program_id(0).to(tl.int64)
    first_row = tl.program_id(1) * ROWS
    values, query, g, real = _queries(q + h * q_h, q_n, q_g, first_row, rows, group, D, GROUP, ROWS, BLOCK_D, WIDE)
    position = start + query
    last = start + tl.minimum((first_row + ROWS - 1) // GROUP, rows - 1) + 1
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, last, TOKENS):
        token = first + tl.arange(0, TOKENS)
        keys = _keys(k + h * k_h, blocks, k_b, k_t, token, last, P, D, BLOCK_D, WIDE)
        products = tl.dot(values, tl.trans(keys), input_precision="ieee")
        seen = token[None, :] <= position[:, None]
        logits = tl.where(seen, logits_of(products, scale, softcap, SOFTCAP), float("-inf"))
        now = tl.maximum(highest, tl.max(logits, 1))
        total = total * exp(highest - now) + tl.sum(exp(logits - now[:, None]), 1)
        highest = now
    if SINKS:
        sink = tl.load(sinks + h * group + g, mask=real, other=float("-inf")).to(tl.float32)
        now = tl.maximum(highest, sink)
        total = total * exp(highest - now) + exp(sink - now)
        highest = now
    row = first_row + tl.arange(0, ROWS)
    tl.store(lse + h * rows * GROUP + row, highest + tl.log(total), mask=query < rows)


@triton.jit
def _columns_kernel(
    q, k, blocks, lse, weights, out, q_n, q_h, q_g, k_h, k_b, k_t, scale, softcap, start, rows, group, length,
    P: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr, REDUCTION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What some tokens get of all rows, in the order of the rows."""
    h = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TOKENS
    token = first + tl.arange(0, TOKENS)
    keys = _keys(k + h * k_h, blocks, k_b, k_t, token, length, P, D, BLOCK_D, WIDE)
    column = tl.zeros([TOKENS], tl.float32)
    unseen = tl.maximum(first - start, 0) * GROUP // ROWS * ROWS
    for first_row in range(unseen, rows * GROUP, ROWS):
        values, query, _, real = _queries(q + h * q_h, q_n, q_g, first_row, rows, group, D, GROUP, ROWS, BLOCK_D, WIDE)
        products = tl.dot(values, tl.trans(keys), input_precision="ieee")
        seen = (token[None, :] <= (start + query)[:, None]) & real[:, None]
        row = first_row + tl.arange(0, ROWS)
        norm = tl.load(lse + h * rows * GROUP + row, mask=query < rows, other=0.0)
        p = tl.where(seen, exp(logits_of(products, scale, softcap, SOFTCAP) - norm[:, None]), 0.0)
        p = p * tl.load(weights + query, mask=query < rows, other=0.0)[:, None]
        if REDUCTION == "max":
            p = tl.max(tl.reshape(p, [ROWS // GROUP, GROUP, TOKENS]), 1)
        column += tl.sum(p, 0)
    if REDUCTION == "mean":
        column = column / group
    tl.store(out + h * length + token, column, mask=token < length)


def prompt_mass(
    q: torch.Tensor, pool: LayerPool, blocks: torch.Tensor, first: int, options: AttentionOptions
) -> torch.Tensor:
    """For queries [n, H, G, D] at positions ``first ..`` of the request in ``blocks`` [S]: float32 [H, first + n]."""
    mass = options.mass
    assert mass is not None
    n, heads, group, width = q.shape
    rows, length, p = mass.significant(n), first + n, pool.page_size
    out = torch.zeros(heads, length, dtype=torch.float32, device=q.device)
    if not rows:
        return out
    q = q[n - rows :] if q.stride(3) == 1 else q[n - rows :].contiguous()
    padded = power_of_two(group)
    tile = max(ROWS, padded)
    lse = torch.empty(heads, rows * padded, dtype=torch.float32, device=q.device)
    weights = torch.tensor(mass.row_weights(rows), dtype=torch.float32)
    weights = weights.pin_memory().to(q.device, non_blocking=True) if q.is_cuda else weights
    shared = (*q.stride()[:3], *pool.k.stride()[:3], float(options.scale), float(options.softcap or 0.0))
    shared = (*shared, length - rows, rows, group)
    how = {
        "P": p, "D": width, "GROUP": padded, "ROWS": tile, "TOKENS": TOKENS, "BLOCK_D": power_of_two(width, 16),
        "SOFTCAP": options.softcap is not None, "WIDE": INTERPRETED or q.dtype == torch.float32,
        "num_warps": 4, **UNFUSED,
    }  # fmt: skip
    _lse_kernel[heads, -(-rows * padded // tile)](
        q, pool.k, blocks, options.sinks, lse, *shared, SINKS=options.sinks is not None, **how
    )
    _columns_kernel[heads, -(-length // TOKENS)](
        q, pool.k, blocks, lse, weights, out, *shared, length, REDUCTION=mass.group, **how
    )
    return out
