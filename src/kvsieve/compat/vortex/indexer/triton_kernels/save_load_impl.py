"""Copies between the page listing and the pool."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.compat.vortex.abs.tensor import plain
from kvsieve.compat.vortex.core.kernels import copy_rows
from kvsieve.compat.vortex.core.step import required, winfo_of
from kvsieve.compat.vortex.core.work import Work
from kvsieve.compat.vortex.indexer.triton_kernels._rows import paged


def _save_rp(
    x: torch.Tensor,
    o: torch.Tensor,
    indices: torch.Tensor,
    winfo_offsets: torch.Tensor,
    winfo_lens: torch.Tensor,
    winfo_num_workloads: torch.Tensor,
    max_chunk_size: int = 0,
    num_sms: int = 1,
) -> None:
    """``o[indices[p]] = x[p]``."""
    work = Work.read(winfo_offsets, winfo_lens, winfo_num_workloads)
    copy_rows(plain(x), work.positions, plain(o), paged(indices)(work))


def _load_pr(
    x: torch.Tensor,
    o: torch.Tensor,
    indices: torch.Tensor,
    winfo_offsets: torch.Tensor,
    winfo_lens: torch.Tensor,
    winfo_num_workloads: torch.Tensor,
    max_chunk_size: int = 0,
    num_sms: int = 1,
) -> None:
    """``o[p] = x[indices[p]]``."""
    work = Work.read(winfo_offsets, winfo_lens, winfo_num_workloads)
    copy_rows(plain(x), paged(indices)(work), plain(o), work.positions)


def save_rp(x: Any, o: Any, ctx: Any) -> None:
    """:func:`_save_rp` with the work list of a context."""
    _save_rp(x, o, required(ctx, "dense_kv_indices"), *winfo_of(ctx))


def load_pr(x: Any, o: Any, ctx: Any) -> None:
    """:func:`_load_pr` with the work list of a context."""
    _load_pr(x, o, required(ctx, "dense_kv_indices"), *winfo_of(ctx))
