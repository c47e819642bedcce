"""Reductions of a page's inner axes over a work list."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.compat.vortex.core.checks import check_dim, member
from kvsieve.compat.vortex.core.maths import REDUCE
from kvsieve.compat.vortex.core.step import winfo_of
from kvsieve.compat.vortex.indexer.triton_kernels._rows import listed, run
from kvsieve.compat.vortex.utils import ReduceType


def _reduce_rr(
    x: torch.Tensor,
    o: torch.Tensor,
    dim: int,
    reduce_type: ReduceType,
    winfo_kv_offsets: torch.Tensor,
    winfo_kv_lens: torch.Tensor,
    winfo_num_workloads: torch.Tensor,
    max_chunk_size: int = 0,
    num_sms: int = 1,
) -> None:
    """``o[p] = reduce(x[p], dim)``, dim 1 or 2, kept as 1."""
    check_dim("_reduce_rr", dim, (1, 2))
    kind = member("reduce_type", ReduceType, reduce_type)
    winfo = winfo_kv_offsets, winfo_kv_lens, winfo_num_workloads
    run(lambda rows: REDUCE[kind](rows, dim), [(x, listed)], o, winfo)


def reduce_rr(x: Any, o: Any, dim: int, reduce_type: Any, ctx: Any) -> None:
    """:func:`_reduce_rr` with the work list of a context."""
    _reduce_rr(x, o, dim, reduce_type, *winfo_of(ctx))
