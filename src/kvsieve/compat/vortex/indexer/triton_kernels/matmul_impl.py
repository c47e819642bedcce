"""Matrix products per page over a work list."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.compat.vortex.core.maths import gemm
from kvsieve.compat.vortex.core.step import required, winfo_of
from kvsieve.compat.vortex.indexer.triton_kernels._rows import batched, listed, paged, run


def _mm_bpr(
    x: torch.Tensor,
    y: torch.Tensor,
    o: torch.Tensor,
    indices: torch.Tensor,
    winfo_x_indices: torch.Tensor,
    winfo_y_offsets: torch.Tensor,
    winfo_y_lens: torch.Tensor,
    winfo_num_workloads: torch.Tensor,
    max_chunk_size: int = 0,
    num_sms: int = 1,
) -> None:
    """``o[p] = y[indices[p]] @ x[q row of p's item].T``."""
    winfo = winfo_y_offsets, winfo_y_lens, winfo_num_workloads
    run(gemm, [(x, batched(winfo_x_indices)), (y, paged(indices))], o, winfo)


def _mm_rrr(
    x: torch.Tensor,
    y: torch.Tensor,
    o: torch.Tensor,
    winfo_offsets: torch.Tensor,
    winfo_lens: torch.Tensor,
    winfo_num_workloads: torch.Tensor,
    max_chunk_size: int = 0,
    num_sms: int = 1,
) -> None:
    """``o[p] = y[p] @ x[p].T``."""
    run(gemm, [(x, listed), (y, listed)], o, (winfo_offsets, winfo_lens, winfo_num_workloads))


def _mm_rpr(
    x: torch.Tensor,
    y: torch.Tensor,
    o: torch.Tensor,
    indices: torch.Tensor,
    winfo_offsets: torch.Tensor,
    winfo_lens: torch.Tensor,
    winfo_num_workloads: torch.Tensor,
    max_chunk_size: int = 0,
    num_sms: int = 1,
) -> None:
    """``o[p] = y[indices[p]] @ x[p].T``."""
    run(gemm, [(x, listed), (y, paged(indices))], o, (winfo_offsets, winfo_lens, winfo_num_workloads))


def mm_bpr(x: Any, y: Any, o: Any, ctx: Any) -> None:
    """:func:`_mm_bpr` with the work list of a context."""
    _mm_bpr(x, y, o, required(ctx, "dense_kv_indices"), required(ctx, "winfo_q_indices"), *winfo_of(ctx))


def mm_rrr(x: Any, y: Any, o: Any, ctx: Any) -> None:
    """:func:`_mm_rrr` with the work list of a context."""
    _mm_rrr(x, y, o, *winfo_of(ctx))


def mm_rpr(x: Any, y: Any, o: Any, ctx: Any) -> None:
    """:func:`_mm_rpr` with the work list of a context."""
    _mm_rpr(x, y, o, required(ctx, "dense_kv_indices"), *winfo_of(ctx))
