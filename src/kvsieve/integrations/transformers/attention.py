"""The attention function and the mask that Transformers calls under ``attn_implementation="kvsieve"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvsieve.backends.attention import attend_masked
from kvsieve.backends.base import AttentionOptions
from kvsieve.errors import ConfigError
from kvsieve.models import IMPLEMENTATION

_TAG = "_kvsieve_attend"

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, AttentionOptions], torch.Tensor]
"""(query [B, Hq, T, D], key, value, mask, options) -> [B, T, Hq, Dv]: the attention of one cache layer."""


def tag(key: torch.Tensor, attend: Attend) -> None:
    """Give keys on their way from a cache layer to the attention function what attends them."""
    setattr(key, _TAG, attend)


def kvsieve_mask(*, attention_mask: torch.Tensor | None = None, **arguments: Any) -> torch.Tensor | None:
    """The mask of a layer: the plain 2-D padding mask [B, L] where attention is causal, else sdpa's 4-D one.

    A full-attention layer never needs [B, 1, T, L]: the cache stores real tokens only, and causality follows from
    their order. Sliding-window and other masks are built as for sdpa.
    """
    plain = arguments.get("mask_function", causal_mask_function) is causal_mask_function
    dynamic = arguments["kv_length"] == arguments.get("q_offset", 0) + arguments["q_length"]
    if plain and dynamic and arguments.get("local_size") is None:
        return attention_mask
    mask: torch.Tensor | None = sdpa_mask(attention_mask=attention_mask, **arguments)
    return mask


@torch.compiler.disable  # type: ignore[untyped-decorator]
def kvsieve_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer: query [B, Hq, T, D], key [B, H, L, D], value [B, H, L, Dv] -> [B, T, Hq, Dv].

    Soft-cap and sink logits (``s_aux`` [Hq]) are honoured.

    Raises:
        ConfigError: an argument that would have to be ignored, or K and V from another kind of cache.
    """
    _refuse(module, dropout, arguments)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    options = AttentionOptions(scale, softcap, s_aux)
    attend: Attend | None = getattr(key, _TAG, None)
    if attend is not None:
        return attend(query, key, value, attention_mask, options), None
    if key.shape[2] != query.shape[2]:
        raise ConfigError(
            f"attn_implementation='{IMPLEMENTATION}': expected K and V from a SparseCache, received {key.shape[2]} "
            f"keys for {query.shape[2]} queries from another cache (dynamic, static, offloaded, quantised, ...); "
            "pass past_key_values=SparseCache(model.config, ...), or use attn_implementation='sdpa' with that cache"
        )
    return dense_attention(query, key, value, attention_mask, options), None


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Dense attention by the model's own mask (4-D, bool or additive; 2-D padding; none: causal) -> [B, T, Hq, Dv]."""
    rows, length = query.shape[2], key.shape[2]
    if mask is None or mask.dim() == 2:
        allowed = torch.ones(rows, length, dtype=torch.bool, device=query.device).tril(length - rows)
        allowed = allowed if mask is None else allowed & mask[:, None, None].bool()
    else:
        allowed = mask
    return attend_masked(query, key, value, allowed, options).transpose(1, 2).contiguous()


def _refuse(module: torch.nn.Module, dropout: float, arguments: dict[str, Any]) -> None:
    causal = arguments.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    wrong = {
        "dropout in training": dropout and module.training,
        "bidirectional attention": not causal,
        "output_attentions": arguments.get("output_attentions"),
        "a position bias": arguments.get("position_bias") is not None,
    }
    for what, present in wrong.items():
        if present:
            raise ConfigError(
                f"attn_implementation='{IMPLEMENTATION}' does not support {what}; use attn_implementation='eager' there"
            )
