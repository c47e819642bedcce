"""Plans a step of vLLM on a CPU once for all layers of a cache group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, CPUAttentionMetadataBuilder

from kvsieve.integrations.vllm.engine import engine_for
from kvsieve.integrations.vllm.group import LayerGroup
from kvsieve.integrations.vllm.mass import StepMass
from kvsieve.integrations.vllm.plan import Batch, BatchPlan
from kvsieve.integrations.vllm.prefill import KernelOptions, Prefill


@dataclass
class SieveMetadata(CPUAttentionMetadata):
    """vLLM's metadata with the step's plan, its dense rows, the layer that is audited in this step, if any, and what
    the step does to attention mass."""

    plan: BatchPlan | None = None
    prefill: Prefill | None = None
    audited: str | None = None
    mass: StepMass | None = None


class SieveBuilder(CPUAttentionMetadataBuilder):
    """vLLM's builder, which also plans what the flow's layers do."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        self.group = LayerGroup(engine_for(vllm_config), layers, vllm_config, self.block_size, self.dtype, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        engine = self.group.engine
        if engine is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = self._metadata(common_prefix_len, common_attn_metadata, fast_build)
        batch = batch_of(common_attn_metadata)
        plan = metadata.plan = BatchPlan(batch, engine.settings.page_size, self.block_size)
        metadata.mass = self.group.follow(batch, plan)
        if plan.prefilling is not None:
            options = KernelOptions(
                self.num_heads, self.num_kv_heads, self.head_dim, self.block_size, self.dtype, self.isa
            )
            metadata.prefill = Prefill(batch, plan.prefilling, options)
        metadata.audited = self.group.count(plan, len(batch.slots))
        return metadata

    def _metadata(self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool) -> SieveMetadata:
        """vLLM's part; its schedule of dense attention only if some layer needs it."""
        if self.group.dense:
            return SieveMetadata(**vars(super().build(common_prefix_len, common, fast_build)))
        return SieveMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
        )


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
