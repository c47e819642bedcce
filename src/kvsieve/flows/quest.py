"""Quest: a page is worth the largest logit that its key envelope allows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvsieve.flow import Flow, register


@register("gqa_quest_sparse_attention")
class Quest(Flow):
    """``score = max_h sum_d max(q_hd * max_d, q_hd * min_d)``, an upper bound of ``max_k q_h . k`` over the page.

    Quest (arXiv 2406.10774), section 3.2. The bound is taken per query head and then reduced, so it stays a bound
    under grouped queries. Reads two keys' worth of values, 2 * head_dim, per window page and step.
    """

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"k_max": k.amax(0), "k_min": k.amin(0)}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        q = q[:, None, :]
        return torch.maximum(q * pages["k_max"], q * pages["k_min"]).sum(-1).amax(0)
