"""Selections to compare flows with: the exact best pages, and random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvsieve.backends.base import Selection
from kvsieve.budget import Budget
from kvsieve.evaluate.probe import Chooser, Step, best_pages

_ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)


def oracle(budget: Budget) -> Chooser:
    """The window pages that receive most of the exact attention of the step's own queries."""

    def choose(step: Step, selection: Selection) -> Selection:
        return best_pages(step.mass, step, selection, budget)

    return choose


def at_random(budget: Budget, salts: Callable[[], Sequence[int]], layer_of: Callable[[Step], int]) -> Chooser:
    """Window pages by chance, drawn anew for every step, layer and head.

    The draw depends on a request's salt, its length, layer, head and page, and on nothing else: neither device nor
    batch changes it. ``salts()`` gives one integer per request of the step.
    """

    def choose(step: Step, selection: Selection) -> Selection:
        heads, width = step.mass.shape[1:]
        device = step.mass.device
        salt = torch.tensor(list(salts()), dtype=torch.int64, device=device)
        key = mix(salt * _ODD[0] + step.rows.lengths_tensor * _ODD[1] + layer_of(step))
        key = mix(key[:, None] + torch.arange(heads, device=device) * _ODD[2])
        key = mix(key[..., None] + torch.arange(width, device=device) * _ODD[0])
        return best_pages((key & 0xFFFFFF).float(), step, selection, budget)

    return choose


def mix(x: torch.Tensor) -> torch.Tensor:
    """Scramble int64 values, wrapping around as integers do (after SplitMix64's finalizer)."""
    x = (x ^ (x >> 30)) * _ODD[1]
    x = (x ^ (x >> 27)) * _ODD[2]
    return x ^ (x >> 31)
