"""vLLM's FlashAttention backend, with decode steps that a flow decides: ``--attention-backend CUSTOM``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from kvsieve.integrations.vllm.engine import engine_for
from kvsieve.integrations.vllm.group import LayerGroup, refuse_what_does_not_fit
from kvsieve.integrations.vllm.limits import refuse_audit
from kvsieve.integrations.vllm.planner import Facts, Step, StepPlanner
from kvsieve.integrations.vllm.tokenmajor import TokenMajorLayer
from kvsieve.integrations.vllm.versions import (
    cache_of,
    captures_decode_steps,
    facts_of,
    leave_out_what_reuses_metadata,
    most_rows,
)


@dataclass
class SieveFlashMetadata(FlashAttentionMetadata):
    """vLLM's metadata of the whole batch, the flow's step, and vLLM's metadata of the rows that it attends itself in
    the flow's layers, if any."""

    step: Step | None = None
    others: FlashAttentionMetadata | None = None


class SieveFlashBuilder(FlashAttentionMetadataBuilder):
    """vLLM's builder, which also plans what the flow's layers do."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        theirs = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        engine = engine_for(vllm_config)
        if engine is None:
            return theirs
        support = AttentionCGSupport
        mine = support.UNIFORM_SINGLE_TOKEN_DECODE if engine.capturable else support.NEVER
        return min(theirs, mine, key=lambda one: one.value)

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        block_size, engine = kv_cache_spec.block_size, engine_for(vllm_config)
        self.group = LayerGroup(engine, self.layers, vllm_config, block_size, kv_cache_spec.dtype, device)
        self.planner: StepPlanner | None = None
        if self.group.engine is not None:
            leave_out_what_reuses_metadata(self)
            if device.type == "cuda":
                memory = torch.cuda.get_device_properties(device).total_memory
                refuse_what_does_not_fit(self.group, vllm_config.cache_config, kv_cache_spec.dtype, memory)
            graphs = captures_decode_steps(vllm_config) and self.group.engine.capturable
            refuse_audit(self.group.engine.settings, graphs)
            tokens = vllm_config.model_config.max_model_len
            self.planner = StepPlanner(self.group, most_rows(vllm_config), tokens, block_size, graphs, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        if self.planner is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        facts = facts_of(common_attn_metadata)
        return self._metadata(common_attn_metadata, facts, self.planner.step(facts), fast_build)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> FlashAttentionMetadata:
        facts = facts_of(common_attn_metadata)
        if self.planner is None or not (self.planner.graphs and facts.single):
            return super().build_for_cudagraph_capture(common_attn_metadata)
        for name, impl in self.group.sparse.items():
            cache = cache_of(self.layers[name])
            if cache is not None:
                impl.pool(cache)  # what a graph allocates is the graph's
        return self._metadata(common_attn_metadata, facts, self.planner.captured(facts), False)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Asked in 0.26: prompts that share a prefix may attend it together, all rows of a step or none."""
        return self.planner is None and bool(super().use_cascade_attention(*args, **kwargs))

    def _metadata(self, common: Any, facts: Facts, step: Step, fast_build: bool) -> SieveFlashMetadata:
        others = None
        if step.dense is not None and step.dense is not facts.lengths:
            others = super().build(0, common.replace(seq_lens=step.dense), fast_build)
            if others.scheduler_metadata is not None:  # the next build may write to the same memory
                others.scheduler_metadata = others.scheduler_metadata.clone()
        all_rows = self.group.dense or step.dense is facts.lengths
        metadata = SieveFlashMetadata(**vars(super().build(0, common, fast_build or not all_rows)))
        metadata.step, metadata.others = step, metadata if step.dense is facts.lengths else others
        return metadata


class SieveFlashImpl(TokenMajorLayer, FlashAttentionImpl):
    """Attention of one layer: vLLM's own where the layer is skipped or slides, else decode steps by the flow, and all
    other rows by FlashAttention. vLLM stores the tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.join(engine_for(get_current_vllm_config()))

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        *more: Any,
        **options: Any,
    ) -> torch.Tensor:
        inputs = layer, query, key, value, kv_cache
        if attn_metadata is None or not self.is_sparse(layer.layer_name):
            dense: torch.Tensor = super().forward(*inputs, attn_metadata, output, *more, **options)
            return dense
        metadata: SieveFlashMetadata = attn_metadata
        step, tokens = metadata.step, metadata.num_actual_tokens
        assert step is not None
        pool = self.prepare_step(kv_cache, step, query[:tokens])
        if metadata.others is not None:
            super().forward(*inputs, metadata.others, output, *more, **options)
        self.decode_step(pool, step, layer.layer_name, query[:tokens], output[:tokens])
        return output


class SieveFlashBackend(FlashAttentionBackend):
    """CUSTOM: FlashAttention, and with settings the flow's decode steps."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        config = get_current_vllm_config_or_none()  # vLLM also asks where none is set, to see what the class can do
        return FlashAttentionImpl if config is None or engine_for(config) is None else SieveFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return SieveFlashBuilder
