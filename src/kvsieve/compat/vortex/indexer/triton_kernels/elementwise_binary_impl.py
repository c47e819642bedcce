"""Elementwise functions of two operands over a work list."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.compat.vortex.core.checks import member
from kvsieve.compat.vortex.core.maths import BINARY
from kvsieve.compat.vortex.core.row_op import bf16
from kvsieve.compat.vortex.core.step import required, winfo_of
from kvsieve.compat.vortex.indexer.triton_kernels._rows import batched, listed, paged, run
from kvsieve.compat.vortex.utils import ElementwiseBinaryOpType


def _function(op_type: Any, alpha: float, beta: float) -> Any:
    kind = member("op_type", ElementwiseBinaryOpType, op_type)
    first, second = bf16(alpha), bf16(beta)
    return lambda x, y: BINARY[kind](x, y, first, second)


def _elementwise_binary_rrr(
    x: torch.Tensor,
    y: torch.Tensor,
    o: torch.Tensor,
    winfo_offsets: torch.Tensor,
    winfo_lens: torch.Tensor,
    winfo_num_workloads: torch.Tensor,
    max_chunk_size: int,
    op_type: ElementwiseBinaryOpType,
    alpha: float = 1.0,
    beta: float = 1.0,
    num_sms: int = 1,
) -> None:
    """``o[p] = f(x[p], y[p])``: alpha and beta rounded to bfloat16, float32 arithmetic, one rounding at the store."""
    winfo = winfo_offsets, winfo_lens, winfo_num_workloads
    run(_function(op_type, alpha, beta), [(x, listed), (y, listed)], o, winfo)


def _elementwise_binary_rpr(
    x: torch.Tensor,
    y: torch.Tensor,
    o: torch.Tensor,
    indices: torch.Tensor,
    winfo_offsets: torch.Tensor,
    winfo_lens: torch.Tensor,
    winfo_num_workloads: torch.Tensor,
    max_chunk_size: int,
    op_type: ElementwiseBinaryOpType,
    alpha: float = 1.0,
    beta: float = 1.0,
    num_sms: int = 1,
) -> None:
    """``o[p] = f(x[p], y[indices[p]])``, rounded as :func:`_elementwise_binary_rrr`."""
    winfo = winfo_offsets, winfo_lens, winfo_num_workloads
    run(_function(op_type, alpha, beta), [(x, listed), (y, paged(indices))], o, winfo)


def _elementwise_binary_bpr(
    x: torch.Tensor,
    y: torch.Tensor,
    o: torch.Tensor,
    indices: torch.Tensor,
    winfo_x_indices: torch.Tensor,
    winfo_y_offsets: torch.Tensor,
    winfo_y_lens: torch.Tensor,
    winfo_num_workloads: torch.Tensor,
    max_chunk_size: int,
    op_type: ElementwiseBinaryOpType,
    alpha: float = 1.0,
    beta: float = 1.0,
    num_sms: int = 1,
) -> None:
    """``o[p] = f(x[q row of p's item], y[indices[p]])``, rounded as :func:`_elementwise_binary_rrr`."""
    winfo = winfo_y_offsets, winfo_y_lens, winfo_num_workloads
    run(_function(op_type, alpha, beta), [(x, batched(winfo_x_indices)), (y, paged(indices))], o, winfo)


def elementwise_binary_rrr(x: Any, y: Any, o: Any, op_type: Any, alpha: float, beta: float, ctx: Any) -> None:
    """:func:`_elementwise_binary_rrr` with the work list of a context."""
    _elementwise_binary_rrr(x, y, o, *winfo_of(ctx), 0, op_type, alpha, beta)


def elementwise_binary_rpr(x: Any, y: Any, o: Any, op_type: Any, alpha: float, beta: float, ctx: Any) -> None:
    """:func:`_elementwise_binary_rpr` with the work list of a context."""
    _elementwise_binary_rpr(x, y, o, required(ctx, "dense_kv_indices"), *winfo_of(ctx), 0, op_type, alpha, beta)


def elementwise_binary_bpr(x: Any, y: Any, o: Any, op_type: Any, alpha: float, beta: float, ctx: Any) -> None:
    """:func:`_elementwise_binary_bpr` with the work list of a context."""
    lists = required(ctx, "dense_kv_indices"), required(ctx, "winfo_q_indices")
    _elementwise_binary_bpr(x, y, o, *lists, *winfo_of(ctx), 0, op_type, alpha, beta)
