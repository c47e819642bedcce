"""SnapKV: the last prompt queries vote, once."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvsieve.flow import Flow, register
from kvsieve.mass import AttentionMass


@register("snapkv")
class SnapKV(Flow):
    """``score = avg_pool(mass)`` over ``kernel`` neighbouring pages, of the attention of the last ``window`` prompt
    queries; decode steps change nothing (SnapKV, arXiv 2404.14469; there a page is a token).

    Reads one number per window page and step.
    """

    evictable = True

    def __init__(self, window: int = 32, kernel: int = 5) -> None:
        if not isinstance(kernel, int) or kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"kernel: expected an odd integer >= 1, received {kernel!r}")
        self.kernel, self.mass = kernel, AttentionMass(1.0, "mean", f"window:{window}", "none")

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        votes = pages["mass_sum"][None]
        return torch.nn.functional.avg_pool1d(votes, self.kernel, 1, self.kernel // 2)[0]
