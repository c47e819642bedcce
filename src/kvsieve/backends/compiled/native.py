"""The CPU kernels on tensors: attention over listed pages, page selection, storing tokens."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int64, c_void_p

import torch

from kvsieve.backends.base import AttentionOptions, Selection
from kvsieve.backends.compiled.build import load_kernels
from kvsieve.errors import ConfigError
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.slots import POSITION, Trim
from kvsieve.plan import MassRows, Quota, Rows, Writes

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes of q, K and V that the kernels know, and their numbers there."""
REDUCTIONS = ("sum", "mean", "max")
"""Over the group's query heads; the place of each is its number in the kernels."""


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "group", "width_k", "width_v", "page_size")),
        *(("q", c_void_p), ("q_batch", c_int64), ("q_head", c_int64), ("q_group", c_int64)),
        *(("k", c_void_p), ("v", c_void_p), ("head_step", c_int64), ("block_step", c_int64)),
        *(("table", c_void_p), ("table_batch", c_int64)),
        *(("pages", c_void_p), ("pages_batch", c_int64), ("pages_head", c_int64)),
        *((name, c_void_p) for name in ("counts", "lengths", "sinks", "out", "lse")),
        *(("scale", c_double), ("softcap", c_double), ("mass", c_void_p), ("listed", c_int64), ("reduction", c_int64)),
    )


class _Crediting(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "listed", "page_size", "head_step", "row_step")),
        *(("table", c_void_p), ("table_batch", c_int64)),
        *(("pages", c_void_p), ("pages_batch", c_int64), ("pages_head", c_int64)),
        *((name, c_void_p) for name in ("counts", "lengths", "units", "factors", "increment", "mass", "sums")),
    )


class _Seeding(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("heads", "group", "width", "page_size", "rows", "length")),
        *(("q", c_void_p), ("q_row", c_int64), ("q_head", c_int64), ("q_group", c_int64)),
        *(("k", c_void_p), ("head_step", c_int64), ("block_step", c_int64), ("table", c_void_p)),
        *(("weights", c_void_p), ("sinks", c_void_p)),
        *(("scale", c_double), ("softcap", c_double), ("reduction", c_int64), ("out", c_void_p)),
    )


class _Trimming(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "page_size", "stored", "kept", "sink", "blocks", "rows")),
        *(("block_table", c_void_p), ("row_table", c_void_p)),
        *(("block_table_batch", c_int64), ("row_table_batch", c_int64), ("recent", c_void_p)),
        *(("k_bytes", c_int64), ("v_bytes", c_int64)),
        *((name, c_void_p) for name in ("k", "v", "position", "mass")),
    )


class _Choice(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "sink", "recent", "width")),
        *((name, c_void_p) for name in ("pages", "counts", "scores")),
        *((name, c_int64) for name in ("scores_batch", "scores_head", "scored")),
        *(("requests", c_void_p), ("out", c_void_p)),
    )


class _Writing(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("tokens", "heads", "blocks", "page_size")),
        *((name, c_void_p) for name in ("to_blocks", "offsets", "k", "v")),
        *((name, c_int64) for name in ("k_token", "k_head", "v_token", "v_head", "k_bytes", "v_bytes")),
        *(("pool_k", c_void_p), ("pool_v", c_void_p)),
    )


