"""Three flows from papers, as a user would write them: docs/papers.md shows them verified and measured.

kvsieve verify examples/paper_flows.py:Loki
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvsieve import Flow


class Loki(Flow):
    """``score = max over heads and tokens of (q P) . (k P)``, P the leading principal axes of the keys.

    Loki (arXiv 2406.02542), Algorithm 1. ``basis [D, D]`` has the principal axes as its columns, the strongest first;
    ``share`` of them count. Reads share * head_dim values per token of each window page: 1/8 of K and V by default.

    The paper ranks tokens, for each query head, by a basis per layer and head, and keeps K rotated by it. Here pages
    are ranked (with page_size 1 tokens), once per KV head, by one basis for the whole model, beside K as it is. Without
    a basis a fixed random projection stands in: it needs no calibration and follows the logits less closely.
    """

    def __init__(self, basis: torch.Tensor | None = None, share: float = 0.25) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share: expected a number in (0, 1], received {share!r}")
        self.basis = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) if basis is None else basis
        self.share = share

    def low(self, x: torch.Tensor) -> torch.Tensor:
        head_dim = x.shape[-1]
        return x @ self.basis[:head_dim, : max(1, round(self.share * head_dim))]

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"k_low": self.low(k)}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return (pages["k_low"] @ self.low(q).T).amax((1, 2))


class DoubleSparsity(Flow):
    """``score = max over heads and tokens of sum_c q_c * k_c`` over a few channels c, the label channels.

    Double Sparsity (arXiv 2408.07092), Algorithm 1. Reads one value per label channel and token of each window page:
    with one channel in 16, the default, 1/32 of K and V.

    The paper ranks tokens, chooses channels offline per layer and head, and stores labels in 4 bits. Here pages are
    ranked (with page_size 1 tokens), the same ``channels`` serve the whole model, and labels have K's dtype. Without
    ``channels`` every sixteenth stands in, which is no calibration.
    """

    def __init__(self, channels: Sequence[int] | None = None) -> None:
        self.channels = slice(None, None, 16) if channels is None else torch.tensor(channels)

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"label": k[:, self.channels].T}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return (q[:, self.channels] @ pages["label"]).amax((1, 2))


class LServe(Flow):
    """``score = max over heads and logical pages of sum_d max(q_d * max_d, q_d * min_d)``.

    LServe (arXiv 2502.14866), hierarchical paging: a page is worth its best logical page, by the key envelope; it has
    4 of them, or one if 4 does not divide it. Reads 8 keys' worth of values, 8 * head_dim, per window page: with pages
    of 64 tokens, logical ones of 16, that is 1/16 of K and V.

    The paper also quantises K and V, gives half of the heads sinks and recent tokens only, and lets a selection serve
    several steps. Here every KV head selects in every step.
    """

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        logical = k.unflatten(0, (4 if len(k) % 4 == 0 else 1, -1))
        return {"k_max": logical.amax(1), "k_min": logical.amin(1)}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        q = q[:, None, None]
        return torch.maximum(q * pages["k_max"], q * pages["k_min"]).sum(-1).amax((0, 2))
