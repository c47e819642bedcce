"""What a decode step left out: the exact attention of its queries beside the pages that were selected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvsieve.backends.attention import gather_pages
from kvsieve.backends.base import AttentionOptions, Backend, Selection
from kvsieve.backends.forwarding import ForwardingBackend
from kvsieve.backends.select import top_pages
from kvsieve.budget import Budget
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import Rows


@dataclass(frozen=True)
class Step:
    """One layer's attention in one decode step.

    ``pool`` tells the layer; ``mass`` float32 [B, H, S]: the share of the exact attention that each page would have
    received, a mean over the query heads of the group; ``pages`` [B]: pages that each request has.
    """

    pool: LayerPool
    rows: Rows
    mass: torch.Tensor
    pages: torch.Tensor

    def valid(self) -> torch.Tensor:
        """Pages that exist: bool [B, S]."""
        return torch.arange(self.mass.shape[-1], device=self.mass.device) < self.pages[:, None]

    def window(self, sink: int, recent: int) -> torch.Tensor:
        """Pages that compete: bool [B, S]."""
        place = torch.arange(self.mass.shape[-1], device=self.mass.device)
        return (place >= sink) & (place < (self.pages - recent)[:, None])

    def selected(self, selection: Selection) -> torch.Tensor:
        """Pages that are attended: bool [B, H, S]."""
        width = self.mass.shape[-1]
        pages = torch.where(selection.listed(), selection.pages, width)
        chosen = torch.zeros(*self.mass.shape[:2], width + 1, dtype=torch.bool, device=self.mass.device)
        return chosen.scatter(2, pages, True)[..., :width]


Chooser = Callable[[Step, Selection], Selection]
"""Replaces a selection by one of as many pages."""
Observer = Callable[[Step, Selection], None]


class Probe(ForwardingBackend):
    """Attends what ``choose`` says instead of what was selected, and shows each step to ``observe``."""

    def __init__(self, inner: Backend, observe: Observer, choose: Chooser | None = None) -> None:
        super().__init__(inner)
        self.observe, self.choose = observe, choose

    def attend(
        self, q: torch.Tensor, pool: LayerPool, rows: Rows, selection: Selection, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        step = Step(pool, rows, page_mass(q, pool, rows, options), -(-rows.lengths_tensor // pool.page_size))
        selection = self.choose(step, selection) if self.choose is not None else selection
        self.observe(step, selection)
        return super().attend(q, pool, rows, selection, options)


def page_mass(q: torch.Tensor, pool: LayerPool, rows: Rows, options: AttentionOptions) -> torch.Tensor:
    """Exact attention probability per page: q [B, H, G, D] -> float32 [B, H, S], a mean over the group.

    Scale, soft-cap and sink logits are honoured. Without sink logits the pages of a segment add up to 1.
    """
    batch, heads, group, width = q.shape
    keys = gather_pages(pool.k, rows.table).float().flatten(1, 2)  # [H * B, S * p, D]
    logits = torch.matmul(q.transpose(0, 1).reshape(heads * batch, group, width).float(), keys.transpose(1, 2))
    logits = (logits * options.scale).unflatten(0, (heads, batch))
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    there = torch.arange(logits.shape[-1], device=q.device) < rows.lengths_tensor[:, None]
    logits = torch.where(there[:, None], logits, float("-inf"))
    lse = torch.logsumexp(logits, -1)
    if options.sinks is not None:
        lse = torch.logaddexp(lse, options.sinks.float()[:, None])
    probabilities = torch.exp(logits - lse[..., None]).mean(2)
    by_page: torch.Tensor = probabilities.unflatten(-1, (-1, pool.page_size)).sum(-1)
    return by_page.transpose(0, 1)


def best_pages(scores: torch.Tensor, step: Step, selection: Selection, budget: Budget) -> Selection:
    """As many pages as ``selection`` has: sinks, recent pages, and those of the highest scores [B, H, S] between."""
    place = torch.arange(scores.shape[-1], device=scores.device)
    always = (place < budget.sink) | (place >= (step.pages - budget.recent)[:, None])
    ranked = torch.where(always[:, None], float("inf"), scores)
    best = top_pages(ranked, step.valid(), selection.count, selection.pages.shape[-1])
    return Selection(torch.where(best < scores.shape[-1], best, 0), selection.count)
