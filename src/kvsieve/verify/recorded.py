"""Queries and keys of a real model: one forward pass over a text, recorded where attention reads them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvsieve.errors import ConfigError
from kvsieve.models import load_model, require

RECORDING = "kvsieve_recording"


@dataclass(frozen=True)
class Recorded:
    """One segment: a KV head's keys ``k`` [T, D]; the queries ``q`` [n, G, D] of its last n tokens; attention scale."""

    layer: int
    k: torch.Tensor
    q: torch.Tensor
    scale: float


def record_model(
    model: str, text: str, *, tokens: int, queries: int, layers: Collection[int] | None = None
) -> list[Recorded]:
    """Run a model over the first ``tokens`` tokens of a text: a segment per layer and KV head.

    Raises:
        ConfigError: Transformers is missing, no such model, or the text is too short.
    """
    require("transformers")
    loaded, tokenizer = load_model(model, attn_implementation="sdpa")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise ConfigError(f"--tokens {tokens}: expected a text of at least so many, received {ids.shape[1]} tokens")
    return record_forward(loaded, ids, queries, layers)


def record_forward(
    model: Any, ids: torch.Tensor, queries: int, layers: Collection[int] | None = None
) -> list[Recorded]:
    """The segments of one forward pass over ids [1, T]."""
    segments: list[Recorded] = []

    def keep(layer: int, query: torch.Tensor, key: torch.Tensor, scale: float) -> None:
        if layers is None or layer in layers:
            heads = key.shape[1]
            last = query[0, :, -queries:].unflatten(0, (heads, -1)).transpose(1, 2)
            segments.extend(
                Recorded(layer, key[0, head].float().clone(), last[head].float().clone(), scale)
                for head in range(heads)
            )

    with recording(model, keep), torch.inference_mode():
        model(ids, use_cache=False)
    return segments


@contextmanager
def recording(model: Any, keep: Any) -> Iterator[None]:
    """Every attention of the model calls ``keep(layer, query [B, Hq, T, D], key [B, H, T, D], scale)`` first."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(module: Any, query: torch.Tensor, key: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        scaling = named.get("scaling")
        keep(module.layer_idx, query, key, query.shape[-1] ** -0.5 if scaling is None else scaling)
        return sdpa_attention_forward(module, query, key, *arguments, **named)

    before = model.config._attn_implementation
    AttentionInterface.register(RECORDING, attention)
    AttentionMaskInterface.register(RECORDING, sdpa_mask)
    model.set_attn_implementation(RECORDING)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
