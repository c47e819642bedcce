"""Heavy hitters at page level: mean logit plus the peak that the key envelope allows.

Proposed for vortex_torch by GeoffreyWang1117.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from kvsieve.flow import Flow, register


class _H2OPages(Flow):
    """Shared by both: mean key and two-sided key envelope. ``q . max`` alone bounds nothing when q is signed."""

    def __init__(self, w_avg: float = 1.0, w_peak: float = 1.0) -> None:
        if not (math.isfinite(w_avg) and math.isfinite(w_peak)):
            raise ValueError(f"w_avg and w_peak: expected finite numbers, received {w_avg!r} and {w_peak!r}")
        self.w_avg, self.w_peak = w_avg, w_peak

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"k_mean": k.mean(0), "k_max": k.amax(0), "k_min": k.amin(0)}


@register("h2o_sparse_attention")
class H2OPages(_H2OPages):
    """``w_avg * qm . mean(k) + w_peak * sum_d max(qm_d * max_d, qm_d * min_d)`` with qm the mean query of the group.

    After H2O (arXiv 2306.14048), re-scored at every step: it carries no history. The peak term is a bound and larger
    than the mean term, hence the weights. Reads 3 * head_dim values per window page and step.
    """

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        mean_q = q.mean(0)
        peak = torch.maximum(mean_q * pages["k_max"], mean_q * pages["k_min"]).sum(-1)
        return self.w_avg * (pages["k_mean"] @ mean_q) + self.w_peak * peak


@register("gqa_h2o_sparse_attention")
class GQAH2OPages(_H2OPages):
    """``w_avg * max_h q_h . mean(k) + w_peak * max_h sum_d max(q_hd * max_d, q_hd * min_d)``.

    After H2O (arXiv 2306.14048), re-scored at every step: it carries no history. Each term is taken per query head
    and then reduced. Reads 3 * head_dim values per window page and step.
    """

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        heads = q[:, None, :]
        peak = torch.maximum(heads * pages["k_max"], heads * pages["k_min"]).sum(-1).amax(0)
        return self.w_avg * (q @ pages["k_mean"].T).amax(0) + self.w_peak * peak
