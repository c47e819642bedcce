"""Heavy hitters at token level: a decayed sum of what each token could have received.

Proposed for vortex_torch by GeoffreyWang1117; the token-level design was suggested by Zhuoming Chen.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvsieve.flow import Flow, register


class _H2OTokens(Flow):
    """Shared by both: one accumulator per token, started at 0."""

    page_size = 1

    def __init__(self, decay: float = 1 - 2**-6, scale: float | None = None) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay: expected a number in [0, 1], received {decay!r}")
        if scale is not None and not 0 < scale < float("inf"):
            raise ValueError(f"scale: expected a positive number or None, received {scale!r}")
        self.decay, self.scale = decay, scale

    def init_state(self, page_size: int, head_dim: int) -> Mapping[str, torch.Tensor]:
        return {"heavy": torch.zeros(())}

    def logits(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """``scale * q . k``: q [..., D] against the window's keys, [..., W]."""
        return (q @ pages["k"][:, 0].T) * (self.scale or q.shape[-1] ** -0.5)


@register("h2o_token_sparse_attention")
class H2OTokens(_H2OTokens):
    """``s = softmax_window(scale * qm . k) + decay * s_prev`` with qm the mean query; score and new state are ``s``.

    After H2O (arXiv 2306.14048, Algorithm 1). It reads the whole K at every step (head_dim values per token, plus its
    float32 accumulator), so its attention cannot be much more than twice as fast as dense.
    """

    def score(
        self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        heavy = torch.softmax(self.logits(q.mean(0), pages), dim=-1) + self.decay * pages["heavy"]
        return heavy, {"heavy": heavy}


@register("gqa_h2o_token_sparse_attention")
class GQAH2OTokens(_H2OTokens):
    """``s = max_h softmax_window(scale * q_h . k) + decay * s_prev``; score and new state are ``s``.

    After H2O (arXiv 2306.14048, Algorithm 1). It reads the whole K at every step (head_dim values per token, plus its
    float32 accumulator), so its attention cannot be much more than twice as fast as dense.
    """

    def score(
        self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        heavy = torch.softmax(self.logits(q, pages), dim=-1).amax(0) + self.decay * pages["heavy"]
        return heavy, {"heavy": heavy}
