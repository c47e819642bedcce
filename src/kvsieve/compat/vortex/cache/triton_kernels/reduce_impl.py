"""Reductions of completed pages along axis 1 or 2, kept as 1."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.compat.vortex.abs.tensor import plain
from kvsieve.compat.vortex.core.formats import FORMAT
from kvsieve.compat.vortex.core.kernels import Gathered, compute
from kvsieve.compat.vortex.core.maths import REDUCE
from kvsieve.compat.vortex.core.pages import Completed
from kvsieve.compat.vortex.utils import ReduceType

P, R = FORMAT.PAGED, FORMAT.RAGGED


def _reduce(
    formats: tuple[FORMAT, FORMAT],
    x: torch.Tensor,
    output: torch.Tensor,
    loc: torch.Tensor,
    geometry: tuple[int, int],
    dim: int,
    reduce_type: Any,
) -> None:
    kind = reduce_type if isinstance(reduce_type, ReduceType) else ReduceType(reduce_type)
    heads, page_size = geometry
    pages, out = Completed.of(loc, page_size, heads), plain(output)
    source = Gathered(plain(x), pages.rows(formats[0]))
    width = out.shape[1] * out.shape[2]
    compute([source], lambda rows: REDUCE[kind](rows, dim), out, pages.rows(formats[1]), width)


def _reduce_pp(
    x: torch.Tensor,
    output: torch.Tensor,
    loc: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    dim: int,
    reduce_type: ReduceType,
) -> None:
    """Pool to pool."""
    _reduce((P, P), x, output, loc, (num_kv_heads, page_size), dim, reduce_type)


def _reduce_rp(
    x: torch.Tensor,
    output: torch.Tensor,
    loc: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    dim: int,
    reduce_type: ReduceType,
) -> None:
    """Call to pool."""
    _reduce((R, P), x, output, loc, (num_kv_heads, page_size), dim, reduce_type)


def _reduce_pr(
    x: torch.Tensor,
    output: torch.Tensor,
    loc: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    dim: int,
    reduce_type: ReduceType,
) -> None:
    """Pool to call."""
    _reduce((P, R), x, output, loc, (num_kv_heads, page_size), dim, reduce_type)


def _reduce_rr(
    x: torch.Tensor,
    output: torch.Tensor,
    loc: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    dim: int,
    reduce_type: ReduceType,
) -> None:
    """Call to call."""
    _reduce((R, R), x, output, loc, (num_kv_heads, page_size), dim, reduce_type)


def reduce_pp(x: Any, output: Any, loc: torch.Tensor, ctx: Any, dim: int, reduce_type: Any) -> None:
    """:func:`_reduce_pp` with the geometry of a context."""
    _reduce_pp(x, output, loc, ctx.head_num, ctx.page_size, dim, reduce_type)


def reduce_rp(x: Any, output: Any, loc: torch.Tensor, ctx: Any, dim: int, reduce_type: Any) -> None:
    """:func:`_reduce_rp` with the geometry of a context."""
    _reduce_rp(x, output, loc, ctx.head_num, ctx.page_size, dim, reduce_type)


def reduce_pr(x: Any, output: Any, loc: torch.Tensor, ctx: Any, dim: int, reduce_type: Any) -> None:
    """:func:`_reduce_pr` with the geometry of a context."""
    _reduce_pr(x, output, loc, ctx.head_num, ctx.page_size, dim, reduce_type)


def reduce_rr(x: Any, output: Any, loc: torch.Tensor, ctx: Any, dim: int, reduce_type: Any) -> None:
    """:func:`_reduce_rr` with the geometry of a context."""
    _reduce_rr(x, output, loc, ctx.head_num, ctx.page_size, dim, reduce_type)
