"""Plans a step of vLLM once for all layers of a cache group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, CPUAttentionMetadataBuilder

from kvsieve.integrations.vllm.engine import Engine, engine_for
from kvsieve.integrations.vllm.layer import SieveImpl, layer_index
from kvsieve.integrations.vllm.limits import refuse_block_size, refuse_layer
from kvsieve.integrations.vllm.mass import MassClock, StepMass
from kvsieve.integrations.vllm.meaning import announce, logger
from kvsieve.integrations.vllm.plan import Batch, BatchPlan
from kvsieve.integrations.vllm.prefill import KernelOptions, Prefill
from kvsieve.integrations.vllm.requests import RequestRows
from kvsieve.integrations.vllm.tally import Tally


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
        self.engine = engine_for(vllm_config)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        impls = {name: layer.impl for name, layer in layers.items()}
        self.sparse: dict[str, SieveImpl] = {
            name: impl for name, impl in impls.items() if isinstance(impl, SieveImpl) and impl.is_sparse(name)
        }
        self.dense = len(self.sparse) < len(layer_names)
        self.requests: RequestRows | None = None
        self.clock: MassClock | None = None
        self.tally: Tally | None = None
        if self.engine is not None and self.sparse:
            self._start(self.engine, layers, vllm_config, device)

    def _start(self, engine: Engine, layers: Any, vllm_config: Any, device: torch.device) -> None:
        """Whatever can go wrong with a flow goes wrong here, before the first request."""
        page_size = engine.settings.page_size
        refuse_block_size(page_size, self.block_size)
        rows = 0
        if engine.stateful:
            concurrent = vllm_config.scheduler_config.max_num_seqs * vllm_config.parallel_config.pipeline_parallel_size
            pages = -(-vllm_config.model_config.max_model_len // page_size)
            mass = engine.settings.flow.mass
            seeded = mass is not None and mass.seed != "none"
            self.requests = RequestRows(concurrent, pages, page_size, self.block_size, seeded)
            rows = self.requests.total
            if mass is not None:
                self.clock = MassClock(mass, self.requests.rows, page_size, self.block_size)
        for name, impl in self.sparse.items():
            refuse_layer(name, layers[name])
            impl.prepare(layer_index(name), rows, device)
        self.tally = Tally([impl.kind(self.dtype) for impl in self.sparse.values()], engine.counters)
        announce(engine, self.sparse, layers, rows, self.dtype)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        if self.engine is None or not self.sparse:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = self._metadata(common_prefix_len, common_attn_metadata, fast_build)
        batch = batch_of(common_attn_metadata)
        plan = metadata.plan = BatchPlan(batch, self.engine.settings.page_size, self.block_size)
        if self.requests is not None:
            self._follow(self.requests, batch, metadata)
        if plan.prefilling is not None:
            options = KernelOptions(
                self.num_heads, self.num_kv_heads, self.head_dim, self.block_size, self.dtype, self.isa
            )
            metadata.prefill = Prefill(batch, plan.prefilling, options)
        assert self.tally is not None
        if self.tally.count(plan, len(batch.slots)):
            metadata.audited = self._audited(self.engine)
            if self.engine.counters.sparse_steps == 1:
                logger.info("kvsieve: the first sparse step; from now on longer requests attend a selection")
        return metadata

    def _follow(self, requests: RequestRows, batch: Batch, metadata: SieveMetadata) -> None:
        """Give the step's requests their state, and their mass its decay."""
        plan = metadata.plan
        assert plan is not None
        state = requests.step(batch, plan)
        if state is None:
            return
        plan.entered = state.entered
        if self.clock is not None:
            metadata.mass = self.clock.step(batch, plan, state)
        if plan.decoding is not None:
            plan.decoding.state = state.first[: len(plan.decoding.places)]
            plan.decoding.mass_scale = metadata.mass.scale if metadata.mass else None

    def _metadata(self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool) -> SieveMetadata:
        """vLLM's part; its schedule of dense attention only if some layer needs it."""
        if self.dense:
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

    def _audited(self, engine: Engine) -> str | None:
        """The layer that is audited in this sparse step."""
        every, steps = engine.settings.audit_every, engine.counters.sparse_steps
        return list(self.sparse)[steps // every % len(self.sparse)] if every and steps % every == 0 else None


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
