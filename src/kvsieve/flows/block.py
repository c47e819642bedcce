"""Mean-key scoring: a page is worth what its average key promises."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvsieve.flow import Flow, register


@register("block_sparse_attention")
class BlockSparse(Flow):
    """``score = mean_h(q_h) . mean(k)``, as vortex_torch's ``block_sparse_attention``.

    Reads one mean key of head_dim values per window page and step.
    """

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"k_mean": k.mean(0)}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return pages["k_mean"] @ q.mean(0)


@register("gqa_block_sparse_attention")
class GQABlockSparse(Flow):
    """``score = max_h softmax_window(scale * q_h . mean(k))``: each query head votes with a distribution over pages.

    As vortex_torch's ``gqa_block_sparse_attention``, with the model's attention scale unless ``scale`` is given.
    Reads one mean key of head_dim values per window page and step.
    """

    def __init__(self, scale: float | None = None) -> None:
        if scale is not None and not 0 < scale < float("inf"):
            raise ValueError(f"scale: expected a positive number or None, received {scale!r}")
        self.scale = scale

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"k_mean": k.mean(0)}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor:
        logits = (q @ pages["k_mean"].T) * (self.scale or scale)
        return torch.softmax(logits, dim=-1).amax(0)
