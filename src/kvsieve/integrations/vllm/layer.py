"""Attention of one layer inside vLLM on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from kvsieve.integrations.vllm.cache import CachePool
from kvsieve.integrations.vllm.engine import engine_for
from kvsieve.integrations.vllm.flowlayer import FlowLayer
from kvsieve.integrations.vllm.prefill import ScratchCache

if TYPE_CHECKING:
    from kvsieve.integrations.vllm.builder import SieveMetadata

SCRATCH = ScratchCache()
"""Of all layers: they run one after the other."""


class SieveImpl(FlowLayer, CPUAttentionBackendImpl):
    """Attention of one layer: vLLM's own where the layer is skipped or slides, else prompts by vLLM's kernel and decode
    steps by the flow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.join(engine_for(get_current_vllm_config()))

    def _new_pool(self, kv_cache: torch.Tensor) -> CachePool:
        fields = self.graphs.summary_fields, self.graphs.state_fields
        return CachePool(kv_cache, self.engine.settings.page_size, *fields, self.state_rows)

    def _cache(self, kv_cache: torch.Tensor) -> CachePool:
        pool = self.pool(kv_cache)
        assert isinstance(pool, CachePool)
        return pool

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if self.is_sparse(layer.layer_name):
            self._cache(kv_cache).store(slot_mapping, key, value)
        else:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

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
        if attn_metadata is None or not self.is_sparse(layer.layer_name):
            dense: torch.Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
            return dense
        step: SieveMetadata = attn_metadata
        plan, pool, tokens = step.plan, self._cache(kv_cache), step.num_actual_tokens
        assert plan is not None
        q, k, v, out = query[:tokens], key[:tokens], value[:tokens], output[:tokens]
        self.begin(pool, plan.filled, plan.entered)
        if step.mass is not None:
            self.count_prompts(pool, step.mass, q.unflatten(1, (self.num_kv_heads, -1)))
        if step.prefill is not None:
            _put(out, step.prefill.tokens, step.prefill.attend(self, pool, SCRATCH, q, k, v))
        if plan.decoding is not None:
            rows = plan.decoding.tokens
            asked = (q if rows is None else q[rows]).unflatten(1, (self.num_kv_heads, -1))
            _put(out, rows, self.decode(pool, plan.decoding, asked, step.mass, step.audited == layer.layer_name))
        return output


def _put(output: torch.Tensor, rows: torch.Tensor | None, values: torch.Tensor) -> None:
    if rows is None:
        output.copy_(values)
    else:
        output[rows] = values
