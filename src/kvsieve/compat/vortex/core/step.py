"""What ops read of a context: numbers, the page listing, the work list, the windows that are scored."""

from __future__ import annotations

import operator
from typing import Any

import torch

from kvsieve.compat.vortex.abs.tensor import plain
from kvsieve.compat.vortex.core.errors import OpError, described
from kvsieve.compat.vortex.core.formats import FORMAT
from kvsieve.compat.vortex.core.work import Windows, Work
from kvsieve.compat.vortex.utils import UNSET

Winfo = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Offsets, lengths and number of the items of a work list."""
PLANNED = ("dense_kv_", "sparse_kv_", "winfo_", "kv_last_page_len")
"""How the names of the fields begin that ``plan_decode`` fills."""


def required(ctx: Any, name: str) -> Any:
    """A field that somebody has set.

    Raises:
        OpError: nobody has.
    """
    value = getattr(ctx, name, UNSET)
    if value is UNSET or value is None:
        remedy = "call plan_decode first, or assign it" if name.startswith(PLANNED) else "assign it to the context"
        raise OpError(f"ctx.{name}", "expected a value, received none", remedy)
    return value


def number(ctx: Any, name: str, unset: int | None = None) -> int:
    """A whole number of a context; ``unset`` while nobody has set it.

    Raises:
        OpError: it is no whole number, or nobody has set it and ``unset`` is None.
    """
    if unset is not None and getattr(ctx, name, UNSET) in (UNSET, None):
        return unset
    value = required(ctx, name)
    try:
        return operator.index(value)
    except TypeError:
        problem = f"expected a whole number, received {described(value)}"
        raise OpError(f"ctx.{name}", problem, "assign an int") from None


def segments_of(ctx: Any) -> int:
    """(request, KV head) pairs of a context's step."""
    return number(ctx, "batch_size") * number(ctx, "num_kv_heads")


def budget_of(ctx: Any) -> tuple[int, int, int]:
    """Reserved pages at the beginning and the end, and pages chosen between them."""
    return number(ctx, "page_reserved_bos"), number(ctx, "page_reserved_eos"), number(ctx, "topk_val")


def windows_of(ctx: Any) -> Windows | None:
    """The windows of the segments that the step scores."""
    return Windows.read(required(ctx, "dense_kv_indptr"), segments_of(ctx), *budget_of(ctx))


def winfo_of(ctx: Any) -> Winfo:
    """The step's work list, as tensors."""
    names = "winfo_kv_offsets", "winfo_kv_lens", "winfo_num_workloads"
    offsets, lens, count = (required(ctx, name) for name in names)
    return offsets, lens, count


def work_of(ctx: Any) -> Work:
    """The rows that the step scores."""
    return Work.read(*winfo_of(ctx))


def listing_rows(ctx: Any) -> int:
    """Rows of a RAGGED result: the context's capacity, or the length of its page listing if that is larger."""
    return max(number(ctx, "max_num_pages", unset=0), int(required(ctx, "dense_kv_indices").numel()))


def rows_of(kind: FORMAT, work: Work, ctx: Any) -> torch.Tensor:
    """Row [n] of an operand at every place of the work list."""
    if kind is FORMAT.RAGGED:
        return work.positions
    if kind is FORMAT.PAGED:
        return plain(required(ctx, "dense_kv_indices")).flatten()[work.positions].long()
    return plain(required(ctx, "winfo_q_indices")).flatten()[work.items].long()
