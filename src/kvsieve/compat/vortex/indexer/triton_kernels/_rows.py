"""What the loose functions share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvsieve.compat.vortex.abs.tensor import plain
from kvsieve.compat.vortex.core.kernels import Gathered, compute
from kvsieve.compat.vortex.core.work import Work

Index = Callable[[Work], torch.Tensor]


def listed(work: Work) -> torch.Tensor:
    """Places in the page listing."""
    return work.positions


def paged(indices: torch.Tensor) -> Index:
    """Page rows."""
    return lambda work: plain(indices).reshape(-1)[work.positions].long()


def batched(winfo_x_indices: torch.Tensor) -> Index:
    """Rows of q."""
    return lambda work: plain(winfo_x_indices).reshape(-1)[work.items].long()


def run(
    function: Callable[..., torch.Tensor],
    operands: list[tuple[torch.Tensor, Index]],
    o: torch.Tensor,
    winfo: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """``o[p] = function(*operands)`` for every row p of the work list ``winfo`` (offsets, lens, count)."""
    work, out = Work.read(*winfo), plain(o)
    gathered = [Gathered(plain(x), index(work)) for x, index in operands]
    compute(gathered, function, out, work.positions, out.shape[1] * out.shape[2])
