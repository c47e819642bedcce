"""A flow that uses every rule of the lowering: what a mutant of the compiler breaks shows in its scores."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvsieve.flow import Flow

Fields = Mapping[str, torch.Tensor]


class EveryRule(Flow):
    """Reductions, softmax, cumulative sums and votes over the pages, beside products, joins and slices within one.

    It is no algorithm: ``score`` is a sum of bounded terms, each of which one rule computes.
    """

    name = "every_rule"

    def init_state(self, page_size: int, head_dim: int) -> Fields:
        return {"seen": torch.full((), 0.5), "trace": torch.zeros(2)}

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Fields:
        spread = (k - k.mean(0)).square().mean(0).sqrt()
        return {"k_mean": k.mean(0), "k_spread": spread, "v_size": v.square().sum(-1).sqrt().amax(0)}

    def score(self, q: torch.Tensor, pages: Fields, layer: int, scale: float) -> tuple[torch.Tensor, Fields]:
        logits = q @ pages["k_mean"].T * scale  # [G, W]
        centred = logits - logits.mean(-1, keepdim=True)
        level = centred / (1 + logits.std(-1, keepdim=True, correction=0))
        weights = torch.softmax(level, -1)
        terms = [
            self.votes(level),
            self.extremes(logits),
            torch.cumsum(weights, -1).mean(0),
            torch.tanh(torch.einsum("gd,wd->gw", q, pages["k_spread"]).sum(0) * 0.1 * (layer + 1)),
            torch.log1p(pages["position"]) - torch.log1p(pages["age"]),
            pages["v_size"] / (1 + pages["v_size"].sum()),
            0.5 * pages["seen"] + pages["trace"][:, 0] - pages["trace"].flip(-1)[:, 0],
        ]
        scores = torch.stack(terms, -1).sum(-1)
        share = weights.amax(0)
        trace = torch.cat([share[:, None], pages["trace"][:, :1]], -1)
        return scores, {"seen": 0.875 * pages["seen"] + share, "trace": trace}

    def votes(self, level: torch.Tensor) -> torch.Tensor:
        """Neighbouring pages vote for each other: level [G, W] -> [W]."""
        mean = torch.nn.functional.avg_pool1d(level, 3, 1, 1, count_include_pad=False)
        peak = torch.nn.functional.max_pool1d(level, 3, 1, 1)
        return mean.amax(0) + peak.sum(0)

    def extremes(self, logits: torch.Tensor) -> torch.Tensor:
        """How far a page is from the window's best and worst: logits [G, W] -> [W]."""
        best, worst = logits.amax(-1, keepdim=True), logits.amin(-1, keepdim=True)
        total = torch.logsumexp(logits, -1, keepdim=True)
        return (
            torch.sigmoid(logits - best).amax(0) + torch.sigmoid(worst - logits).amin(0) + torch.exp(logits - total)[0]
        )
