"""Reductions of completed pages along axis 1 or 2, kept as 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvsieve.compat.vortex.abs.tensor import plain
from kvsieve.compat.vortex.core.checks import check_dim, member
from kvsieve.compat.vortex.core.formats import FORMAT
from kvsieve.compat.vortex.core.kernels import Gathered, compute
from kvsieve.compat.vortex.core.maths import REDUCE
from kvsieve.compat.vortex.core.pages import Completed
from kvsieve.compat.vortex.core.step import number
from kvsieve.compat.vortex.utils import ReduceType

P, R = FORMAT.PAGED, FORMAT.RAGGED


def _reduction(source: FORMAT, target: FORMAT) -> Callable[..., None]:
    """The reduction between two formats: a page of the pool (p), or a row of the call (r)."""

    def reduce(
        x: torch.Tensor,
        output: torch.Tensor,
        loc: torch.Tensor,
        num_kv_heads: int,
        page_size: int,
        dim: int,
        reduce_type: Any,
    ) -> None:
        check_dim("reduce", dim, (1, 2))
        kind = member("reduce_type", ReduceType, reduce_type)
        pages, out = Completed.of(loc, page_size, num_kv_heads), plain(output)
        gathered = Gathered(plain(x), pages.rows(source))
        width = out.shape[1] * out.shape[2]
        compute([gathered], lambda rows: REDUCE[kind](rows, dim), out, pages.rows(target), width)

    return reduce


def _of_context(loose: Callable[..., None]) -> Callable[..., None]:
    """The same with the geometry of a context."""

    def reduce(x: Any, output: Any, loc: torch.Tensor, ctx: Any, dim: int, reduce_type: Any) -> None:
        loose(x, output, loc, number(ctx, "head_num"), number(ctx, "page_size"), dim, reduce_type)

    return reduce


_reduce_pp, _reduce_rp = _reduction(P, P), _reduction(R, P)
_reduce_pr, _reduce_rr = _reduction(P, R), _reduction(R, R)
reduce_pp, reduce_rp = _of_context(_reduce_pp), _of_context(_reduce_rp)
reduce_pr, reduce_rr = _of_context(_reduce_pr), _of_context(_reduce_rr)
