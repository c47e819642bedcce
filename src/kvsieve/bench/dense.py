"""The dense forms that a sparse step is measured against, on K and V that lie as a dense cache has them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from kvsieve.bench.setting import Setting

if TYPE_CHECKING:
    from kvsieve.bench.stack import Stack

UNFAIR = "SDPA, enable_gqa"
"""Reads K and V once per query head on a CPU: shown, but no baseline."""
FLASHINFER = "FlashInfer paged decode"

FLASHINFER_BYTES = 256 << 20

_attention = torch.nn.functional.scaled_dot_product_attention


def dense_forms(stack: Stack) -> dict[str, Callable[[int], object]]:
    """The dense forms by name; each takes a layer. On a GPU FlashInfer's is one of them, where it is installed."""
    forms: dict[str, Callable[[int], object]] = dict(Dense(stack.setting, stack.keys, stack.values).forms())
    if stack.setting.on_gpu and importlib.util.find_spec("flashinfer") is not None:
        return {FLASHINFER: flashinfer_form(stack), **forms}
    return forms


def flashinfer_form(stack: Stack) -> Callable[[int], object]:
    """FlashInfer's paged decode over the pool of the stack's own requests."""
    import flashinfer

    s, p = stack.setting, stack.runtime.page_size
    entries = [stack.runtime.tables[request] for request in stack.requests]
    starts = torch.tensor([0, *accumulate(len(entry.blocks) for entry in entries)], dtype=torch.int32)
    last = torch.tensor([(entry.stored - 1) % p + 1 for entry in entries], dtype=torch.int32)
    blocks = torch.tensor([block for entry in entries for block in entry.blocks], dtype=torch.int32, device=s.device)
    memory = torch.empty(FLASHINFER_BYTES, dtype=torch.uint8, device=s.device)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(memory, "HND", use_tensor_cores=True)
    decode.plan(
        starts, blocks, last, s.query_heads, s.kv_heads, s.head_dim, p, q_data_type=s.dtype, kv_data_type=s.dtype
    )
    pools = [stack.layer(index).pool for index in range(s.layers)]
    caches = [tuple(field.transpose(0, 1).contiguous() for field in (pool.k, pool.v)) for pool in pools]
    queries = [q for q, _, _ in stack.draws]
    return lambda layer: decode.run(queries[layer], caches[layer])


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
