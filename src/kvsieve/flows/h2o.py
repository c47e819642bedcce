"""H2O: heavy hitters by the attention that tokens have received."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvsieve.flow import Flow, register
from kvsieve.mass import AttentionMass


@register("h2o")
class H2O(Flow):
    """``score = (1 - decay) * mass + sum_h softmax_window(scale * q_h . mean(k))``: what a page got lately, plus what
    its mean key promises now (after H2O, arXiv 2306.14048).

    Mass alone could never bring a page back: one that is not attended gains nothing. It is seeded by the prompt and fed
    by the attention of every step. Reads one mean key and one number per window page and step.
    """

    evictable = True

    def __init__(self, decay: float | None = None, seed: str = "all") -> None:
        self.mass: AttentionMass = AttentionMass(decay, seed=seed)

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"k_mean": k.mean(0)}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor:
        promise = torch.softmax(scale * q @ pages["k_mean"].T, -1).sum(0)
        return (1 - self.mass.factor) * pages["mass_sum"] + promise
