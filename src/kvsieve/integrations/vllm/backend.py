"""vLLM's CPU attention backend with a decode that a flow decides."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from kvsieve.backends.base import AttentionOptions
from kvsieve.errors import ConfigError
from kvsieve.integrations.vllm.cache import CachePool
from kvsieve.integrations.vllm.engine import Engine, engine_for
from kvsieve.integrations.vllm.plan import Batch, StepPlan
from kvsieve.integrations.vllm.prefill import KernelOptions, Prefill, Scratch


class SieveBackend(CPUAttentionBackend):
    """Stands in for CPU_ATTN; without settings it is CPU_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return CPUAttentionBackendImpl if engine_for(get_current_vllm_config()) is None else SieveImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return SieveBuilder


@dataclass
class SieveMetadata(CPUAttentionMetadata):
    """vLLM's metadata, the step's plan and its dense rows."""

    plan: StepPlan | None = None
    prefill: Prefill | None = None


class SieveBuilder(CPUAttentionMetadataBuilder):
    """Plans a step once for all layers of a group."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.engine = engine_for(vllm_config)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        self.sparse = {name: layer for name, layer in layers.items() if is_sparse(name, layer)}
        self.dense = len(self.sparse) < len(layer_names)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        if self.engine is None or not self.sparse:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        if self.dense:
            metadata = SieveMetadata(**vars(super().build(common_prefix_len, common, fast_build)))
        else:
            metadata = SieveMetadata(
                num_actual_tokens=common.num_actual_tokens,
                max_query_len=common.max_query_len,
                query_start_loc=common.query_start_loc,
                max_seq_len=common.max_seq_len,
                seq_lens=common.seq_lens,
                block_table=common.block_table_tensor,
                slot_mapping=common.slot_mapping,
                scheduler_metadata=None,
            )
        batch = batch_of(common)
        metadata.plan = StepPlan(batch, self.engine.settings.page_size, self.block_size)
        if metadata.plan.prefilling is not None:
            options = KernelOptions(
                self.num_heads, self.num_kv_heads, self.head_dim, self.block_size, self.dtype, self.isa
            )
            metadata.prefill = Prefill(batch, metadata.plan.prefilling, options)
        return metadata


def batch_of(common: CommonAttentionMetadata) -> Batch:
    """What the plan needs of vLLM's metadata."""
    requests = common.num_reqs
    prefilling = common.is_prefilling
    if prefilling is None:
        prefilling = torch.zeros(requests, dtype=torch.bool)
    return Batch(
        common.query_start_loc[: requests + 1],
        common.seq_lens[:requests],
        prefilling[:requests],
        common.block_table_tensor[:requests],
        common.slot_mapping[: common.num_actual_tokens],
    )


class SieveImpl(CPUAttentionBackendImpl):
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        engine = engine_for(get_current_vllm_config())
        assert engine is not None
        self.engine: Engine = engine
        self.pool: CachePool | None = None

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if not is_sparse(layer.layer_name, layer):
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        self._pool(layer, kv_cache).store(slot_mapping, key, value)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None or not is_sparse(layer.layer_name, layer):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        assert isinstance(attn_metadata, SieveMetadata) and attn_metadata.plan is not None
        pool, plan, tokens = self._pool(layer, kv_cache), attn_metadata.plan, attn_metadata.num_actual_tokens
        q, k, v, out = query[:tokens], key[:tokens], value[:tokens], output[:tokens]
        self.engine.backend.summarize(self.flow, pool, plan.filled)
        if attn_metadata.prefill is not None:
            prefill = attn_metadata.prefill
            _put(out, prefill.tokens, prefill.attend(self, pool, SCRATCH, q, k, v))
        if plan.decoding is not None:
            rows = plan.decoding.tokens
            asked = q if rows is None else q[rows]
            _put(out, rows, self._decode(pool, plan, asked.unflatten(1, (self.num_kv_heads, -1))))
        return output

    def _decode(self, pool: CachePool, plan: StepPlan, q: torch.Tensor) -> torch.Tensor:
        """q [R, H, G, D] -> [R, Hq, D]."""
        backend, rows = self.engine.backend, plan.decoding
        assert rows is not None
        quota = rows.quota(self.budget, self.graphs.score is not None, bool(self.graphs.state_writes))
        scores = None
        if quota.window is not None:
            places = quota.window.requests
            scores = backend.score(self.flow, q if len(places) == len(q) else q[places], pool, quota.window)
        selection = backend.select(scores, quota, pool.num_kv_heads)
        sinks = None if self.sinks is None else self.sinks.reshape(self.num_kv_heads, -1)
        options = AttentionOptions(self.scale, self.logits_soft_cap or None, sinks)
        return backend.attend(q, pool, rows.rows, selection, options)[0].flatten(1, 2)

    def _pool(self, layer: Any, kv_cache: torch.Tensor) -> CachePool:
        if self.pool is None or self.pool.rows_of_pages.data_ptr() != kv_cache.data_ptr():
            index = layer_index(layer.layer_name)
            self.budget = self.engine.settings.budget_of(index)
            self.graphs, self.flow = self.engine.flow_for(
                index, self.head_size, self.num_heads // self.num_kv_heads, self.scale, kv_cache.device
            )
            self.pool = CachePool(kv_cache, self.engine.settings.page_size, self.graphs.summary_fields)
        return self.pool


SCRATCH = Scratch()


def _put(output: torch.Tensor, rows: torch.Tensor | None, values: torch.Tensor) -> None:
    if rows is None:
        output.copy_(values)
    else:
        output[rows] = values


def layer_index(name: str) -> int:
    """The number in a layer's name, such as 5 of ``model.layers.5.self_attn.attn``.

    Raises:
        ConfigError: there is none, or more than one.
    """
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    if len(numbers) != 1:
        raise ConfigError(f"layer {name!r}: expected one layer number in its name, received {numbers}")
    return int(numbers[0])


def is_sparse(name: str, layer: Any) -> bool:
    """Whether a flow decides what a layer's decode steps attend."""
    impl = layer.impl
    if not isinstance(impl, SieveImpl) or impl.sliding_window != -1 or impl.attn_type != AttentionType.DECODER:
        return False
    return layer_index(name) not in impl.engine.settings.skip_layers
