"""TOVA: what the newest query attended."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvsieve.flow import Flow, register
from kvsieve.mass import AttentionMass


@register("tova")
class TOVA(Flow):
    """``score = mass`` of the previous query alone, averaged over the group's query heads (TOVA, arXiv 2401.06104).

    A page that is once left out has no mass and does not come back. Reads one number per window page and step.
    """

    evictable = True

    mass = AttentionMass(decay=0, group="mean")

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return pages["mass_sum"]
