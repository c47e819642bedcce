"""Elementwise functions of one operand over a work list."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.compat.vortex.core.checks import member
from kvsieve.compat.vortex.core.maths import UNARY
from kvsieve.compat.vortex.core.row_op import bf16
from kvsieve.compat.vortex.core.step import winfo_of
from kvsieve.compat.vortex.indexer.triton_kernels._rows import listed, run
from kvsieve.compat.vortex.utils import ElementwiseOpType


def _elementwise_rr(
    x: torch.Tensor,
    o: torch.Tensor,
    winfo_offsets: torch.Tensor,
    winfo_lens: torch.Tensor,
    winfo_num_workloads: torch.Tensor,
    max_chunk_size: int,
    op_type: ElementwiseOpType | int | str,
    alpha: float = 1.0,
    beta: float = 1.0,
    num_sms: int = 1,
) -> None:
    """``o[p] = f(x[p])``: alpha and beta rounded to bfloat16, float32 arithmetic, one rounding at the store.

    ``op_type``: a type, its number, or its name.
    """
    kind = member("op_type", ElementwiseOpType, op_type)
    first, second = bf16(alpha), bf16(beta)
    winfo = winfo_offsets, winfo_lens, winfo_num_workloads
    run(lambda rows: UNARY[kind](rows, first, second), [(x, listed)], o, winfo)


def elementwise_rr(x: Any, o: Any, op_type: Any, alpha: float, beta: float, ctx: Any) -> None:
    """:func:`_elementwise_rr` with the work list of a context."""
    _elementwise_rr(x, o, *winfo_of(ctx), 0, op_type, alpha, beta)
