"""Attention of one layer inside vLLM."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from kvsieve.backends.base import AttentionOptions
from kvsieve.backends.seeding import seed_mass
from kvsieve.call import DENSE
from kvsieve.errors import ConfigError
from kvsieve.integrations.vllm.cache import CachePool
from kvsieve.integrations.vllm.engine import Engine, engine_for
from kvsieve.integrations.vllm.mass import Prompt, StepMass
from kvsieve.integrations.vllm.plan import Decoding
from kvsieve.integrations.vllm.prefill import ScratchCache
from kvsieve.integrations.vllm.tally import LayerKind
from kvsieve.plan import Quota

if TYPE_CHECKING:
    from kvsieve.integrations.vllm.builder import SieveMetadata

SCRATCH = ScratchCache()
"""Of all layers: they run one after the other."""


class SieveImpl(CPUAttentionBackendImpl):
    """Attention of one layer: vLLM's own where the layer is skipped or slides, else prompts by vLLM's kernel and decode
    steps by the flow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        engine = engine_for(get_current_vllm_config())
        assert engine is not None, "the backend asks for this class only with settings"
        self.engine: Engine = engine
        self._pool: CachePool | None = None
        self._kept: dict[int, torch.Tensor] = {}  # by row: the last prompt queries, where a window of them may count

    def is_sparse(self, name: str) -> bool:
        """Whether the flow decides what this layer's decode steps attend."""
        if self.sliding_window != -1 or self.attn_type != AttentionType.DECODER:
            return False
        return layer_index(name) not in self.engine.settings.skip_layers

    def prepare(self, index: int, state_rows: int, device: torch.device) -> None:
        """Trace the flow for this layer.

        Raises:
            FlowError, ConfigError: the flow breaks a rule, or the backend refuses it.
        """
        self.index, self.state_rows = index, state_rows
        self.budget = self.engine.settings.budget_of(index)
        group = self.num_heads // self.num_kv_heads
        self.graphs, self.flow = self.engine.flow_for(index, self.head_size, group, self.scale, device)

    def kind(self, dtype: torch.dtype) -> LayerKind:
        """How this layer counts, its cache being of a dtype."""
        graphs = self.graphs
        return LayerKind(
            self.budget,
            graphs.score is not None,
            bool(graphs.state_writes),
            self.num_kv_heads,
            2 * self.head_size * dtype.itemsize,
            graphs.score_bytes_per_page(dtype),
        )

    def pool(self, kv_cache: torch.Tensor) -> CachePool:
        """The layer's pages; vLLM may exchange its cache."""
        if self._pool is None or self._pool.rows_of_pages.data_ptr() != kv_cache.data_ptr():
            fields = self.graphs.summary_fields, self.graphs.state_fields
            self._pool = CachePool(kv_cache, self.engine.settings.page_size, *fields, self.state_rows)
        return self._pool

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if self.is_sparse(layer.layer_name):
            self.pool(kv_cache).store(slot_mapping, key, value)
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
        plan, pool, tokens = step.plan, self.pool(kv_cache), step.num_actual_tokens
        assert plan is not None
        q, k, v, out = query[:tokens], key[:tokens], value[:tokens], output[:tokens]
        if len(plan.filled):
            self.engine.backend.summarize(self.flow, pool, plan.filled)
        if plan.entered is not None:
            pool.enter(plan.entered)
        if step.mass is not None:
            self._count_prompts(pool, step.mass, q.unflatten(1, (self.num_kv_heads, -1)))
        if step.prefill is not None:
            _put(out, step.prefill.tokens, step.prefill.attend(self, pool, SCRATCH, q, k, v))
        if plan.decoding is not None:
            rows = plan.decoding.tokens
            asked = (q if rows is None else q[rows]).unflatten(1, (self.num_kv_heads, -1))
            _put(out, rows, self._decode(pool, plan.decoding, asked, step.mass, step.audited == layer.layer_name))
        return output

    def _decode(
        self, pool: CachePool, rows: Decoding, q: torch.Tensor, mass: StepMass | None, audited: bool
    ) -> torch.Tensor:
        """q [R, H, G, D] -> [R, Hq, D]."""
        backend = self.engine.backend
        quota = self._quota(rows)
        scores = None
        if quota.window is not None:
            places = quota.window.requests
            scores = backend.score(self.flow, q if len(places) == len(q) else q[places], pool, quota.window)
        selection = backend.select(scores, quota, pool.num_kv_heads)
        wanted = self.engine.settings.flow.mass
        options = replace(self._options(), mass=wanted if wanted and wanted.update == "steps" else None)
        out, lse, increment = backend.attend(q, pool, rows.rows, selection, options)
        if increment is not None and mass is not None and mass.rows is not None:
            backend.add_mass(pool, rows.rows, mass.rows, selection, increment)
        if audited:
            self._audit(pool, rows, q, lse)
        if self.engine.recorder is not None:
            scales = None if mass is None else mass.scales_after()
            self.engine.recorder.step(self, pool, rows, quota, q, scores, selection, out, lse, scales)
        return out.flatten(1, 2)

    def _quota(self, rows: Decoding) -> Quota:
        return rows.quota(self.budget, self.graphs.score is not None, bool(self.graphs.state_writes))

    def _options(self) -> AttentionOptions:
        sinks = None if self.sinks is None else self.sinks.reshape(self.num_kv_heads, -1)
        return AttentionOptions(self.scale, self.logits_soft_cap or None, sinks)

    def _count_prompts(self, pool: CachePool, mass: StepMass, q: torch.Tensor) -> None:
        """Count or keep the prompt queries of q [T, H, G, D], and count kept ones where decoding begins."""
        wanted = self.engine.settings.flow.mass
        assert wanted is not None
        for prompt in mass.committed:
            self._seed(pool, prompt, self._kept.pop(prompt.row))
        for prompt in mass.prompts:
            asked = q[prompt.tokens]
            if self.engine.recorder is not None:
                self.engine.recorder.prompt(self, pool, prompt.pages, prompt.length, asked)
            if prompt.update is not None:
                self._seed(pool, prompt, asked)
            elif wanted.window is not None:
                earlier = [] if prompt.fresh else [self._kept[prompt.row]]
                self._kept[prompt.row] = torch.cat([*earlier, asked])[-wanted.window :].clone()

    def _seed(self, pool: CachePool, prompt: Prompt, q: torch.Tensor) -> None:
        """Add the attention of consecutive prompt queries [n, H, G, D] to their request's mass."""
        assert prompt.update is not None
        options = replace(self._options(), mass=self.engine.settings.flow.mass)
        seed_mass(self.engine.backend, q, pool, prompt.pages, prompt.rows, prompt.update, options)

    def _audit(self, pool: CachePool, rows: Decoding, q: torch.Tensor, lse: torch.Tensor) -> None:
        """What share of the exact attention the selection held, on average over rows that left pages out."""
        everything = rows.quota(DENSE, False, False)
        pages = self.engine.backend.select(None, everything, pool.num_kv_heads)
        exact = self.engine.backend.attend(q, pool, rows.rows, pages, self._options())[1]
        quota = self._quota(rows)
        held = torch.exp(lse - exact)[quota.pages > quota.count]
        self.engine.counters.add(audits=1, captured=float(held.mean()))


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
