"""SparseCache: a Transformers cache that stores real tokens in pages and attends a selection of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvsieve.backends import Backend
from kvsieve.budget import BudgetLike
from kvsieve.call import Call, ReadStats
from kvsieve.errors import ConfigError, KvsieveError
from kvsieve.flow import Flow
from kvsieve.integrations.transformers.attention import tag
from kvsieve.integrations.transformers.forward import Forward, new_tokens
from kvsieve.integrations.transformers.layers import PagedLayer, SlidingLayer
from kvsieve.models import IMPLEMENTATION
from kvsieve.paging.table import RequestId
from kvsieve.retention import KEEP, Retention
from kvsieve.runtime import Runtime


class SparseCache(Cache):
    """The cache to pass as ``past_key_values`` to ``generate`` or ``forward``.

    Args:
        config: the model's config; its ``attn_implementation`` must be "kvsieve" when the model runs.
        flow: a flow, or the name of a registered one.
        budget: pages attended per step, for all layers or per layer; None where tokens are evicted.
        page_size: tokens per page; None: the flow's own, else 16.
        skip_layers: layers that stay dense. Sliding-window layers always do, by the model's own rule.
        num_blocks: blocks of the pool, shared by all requests; None: it grows.
        backend: a backend or its name.
        retention: ``Keep()``, or ``Evict(capacity)``: constant memory per row (see :class:`kvsieve.Evict`).

    A forward call with several tokens per row is prefill, dense and exact, whole or in chunks; with one token per row
    on a past it is a decode step. (The one-token remainder of a chunked prompt cannot be told from a step.) Padding is
    never stored, wherever it stands in a row.

    Raises:
        ConfigError: the model, flow, budget or page size cannot be served; says what to use instead.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        flow: Flow | str,
        budget: BudgetLike | None = None,
        page_size: int | None = None,
        skip_layers: Collection[int] = (),
        *,
        num_blocks: int | None = None,
        backend: str | Backend = "eager",
        retention: Retention = KEEP,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise ConfigError(f"config: expected a model's config, received {type(config).__name__}; pass model.config")
        self._config = config.get_text_config(decoder=True)
        layers: list[Any] = []
        for index, layer in enumerate(DynamicCache(config=config).layers):
            if type(layer) is DynamicSlidingWindowLayer:
                layers.append(SlidingLayer(layer.sliding_window))
            elif type(layer) is DynamicLayer:
                layers.append(PagedLayer(index))
            else:
                raise ConfigError(
                    f"layer {index} of {type(config).__name__} needs a {type(layer).__name__}: SparseCache serves "
                    "full-attention and sliding-window layers; use the model's own cache"
                )
        if getattr(self._config, "num_kv_shared_layers", 0):
            raise ConfigError(
                f"{type(config).__name__} shares K and V between layers, which SparseCache does not serve; use the "
                "model's own cache"
            )
        self._paged: dict[int, PagedLayer] = {i: one for i, one in enumerate(layers) if isinstance(one, PagedLayer)}
        self._sliding: list[SlidingLayer] = [one for one in layers if isinstance(one, SlidingLayer)]
        if not self._paged:
            warnings.warn(
                f"every layer of {type(config).__name__} is a sliding window and stays dense: the flow never runs",
                stacklevel=2,
            )
        unknown = sorted(set(skip_layers) - set(self._paged))
        if unknown:
            raise ConfigError(f"skip_layers: expected full-attention layers ({[*self._paged]}), received {unknown}")
        self.runtime = Runtime(
            flow,
            budget,
            page_size=page_size,
            num_blocks=num_blocks,
            dense_layers=skip_layers,
            backend=backend,
            retention=retention,
        )
        self._requests: list[RequestId] = []
        self._seen: torch.Tensor | None = None  # bool [B, L]: which columns of the padded batch hold real tokens
        self._forward: Forward | None = None
        super().__init__(layers=layers)

    @property
    def stats(self) -> ReadStats:
        """What decode steps have read so far, over the paged layers."""
        return self.runtime.stats

    @property
    def lengths(self) -> list[int]:
        """Real tokens per row, evicted ones included."""
        return [self.runtime.length(request) for request in self._requests]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Hand new K and V [B, H, T, D] to the attention function, tagged with what attends them."""
        implementation = getattr(self._config, "_attn_implementation", None)
        if implementation != IMPLEMENTATION:
            raise ConfigError(
                f"SparseCache: expected a model with attn_implementation='{IMPLEMENTATION}', received "
                f"{implementation!r}; call model.set_attn_implementation('{IMPLEMENTATION}')"
            )
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx in self._paged:
            tag(keys, partial(self._paged[layer_idx].attend, self))
        return keys, values

    def graph_runtime(self) -> tuple[Runtime, list[RequestId]]:
        """The runtime and the requests of all rows, for decode steps that a graph runs.

        Raises:
            ConfigError: a cache without a past, or one with sliding-window layers, which grow by themselves.
        """
        if self._sliding:
            raise ConfigError("decode steps in a graph: expected full-attention layers only, received sliding windows")
        if self._seen is None or not all(self.lengths):
            raise ConfigError(
                "decode steps in a graph: expected a cache whose rows all have a past; run the prompt first"
            )
        return self.runtime, list(self._requests)

    def join_step(self, call: Call | None) -> None:
        """A decode step of all rows is under way in ``call``; None: a graph has attended its layers already."""
        assert self._seen is not None
        batch = len(self._requests)
        self._seen = torch.cat([self._seen, torch.ones(batch, 1, dtype=torch.bool)], 1)
        self._forward = None if call is None else Forward((batch, 1), None, call)
        if call is None:
            for layer in self._paged.values():
                layer.length += 1

    def reset(self) -> None:
        """Forget all requests and free their pages; counters and compiled flows stay."""
        self.runtime.finish(self._requests)
        self._requests, self._seen, self._forward = [], None, None
        for layer in (*self._paged.values(), *self._sliding):
            layer.reset()

    def copy_past(self, other: SparseCache) -> None:
        """Begin with the tokens that another cache of the same model holds; flow, budget and page size may differ.

        So one dense prefill serves many flows and budgets. ``other`` stays as it is.

        Raises:
            ConfigError: this cache already holds tokens, or the caches are not of one model.
        """
        if self._seen is not None:
            raise ConfigError("copy_past: expected an empty cache, received one that holds tokens; use reset() first")
        if other._seen is None or [*other._paged] != [*self._paged] or len(other._sliding) != len(self._sliding):
            raise ConfigError("copy_past: expected a cache of the same model that holds tokens; run the prefill first")
        self._requests = self.runtime.adopt(other.runtime, other._requests)
        self._seen, self._forward = other._seen.clone(), None
        for index, layer in self._paged.items():
            layer.length, layer.is_initialized = other._paged[index].length, True
        for sliding, theirs in zip(self._sliding, other._sliding, strict=True):
            vars(sliding).update(copy.deepcopy(vars(theirs)))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row ``i`` continues row ``beam_idx[i]``: full pages are shared, partial ones copied on write."""
        self._pick_rows(beam_idx.tolist())
        for layer in self._sliding:
            layer.reorder_cache(torch.as_tensor(beam_idx, dtype=torch.int64))  # type: ignore[arg-type]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, one after the other."""
        self._pick_rows([row for row in range(len(self._requests)) for _ in range(repeats)])
        for layer in self._sliding:
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only the rows that ``indices`` (places, or a bool mask) names."""
        if self._seen is not None:
            self._pick_rows(torch.arange(len(self._requests))[indices.cpu()].tolist())
        for layer in self._sliding:
            layer.batch_select_indices(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` columns of the padded batch; the number is negative in Transformers.

        Raises:
            NotCroppable: the flow keeps state and they reach further back than its last multi-token call.
            ConfigError: a positive number, more columns than there are, or a sliding window that forgot them.
        """
        length = 0 if self._seen is None else self._seen.shape[1]
        if not isinstance(tokens_to_remove, int) or (self._paged and not -length <= tokens_to_remove <= 0):
            raise ConfigError(f"crop: expected a number of tokens in [{-length}, 0], received {tokens_to_remove!r}")
        if self._seen is not None and tokens_to_remove:
            self._refuse_forgotten()
            seen = self._seen[:, :tokens_to_remove]
            self.runtime.crop(self._requests, seen.sum(1).tolist())
            self._seen, self._forward = seen, None
        for paged in self._paged.values():
            paged.length += tokens_to_remove
        for layer in self._sliding:
            layer.crop(tokens_to_remove)

    def _refuse_forgotten(self) -> None:
        for layer in self._sliding:
            if layer.get_seq_length() >= layer.sliding_window and not layer.record_past:
                raise ConfigError(
                    "crop: a sliding-window layer has dropped older tokens; call cache.activate_past_recording() "
                    "before the forward calls that may be rolled back"
                )

    def _pick_rows(self, rows: list[int]) -> None:
        if self._seen is not None:
            self._requests = self.runtime.reorder(self._requests, rows)
            self._seen, self._forward = self._seen[torch.tensor(rows, dtype=torch.int64)], None

    def forward_of(self, layer: PagedLayer, batch: int, rows: int, mask: torch.Tensor | None) -> Forward:
        """The forward call that a layer's attention belongs to; the first layer of a call opens it."""
        length = 0 if self._seen is None else self._seen.shape[1]
        if self._forward is None or layer.length == length:
            try:
                self._forward = self._open(batch, rows, mask)
            except KvsieveError:
                for sliding in self._sliding:  # those before this layer have stored the tokens that are refused now
                    sliding.forget_from(length)
                raise
        if self._forward.shape != (batch, rows):
            raise ConfigError(f"expected {self._forward.shape} rows and tokens in all layers, received {(batch, rows)}")
        return self._forward

    def _open(self, batch: int, rows: int, mask: torch.Tensor | None) -> Forward:
        seen = torch.zeros(batch, 0, dtype=torch.bool) if self._seen is None else self._seen
        if seen.shape[0] != batch:
            raise ConfigError(
                f"expected the {seen.shape[0]} rows that the cache holds, received {batch}; use cache.reset() or a new "
                "cache"
            )
        new = new_tokens(mask, seen, batch, rows)
        if not self._requests:
            self._requests = [self.runtime.admit() for _ in range(batch)]
        counts = new.sum(1).tolist()
        active = [i for i, count in enumerate(counts) if count]
        late = [i for i in active if rows == 1 and seen.shape[1] and not self.runtime.length(self._requests[i])]
        if late:
            raise ConfigError(
                f"attention_mask: rows {late} were padding until now and begin with a single token, beside rows that "
                "decode; start them with a call of several tokens, or in a cache of their own"
            )
        call = None
        if active:
            requests = [self._requests[i] for i in active]
            if rows == 1 and seen.shape[1]:
                call = self.runtime.step(requests)
            else:
                call = self.runtime.extend(requests, [counts[i] for i in active])
        self._seen = torch.cat([seen, new], 1)
        return Forward((batch, rows), None if bool(new.all()) else new, call)
