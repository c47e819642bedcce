"""The dense forms that a sparse step is measured against, on K and V that lie as a dense cache has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvsieve.bench.setting import Setting

UNFAIR = "SDPA, enable_gqa"
"""Reads K and V once per query head on a CPU: shown, but no baseline."""

_attention = torch.nn.functional.scaled_dot_product_attention


class Dense:
    """Dense decode attention of one token per request: K, V [B, H, L, D] per layer."""

    def __init__(self, setting: Setting, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self.keys, self.values, self.scale = keys, values, setting.head_dim**-0.5
        shape = setting.batch, setting.kv_heads, setting.group, setting.head_dim
        self.q = torch.randn(shape, dtype=setting.dtype, device=setting.device)

    def forms(self) -> dict[str, Callable[[int], torch.Tensor]]:
        """The forms by name; each takes a layer."""
        return {"SDPA, group as rows": self.grouped, "matmul-softmax-matmul": self.products, UNFAIR: self.gqa}

    def grouped(self, layer: int) -> torch.Tensor:
        """SDPA with the group's query heads as query rows."""
        return _attention(self.q, self.keys[layer], self.values[layer])

    def products(self, layer: int) -> torch.Tensor:
        """Two matrix products and a softmax between them."""
        logits = torch.matmul(self.q, self.keys[layer].transpose(-1, -2)) * self.scale
        return torch.matmul(torch.softmax(logits, -1), self.values[layer])

    def gqa(self, layer: int) -> torch.Tensor:
        """SDPA as models call it."""
        return _attention(self.q.flatten(1, 2)[:, :, None], self.keys[layer], self.values[layer], enable_gqa=True)
