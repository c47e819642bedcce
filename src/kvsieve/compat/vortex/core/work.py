"""The work list of a step, and the windows of its segments, as index tensors for plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvsieve.compat.vortex.abs.tensor import plain
from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.core.memory import remember, remembered


@dataclass(frozen=True)
class Work:
    """Rows to compute: ``positions`` [n] in the page listing, ``items`` [n] (the work item of each), int64."""

    positions: torch.Tensor
    items: torch.Tensor

    @classmethod
    def read(cls, offsets: torch.Tensor, lens: torch.Tensor, count: torch.Tensor | int) -> Work:
        """From the work list: ``count`` items of ``lens`` rows from ``offsets`` on."""
        tensors = [offsets, lens, *([count] if isinstance(count, torch.Tensor) else [])]
        key = () if isinstance(count, torch.Tensor) else (int(count),)
        return remembered("work", tensors, key, lambda: cls._make(plain(offsets), plain(lens), count))

    @classmethod
    def _make(cls, offsets: torch.Tensor, lens: torch.Tensor, count: torch.Tensor | int) -> Work:
        number = int(count if isinstance(count, int) else plain(count).flatten()[0])
        lens = lens.flatten()[:number].long()
        return cls.of_items(offsets.flatten()[:number].long(), lens, int(lens.sum()))

    @classmethod
    def of_items(cls, offsets: torch.Tensor, lens: torch.Tensor, total: int) -> Work:
        """From int64 ``offsets`` and ``lens`` [items] whose sum is known."""
        index = torch.arange(len(lens), device=lens.device)
        items = torch.repeat_interleave(index, lens, output_size=total)
        first = torch.cumsum(lens, 0) - lens
        return cls(offsets[items] + torch.arange(total, device=lens.device) - first[items], items)

    def remember(self, offsets: torch.Tensor, lens: torch.Tensor, count: torch.Tensor) -> None:
        """Spare the ops of this step from reading these tensors."""
        remember("work", [offsets, lens, count], (), self)


@dataclass(frozen=True)
class Windows:
    """Windows of the scored segments: ``segments`` [m]; ``positions`` and ``valid`` [m, widest], padding repeats.

    ``rows`` [n]: the positions that are no padding, and ``places`` [n], where they are in ``positions``, flattened.
    """

    segments: torch.Tensor
    positions: torch.Tensor
    valid: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor

    @classmethod
    def read(cls, indptr: torch.Tensor, segments: int, bos: int, eos: int, topk: int) -> Windows | None:
        """Windows ``[bos, pages - eos)`` of the segments with more than ``bos + eos + topk`` pages; None: no such."""
        key = (int(segments), int(bos), int(eos), int(topk))
        return remembered("windows", [indptr], key, lambda: cls._make(indptr, *key))

    @classmethod
    def _make(cls, indptr: torch.Tensor, segments: int, bos: int, eos: int, topk: int) -> Windows | None:
        if indptr.numel() < segments + 1:
            problem = f"expected indptr [segments + 1], at least {segments + 1} elements, received {indptr.numel()}"
            raise OpError("window", problem, "plan the step with the batch size that the context has")
        listed = remembered("indptr", [indptr], (segments,), lambda: plain(indptr).flatten()[: segments + 1].tolist())
        device = indptr.device
        begins = torch.tensor(listed, dtype=torch.int64)
        widths = begins[1:] - begins[:-1] - bos - eos
        scored = (widths > max(0, topk)).nonzero()[:, 0]
        if not len(scored):
            return None
        width = int(widths[scored].max())
        sent = torch.stack([scored, begins[scored] + bos, widths[scored]]).to(device, non_blocking=True)
        segment, begin, lens = sent
        place = torch.arange(width, device=device)
        inside = torch.minimum(place[None], lens[:, None] - 1)
        work = Work.of_items(begin, lens, int(widths[scored].sum()))
        places = work.items * width + work.positions - begin[work.items]
        return cls(segment, begin[:, None] + inside, place < lens[:, None], work.positions, places)


def remember_indptr(indptr: torch.Tensor, values: list[int]) -> None:
    """Spare the ops of this step from reading ``indptr``."""
    remember("indptr", [indptr], (len(values) - 1,), values)
