"""Euclidean normalisation over the windows of segments, in place."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.compat.vortex.abs.tensor import plain
from kvsieve.compat.vortex.core.checks import check_dim
from kvsieve.compat.vortex.core.kernels import scan_windows
from kvsieve.compat.vortex.core.maths import normalize
from kvsieve.compat.vortex.core.step import budget_of, required, segments_of
from kvsieve.compat.vortex.core.work import Windows


def _normalize_inplace_r(
    x: torch.Tensor,
    dim: int,
    indptr: torch.Tensor,
    page_reserved_bos: int,
    page_reserved_eos: int,
    topk_val: int,
    batch_size: int,
) -> None:
    """``x = x / max(|x|, 1e-12)`` over each segment's window ``[bos, pages - eos)``, element by element, in place.

    Float32 arithmetic, one rounding at the store. Segments of ``bos + eos + topk_val`` pages or fewer, and rows
    outside the window, are left alone.

    Args:
        x: [S, D0, D1]. dim: 0. indptr: [segments + 1], the page listing. batch_size: segments.
    """
    check_dim("_normalize_inplace_r", dim, (0,))
    windows = Windows.read(indptr, batch_size, page_reserved_bos, page_reserved_eos, topk_val)
    scan_windows(plain(x), plain(x), windows, normalize, 0.0)


def normalize_inplace_r(x: Any, dim: int, ctx: Any) -> None:
    """:func:`_normalize_inplace_r` with the page listing of a context."""
    indptr = required(ctx, "dense_kv_indptr")
    _normalize_inplace_r(x, dim, indptr, *budget_of(ctx), segments_of(ctx))
