"""The layers of a SparseCache: full attention in pages, sliding windows as the model has them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from kvsieve.backends.base import AttentionOptions
from kvsieve.errors import ConfigError
from kvsieve.integrations.transformers.attention import dense_attention, tag
from kvsieve.integrations.transformers.forward import Forward
from kvsieve.models import IMPLEMENTATION


class ForwardHost(Protocol):
    """What a paged layer needs of its cache."""

    def forward_of(self, layer: PagedLayer, batch: int, rows: int, mask: torch.Tensor | None) -> Forward:
        """The forward call that the layer's attention belongs to."""


class PagedLayer(CacheLayerMixin):
    """A full-attention layer: K and V live in the runtime's pool.

    It does not know its cache, so that both are freed when the last user lets go.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.index, self.length = index, 0
        self._waiting = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._waiting:
            raise ConfigError(
                f"layer {self.index}: expected kvsieve's attention after the cache update, but the model never called "
                f"it; use a model whose attention goes through attn_implementation='{IMPLEMENTATION}'"
            )
        self.lazy_initialization(key_states, value_states)
        self._waiting = True
        return key_states, value_states

    def attend(
        self,
        cache: ForwardHost,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """New q [B, Hq, T, D], k, v [B, H, T, ...] of the cache that the layer belongs to -> [B, T, Hq, Dv]."""
        self._waiting = False
        if mask is not None and mask.dim() != 2:
            raise ConfigError(
                f"layer {self.index}: expected a 2-D attention_mask [batch, length], received {list(mask.shape)}; "
                "custom 4-D masks need attn_implementation='sdpa'"
            )
        forward = cache.forward_of(self, query.shape[0], query.shape[2], mask)
        out = forward.attend(self.index, query, key, value, options)
        self.length += query.shape[2]
        return out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.length, self._waiting, self.is_initialized = 0, False, False


class SlidingLayer(DynamicSlidingWindowLayer):
    """A sliding-window layer: stored and masked as the model does it, dense within its window."""

    _before: tuple[torch.Tensor | None, torch.Tensor | None, bool, int] = None, None, False, 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._before = self.keys, self.values, self.is_initialized, self.cumulative_length
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        tag(keys, dense_attention)  # not with the layer: it may store these very keys, and neither would ever die
        return keys, values

    def forget_from(self, length: int) -> None:
        """Undo the newest update if it reached beyond ``length`` tokens."""
        if self.cumulative_length > length:
            self.keys, self.values, self.is_initialized, self.cumulative_length = self._before
