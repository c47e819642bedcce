"""What a decode step left out: the exact attention of its queries beside the pages that were selected."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvsieve.backends.attention import gather_pages
from kvsieve.backends.base import AttentionOptions, Backend, Selection
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


def instrumented(backend: Backend, observe: Observer | None, choose: Chooser | None = None) -> Backend:
    """A backend that attends what ``choose`` says and shows each step to ``observe``; else it is ``backend``."""
    twin = copy.copy(backend)

    def attend(q: torch.Tensor, pool: LayerPool, rows: Rows, selection: Selection, options: AttentionOptions) -> Any:
        if observe is not None or choose is not None:
            pages = -(-rows.lengths_tensor // pool.page_size)
            step = Step(pool, rows, page_mass(q, pool, rows, options), pages)
            selection = choose(step, selection) if choose is not None else selection
            if observe is not None:
                observe(step, selection)
        return backend.attend(q, pool, rows, selection, options)

    setattr(twin, "attend", attend)  # noqa: B010  (a plain assignment to a method is no statement mypy accepts)
    return twin


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
