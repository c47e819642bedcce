"""Recall and captured mass of selections, per layer and KV head, summed over decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvsieve.backends.base import Selection
from kvsieve.budget import Budget
from kvsieve.evaluate.probe import Step

DIGITS = 4


class Coverage:
    """Sums over the steps of a batch.

    Three shares, each per sequence, layer and KV head:

    * ``captured``: the exact attention, over all tokens, that falls on selected pages; mean over steps;
    * ``window``: of the exact attention that falls on window pages, the part on selected ones; both summed over steps;
    * ``recall``: of the window pages with most exact attention, as many as the budget lets choose, the part that was
      selected (a page as good as the last of them counts); mean over steps.

    Args:
        budget: says which pages are the window, and how many the best ones are: the same for all flows.
        batch: sequences of the batch.
    """

    def __init__(self, budget: Budget, batch: int) -> None:
        self.budget, self.batch = budget, batch
        self.active: Sequence[int] = range(batch)
        """Which sequences the next steps are about, in the order of their rows."""
        self._sums: dict[int, torch.Tensor] = {}  # by layer: float64 [5, batch, H]

    def add(self, layer: int, step: Step, selection: Selection) -> None:
        """Count one layer's step."""
        window = step.window(self.budget.sink, self.budget.recent)[:, None]
        selected = step.selected(selection)
        inside = torch.where(window, step.mass, 0.0)
        values = (
            torch.where(selected, step.mass, 0.0).sum(-1),
            torch.where(selected, inside, 0.0).sum(-1),
            inside.sum(-1),
            self._recall(step.mass, window, selected),
            torch.ones(step.mass.shape[:2], device=step.mass.device),
        )
        if layer not in self._sums:
            shape = len(values), self.batch, step.mass.shape[1]
            self._sums[layer] = torch.zeros(shape, dtype=torch.float64, device=step.mass.device)
        rows: Any = slice(None) if len(self.active) == self.batch else torch.tensor(self.active)
        self._sums[layer][:, rows] += torch.stack(values).double()

    def _recall(self, mass: torch.Tensor, window: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
        """Share of the best window pages that are selected: [B, H]."""
        count = window.sum(-1).clamp(max=self.budget.topk)  # [B, 1]
        ranked = torch.where(window, mass, -1.0).sort(-1, descending=True).values
        last = ranked.gather(-1, (count - 1).clamp(min=0)[..., None].expand(-1, mass.shape[1], -1))
        hits = (selected & window & (mass >= last)).sum(-1)
        return torch.where(count > 0, torch.minimum(hits, count).float() / count.clamp(min=1), 1.0)

    @property
    def layers(self) -> list[int]:
        """Layers that were counted, ascending."""
        return sorted(self._sums)

    def shares(self, row: int) -> dict[str, list[list[float]]]:
        """``captured``, ``window`` and ``recall`` of one sequence: a list of KV heads per layer."""
        sums = torch.stack([self._sums[layer][:, row].cpu() for layer in self.layers], 1)  # [5, L, H]
        captured, chosen, inside, recall, steps = sums
        window = torch.where(inside > 0, chosen / inside.clamp(min=1e-300), 1.0)
        found = {"captured": captured / steps, "window": window, "recall": recall / steps}
        return {name: [[round(x, DIGITS) for x in heads] for heads in share.tolist()] for name, share in found.items()}
