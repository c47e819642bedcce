"""One step of a mixed batch, worked out once for all layers, with tensors: which rows decode, and what they attend."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

import torch

from kvsieve.budget import Budget
from kvsieve.plan import Quota, Rows
from kvsieve.window import Window


@dataclass(frozen=True)
class Batch:
    """What vLLM says of a step.

    ``starts`` [B + 1]: first token of each request in the flat token axis. ``lengths`` [B]: tokens of each request,
    new ones included. ``prefilling`` [B] bool: prompts that are not finished. ``blocks`` [B, N]: block table.
    ``slots`` [T]: where each new token is stored, -1 for padding.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    prefilling: torch.Tensor
    blocks: torch.Tensor
    slots: torch.Tensor


class Decoding:
    """The rows of a batch that take one token on a past: they attend what the flow selects.

    ``places`` [R]: their places in the batch. ``tokens`` [R]: their places in the flat token axis, None if that is all
    of it, in order. ``table`` [R, S]: physical pages. ``state`` [R]: the state row of each one's first page, if the
    flow has state. ``mass_scale`` [R, 1]: what its stored mass is multiplied by, if it has mass.
    """

    def __init__(self, batch: Batch, places: torch.Tensor, page_size: int, block_size: int) -> None:
        self.page_size, self.places = page_size, places
        everything = len(places) == len(batch.lengths)
        self.tokens = None if everything else batch.starts[:-1].to(torch.int64)[places]
        self.lengths = (batch.lengths if everything else batch.lengths[places]).to(torch.int64)
        self.pages = (self.lengths + page_size - 1) // page_size
        self.table = self._physical_pages(batch.blocks, everything, block_size // page_size)
        self.rows = Rows((), (), tuple(self.lengths.tolist()), self.table, self.lengths)
        self.state: torch.Tensor | None = None
        self.mass_scale: torch.Tensor | None = None
        self._quotas: dict[tuple[Budget, bool, bool], Quota] = {}

    def to(self, device: torch.device) -> Decoding:
        """The same rows on another device."""
        moved = copy(self)
        for name in ("places", "tokens", "lengths", "pages", "table", "state", "mass_scale"):
            value = getattr(self, name)
            setattr(moved, name, None if value is None else value.to(device))
        moved.rows = replace(self.rows, table=moved.table, lengths_tensor=moved.lengths)
        moved._quotas = {}
        return moved

    def _physical_pages(self, blocks: torch.Tensor, everything: bool, share: int) -> torch.Tensor:
        width = int(self.pages.max())
        blocks = blocks[:, : -(-width // share)]
        blocks = (blocks if everything else blocks[self.places]).to(torch.int64)
        table = blocks[..., None] * share + torch.arange(share, device=blocks.device)
        return table.flatten(1)[:, :width].contiguous()

    def quota(self, budget: Budget, scores: bool, stateful: bool) -> Quota:
        """How many pages each row attends under a budget, and the window of those that are scored."""
        key = budget, scores, stateful
        if key not in self._quotas:
            self._quotas[key] = self._quota(*key)
        return self._quotas[key]

    def _quota(self, budget: Budget, scores: bool, stateful: bool) -> Quota:
        fraction, pages = budget.ratio_fraction, self.pages
        least = budget.sink + budget.topk + budget.recent
        kept = torch.clamp(fraction.numerator * pages // fraction.denominator, min=least)
        counts = torch.minimum(pages, kept)
        over = pages > kept
        widths = torch.clamp(pages - budget.sink - budget.recent, min=0)
        topk = torch.where(over, kept - budget.sink - budget.recent, 0)
        asked = (widths > 0) & (over | stateful) if scores else torch.zeros_like(over)
        window = self._window(budget, asked, widths, topk) if bool(asked.any()) else None
        tokens = int(self.lengths.sum() - self.page_size * (pages - counts).sum())
        return Quota(
            *(budget.sink, budget.recent, pages, counts, int(counts.max()), bool(over.any()), window, tokens),
            self.table,
        )

    def _window(self, budget: Budget, asked: torch.Tensor, widths: torch.Tensor, topk: torch.Tensor) -> Window:
        requests = asked.nonzero().flatten()
        widths, topk = widths[requests], topk[requests]
        # What is no window page becomes block 0, vLLM's null block, and state row 0, which is nobody's.
        return Window(
            requests=requests,
            table=self.table,
            row_table=self.table if self.state is None else self._state_rows(self.state),
            lengths=self.lengths,
            widths=widths,
            width=int(widths.max()),
            sink=budget.sink,
            page_size=self.page_size,
            topk=topk,
            max_topk=int(topk.max()),
            total_pages=int(widths.sum()),
            mass_scale=None if self.mass_scale is None else self.mass_scale[requests],
        )

    def _state_rows(self, first: torch.Tensor) -> torch.Tensor:
        return first[:, None] + torch.arange(self.table.shape[1], device=first.device)


class BatchPlan:
    """A step: ``decoding`` and ``prefilling`` rows (None if there are none), the pages that it fills [C] and the state
    rows that enter [E]."""

    def __init__(self, batch: Batch, page_size: int, block_size: int) -> None:
        counts = batch.starts[1:] - batch.starts[:-1]
        decoding = (counts == 1) & ~batch.prefilling & (batch.lengths > 1)
        places = decoding.nonzero().flatten()
        others = (~decoding & (counts > 0)).nonzero().flatten()
        self.decoding = Decoding(batch, places, page_size, block_size) if len(places) else None
        self.prefilling = others if len(others) else None
        # A page divides a block, so slots say which tokens end a page, and which page it is.
        ends = batch.slots[(batch.slots >= 0) & (batch.slots % page_size == page_size - 1)]
        self.filled = ends // page_size
        self.entered: torch.Tensor | None = None


def ragged(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For ragged rows of these sizes [B]: row and place in the row, element by element."""
    row = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    return row, torch.arange(len(row), device=counts.device) - (torch.cumsum(counts, 0) - counts)[row]
