"""A number for all of a completed page."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.compat.vortex.abs.tensor import plain
from kvsieve.compat.vortex.core.pages import Completed
from kvsieve.compat.vortex.core.row_op import bf16
from kvsieve.compat.vortex.core.step import number


def _fill_p(x: torch.Tensor, loc: torch.Tensor, num_kv_heads: int, page_size: int, alpha: float) -> None:
    """``x[row] = alpha``, rounded to bfloat16, for every completed page; x [rows, D0, D1] is changed in place."""
    rows = Completed.of(loc, page_size, num_kv_heads).paged
    plain(x).index_fill_(0, rows, bf16(alpha))


def fill_p(x: Any, loc: torch.Tensor, ctx: Any, alpha: float) -> None:
    """:func:`_fill_p` with the geometry of a context."""
    _fill_p(x, loc, number(ctx, "head_num"), number(ctx, "page_size"), alpha)
