"""Attention mass and nothing else, token by token: what eviction leaves, chosen where everything stays."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvsieve.budget import Budget
from kvsieve.flow import Flow
from kvsieve.mass import AttentionMass
from kvsieve.retention import Evict


class MassAlone(Flow):
    """``score = mass``, with the decay that stands where tokens are evicted.

    Not registered: at page 1, under :func:`twin_budget`, it attends exactly what ``Evict`` attends, so that what the
    evicted tokens would have received can be measured.
    """

    page_size = 1

    def __init__(self, mass: AttentionMass) -> None:
        self.mass = mass.where_evicted()

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return pages["mass_sum"]


def twin_budget(retention: Evict) -> Budget:
    """The budget, at page 1, of as many tokens as a step attends under ``retention``."""
    return Budget(retention.capacity - retention.sink - retention.recent, retention.sink, retention.recent + 1)
