"""Plans a step of vLLM once for all layers of a cache group: what does not depend on vLLM's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvsieve.integrations.vllm.engine import Engine
from kvsieve.integrations.vllm.flowlayer import FlowLayer, layer_index
from kvsieve.integrations.vllm.limits import refuse_block_size, refuse_layer, refuse_memory
from kvsieve.integrations.vllm.mass import MassClock, StepMass
from kvsieve.integrations.vllm.meaning import announce, logger
from kvsieve.integrations.vllm.plan import Batch, BatchPlan
from kvsieve.integrations.vllm.requests import RequestRows
from kvsieve.integrations.vllm.tally import Tally


class LayerGroup:
    """Layers of an engine that share their metadata, those of them that run the flow (``sparse``), and whose state is
    whose.

    Whatever can go wrong with a flow goes wrong here, before the first request.

    Args:
        layers: vLLM's, by name.

    Raises:
        ConfigError: a layer that the flow cannot run on, pages that do not divide the blocks.
    """

    def __init__(
        self,
        engine: Engine | None,
        layers: Mapping[str, Any],
        vllm_config: Any,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._engine = engine
        impls = {name: layer.impl for name, layer in layers.items()}
        self.sparse: dict[str, FlowLayer] = {
            name: impl for name, impl in impls.items() if isinstance(impl, FlowLayer) and impl.is_sparse(name)
        }
        self.dense = len(self.sparse) < len(layers)
        self.requests: RequestRows | None = None
        self.clock: MassClock | None = None
        if engine is None or not self.sparse:
            return
        page_size = engine.settings.page_size
        refuse_block_size(page_size, block_size)
        if engine.stateful:
            self._follow_requests(engine, vllm_config, block_size)
        for name, impl in self.sparse.items():
            refuse_layer(name, layers[name])
            impl.prepare(layer_index(name), self.requests, device)
        self._tally = Tally([impl.kind(dtype) for impl in self.sparse.values()], engine.counters)
        announce(engine, self.sparse, len(layers), dtype)

    @property
    def engine(self) -> Engine | None:
        """The engine, if some layer runs its flow."""
        return self._engine if self.sparse else None

    def side_bytes(self, pages: int, dtype: torch.dtype) -> int:
        """Bytes of the summaries of so many pages and of all state, in all layers."""
        return sum(sum(impl.side_bytes(pages, dtype)) for impl in self.sparse.values())

    def _follow_requests(self, engine: Engine, vllm_config: Any, block_size: int) -> None:
        """Count the rows of state that requests may have."""
        page_size, mass = engine.settings.page_size, engine.settings.flow.mass
        concurrent = vllm_config.scheduler_config.max_num_seqs * vllm_config.parallel_config.pipeline_parallel_size
        pages = -(-vllm_config.model_config.max_model_len // page_size)
        seeded = mass is not None and mass.seed != "none"
        self.requests = RequestRows(concurrent, pages, page_size, block_size, seeded)
        if mass is not None:
            self.clock = MassClock(mass, self.requests.rows, page_size, block_size)

    def follow(self, batch: Batch, plan: BatchPlan) -> StepMass | None:
        """Give the step's requests their state, and their mass its decay; without state do nothing."""
        state = self.requests.step(batch, plan) if self.requests is not None else None
        if state is None:
            return None
        plan.entered = state.entered
        mass = self.clock.step(batch, plan, state) if self.clock is not None else None
        if plan.decoding is not None:
            plan.decoding.state = state.first[: len(plan.decoding.places)]
            plan.decoding.mass_scale = mass.scale if mass else None
        return mass

    def count(self, plan: BatchPlan, tokens: int) -> str | None:
        """Count a step of so many tokens; the layer that is audited in it, if any."""
        engine = self.engine
        assert engine is not None
        if not self._tally.count(plan, tokens):
            return None
        every, steps = engine.settings.audit_every, engine.counters.sparse_steps
        if steps == 1:
            logger.info("kvsieve: the first sparse step; from now on longer requests attend a selection")
        return list(self.sparse)[steps // every % len(self.sparse)] if every and steps % every == 0 else None


def refuse_what_does_not_fit(group: LayerGroup, cache_config: Any, dtype: torch.dtype, memory: int) -> None:
    """Refuse summaries and state that do not fit beside what vLLM takes of a GPU's memory, in bytes.

    Raises:
        ConfigError: with what there is, what is needed and the remedy.
    """
    assert group.engine is not None
    if getattr(cache_config, "kv_cache_memory_bytes", None):
        return  # the user has decided what vLLM takes
    blocks = cache_config.num_gpu_blocks or 0  # not known yet where vLLM only tries
    pages = blocks * cache_config.block_size // group.engine.settings.page_size
    refuse_memory(group.side_bytes(pages, dtype), memory, cache_config.gpu_memory_utilization)