def attend(
    q: torch.Tensor, pool: LayerPool, rows: Rows, selection: Selection, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q [B, H, G, D] -> out [B, H, G, Dv] in q's dtype, lse [B, H, G] float32, and with ``options.mass`` what the
    selected tokens received [B, H, K, p] float32. Pages are read where they lie."""
    batch, heads, group, width = q.shape
    q = q if q.stride(3) == 1 else q.contiguous()
    sinks = None if options.sinks is None else options.sinks.float().contiguous()
    pages = selection.pages if selection.pages.stride(2) == 1 else selection.pages.contiguous()
    k, v, table = pool.k, pool.v, rows.table
    out = torch.empty(batch, heads, group, v.shape[3], dtype=q.dtype)
    lse = torch.empty(batch, heads, group, dtype=torch.float32)
    wanted, mass = options.mass, None
    if wanted is not None:
        mass = torch.empty(batch, heads, pages.shape[2], pool.page_size, dtype=torch.float32)
    call = _Attention(
        *(batch, heads, group, width, v.shape[3], pool.page_size),
        *(q.data_ptr(), q.stride(0), q.stride(1), q.stride(2)),
        *(k.data_ptr(), v.data_ptr(), *_steps(k, v), table.data_ptr(), table.stride(0)),
        *(pages.data_ptr(), pages.stride(0), pages.stride(1)),
        *(selection.count.data_ptr(), rows.lengths_tensor.data_ptr(), None if sinks is None else sinks.data_ptr()),
        *(out.data_ptr(), lse.data_ptr(), options.scale, options.softcap or 0.0),
        *(None if mass is None else mass.data_ptr(), pages.shape[2], REDUCTIONS.index(wanted.group) if wanted else 0),
    )
    load_kernels().kvsieve_attend(ctypes.byref(call), c_int64(TYPES[q.dtype]))
    return out, lse, mass


def prompt_mass(
    q: torch.Tensor, pool: LayerPool, blocks: torch.Tensor, first: int, options: AttentionOptions
) -> torch.Tensor:
    """Decayed column sums of queries [n, H, G, D] at positions ``first ..`` over ``blocks`` [S] -> [H, first + n]."""
    mass, length = options.mass, first + len(q)
    assert mass is not None
    rows = mass.significant(len(q))
    q = q[len(q) - rows :]
    q = q if q.stride(3) == 1 else q.contiguous()
    weights = torch.tensor(mass.row_weights(rows), dtype=torch.float32)
    sinks = None if options.sinks is None else options.sinks.float().contiguous()
    blocks = blocks.contiguous()
    out = torch.empty(q.shape[1], length, dtype=torch.float32)
    call = _Seeding(
        *(*q.shape[1:], pool.page_size, rows, length, q.data_ptr(), q.stride(0), q.stride(1), q.stride(2)),
        *(pool.k.data_ptr(), *_steps(pool.k), blocks.data_ptr(), weights.data_ptr()),
        *(None if sinks is None else sinks.data_ptr(), options.scale, options.softcap or 0.0),
        *(REDUCTIONS.index(mass.group), out.data_ptr()),
    )
    load_kernels().kvsieve_seed(ctypes.byref(call), c_int64(TYPES[q.dtype]))
    return out


def add_mass(pool: LayerPool, rows: Rows, mass: MassRows, selection: Selection, increment: torch.Tensor) -> None:
    """Rebase stored mass where ``mass`` says so, then add increment [B, H, K, p] to the selected pages."""
    batch, heads, listed, page_size = increment.shape
    pages = selection.pages if selection.pages.stride(2) == 1 else selection.pages.contiguous()
    increment, stored, sums = increment.contiguous(), pool.state["mass"], pool.state.get("mass_sum")
    factors = (c_float * batch)(*(mass.rebase.get(place, 1.0) for place in range(batch))) if mass.rebase else None
    call = _Crediting(
        *(batch, heads, listed, page_size, stored.stride(0) // page_size, stored.stride(1) // page_size),
        *(mass.table.data_ptr(), mass.table.stride(0)),
        *(pages.data_ptr(), pages.stride(0), pages.stride(1), selection.count.data_ptr()),
        *(rows.lengths_tensor.data_ptr(), mass.unit.data_ptr(), factors and ctypes.addressof(factors)),
        *(increment.data_ptr(), stored.data_ptr(), None if sums is None else sums.data_ptr()),
    )
    load_kernels().kvsieve_mass(ctypes.byref(call))


def trim(pool: LayerPool, one: Trim) -> None:
    """Keep the tokens of most mass and move them to the first slots."""
    k, v, position, mass = pool.k, pool.v, pool.state[POSITION], pool.state.get("mass")
    size = k.element_size()
    call = _Trimming(
        *(len(one.recent), pool.num_kv_heads, pool.page_size, one.stored, one.kept, one.sink),
        *(k.shape[1], position.shape[1], one.blocks.data_ptr(), one.rows.data_ptr()),
        *(one.blocks.stride(0), one.rows.stride(0), one.recent.data_ptr(), k.shape[3] * size, v.shape[3] * size),
        *(k.data_ptr(), v.data_ptr(), position.data_ptr(), None if mass is None else mass.data_ptr()),
    )
    load_kernels().kvsieve_trim(ctypes.byref(call))


def select(scores: torch.Tensor | None, quota: Quota, heads: int) -> Selection:
    """Sink pages, the best of the window (scores float32 [Bs, H, W]), recent pages, for requests over budget."""
    batch, window = quota.count.shape[0], quota.window
    pages = torch.empty(batch, heads, quota.width, dtype=torch.int64)
    used = scores if window is not None and window.max_topk else None
    if used is not None and used.stride(2) != 1:
        used = used.contiguous()
    call = _Choice(
        *(batch, heads, quota.sink, quota.recent, quota.width, quota.pages.data_ptr(), quota.count.data_ptr()),
        *(
            (None, 0, 0, 0, None)
            if used is None or window is None
            else (used.data_ptr(), used.stride(0), used.stride(1), used.shape[0], window.requests.data_ptr())
        ),
        pages.data_ptr(),
    )
    load_kernels().kvsieve_select(ctypes.byref(call))
    return Selection(pages, quota.count)


def _steps(*fields: torch.Tensor) -> tuple[int, int]:
    """From one head, and from one block, to the next in K or V [H, blocks, p, width], in pages; alike in all fields."""
    found = set()
    for field in fields:
        page = field.shape[2] * field.shape[3]
        dense = field.stride()[2:] == (field.shape[3], 1)
        if not dense or field.stride(0) % page or field.stride(1) % page:
            raise ConfigError(f"expected dense pages at multiples of their size, received strides {field.stride()}")
        found.add((field.stride(0) // page, field.stride(1) // page))
    if len(found) != 1:
        raise ConfigError(f"expected K and V with the same steps between pages, received {sorted(found)}")
    return found.pop()


def write(pool: LayerPool, writes: Writes, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store tokens: k [T, H, D], v [T, H, Dv] at the call's places."""
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    size = k.element_size()
    call = _Writing(
        *(k.shape[0], k.shape[1], pool.k.shape[1], pool.page_size),
        *(writes.blocks.data_ptr(), writes.offsets.data_ptr(), k.data_ptr(), v.data_ptr()),
        *(k.stride(0) * size, k.stride(1) * size, v.stride(0) * size, v.stride(1) * size),
        *(k.shape[2] * size, v.shape[2] * size, pool.k.data_ptr(), pool.v.data_ptr()),
    )
    load_kernels().kvsieve_write(ctypes.byref(call))
