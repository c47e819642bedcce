"""What a flow does in one layer of a vLLM engine, whichever kernels of vLLM do the rest. Nothing here needs vLLM."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch

from kvsieve.backends.base import AttentionOptions
from kvsieve.backends.seeding import seed_mass
from kvsieve.call import DENSE
from kvsieve.errors import ConfigError
from kvsieve.integrations.vllm.cache import PagePool
from kvsieve.integrations.vllm.engine import Engine
from kvsieve.integrations.vllm.fixed import FixedDecoding
from kvsieve.integrations.vllm.mass import Prompt, StepMass
from kvsieve.integrations.vllm.plan import Decoding
from kvsieve.integrations.vllm.requests import RequestRows
from kvsieve.integrations.vllm.tally import LayerKind
from kvsieve.plan import Quota

NO_WINDOW = (-1, (-1, -1))
"""How vLLM's implementations say that a layer does not slide."""


class FlowLayer(ABC):
    """Mixed into vLLM's attention implementation of a platform, which has these attributes."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: Any
    attn_type: Any
    logits_soft_cap: float | None
    sinks: torch.Tensor | None

    engine: Engine
    _pool: PagePool | None = None
    _place: object = None

    def join(self, engine: Engine | None) -> None:
        """Become a layer of an engine."""
        assert engine is not None, "the backend asks for this class only with settings"
        self.engine = engine
        self._kept: dict[int, torch.Tensor] = {}  # by row: the last prompt queries, where a window of them may count

    def is_sparse(self, name: str) -> bool:
        """Whether the flow decides what this layer's decode steps attend."""
        if self.sliding_window not in NO_WINDOW or self.attn_type != "decoder":
            return False
        return layer_index(name) not in self.engine.settings.skip_layers

    def prepare(self, index: int, requests: RequestRows | None, device: torch.device) -> None:
        """Trace the flow for this layer; ``requests`` have state, if there are any.

        Raises:
            FlowError, ConfigError: the flow breaks a rule, or the backend refuses it.
        """
        self.index, self.state_rows = index, 0 if requests is None else requests.total
        self._request_rows = 0 if requests is None else requests.rows
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

    def side_bytes(self, pages: int, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of the summaries of so many pages; of all rows of state, kept prompt queries among them."""
        summaries = self.num_kv_heads * sum(spec.bytes(dtype) for spec in self.graphs.summary_fields.values())
        state = self.num_kv_heads * sum(spec.bytes(dtype) for spec in self.graphs.state_fields.values())
        mass = self.engine.settings.flow.mass
        kept = mass.window or 0 if mass is not None and mass.seed != "none" else 0
        queries = kept * self.num_heads * self.head_size * dtype.itemsize
        return pages * summaries, self.state_rows * state + self._request_rows * queries

    def pool(self, kv_cache: torch.Tensor) -> PagePool:
        """The layer's pages; vLLM may exchange its cache, and put a larger one where a small one was."""
        place = kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride()
        if self._pool is None or self._place != place:
            self._pool, self._place = self._new_pool(kv_cache), place
        return self._pool

    @abstractmethod
    def _new_pool(self, kv_cache: torch.Tensor) -> PagePool:
        """Views of the layer's cache, and room for its side fields."""

    def begin(self, pool: PagePool, filled: torch.Tensor, entered: torch.Tensor | None) -> None:
        """The step's tokens are stored: summarize the pages that they fill, and start the state of new pages."""
        if len(filled):
            self.engine.backend.summarize(self.flow, pool, filled)
        if entered is not None:
            self.engine.backend.enter(pool, entered)

    def decode(
        self, pool: PagePool, rows: Decoding | FixedDecoding, q: torch.Tensor, mass: StepMass | None, audited: bool
    ) -> torch.Tensor:
        """A decode step of rows whose tokens are stored: q [R, H, G, D] -> [R, Hq, D]."""
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

    def _quota(self, rows: Decoding | FixedDecoding) -> Quota:
        return rows.quota(self.budget, self.graphs.score is not None, bool(self.graphs.state_writes))

    def _options(self) -> AttentionOptions:
        sinks = None if self.sinks is None else self.sinks.reshape(self.num_kv_heads, -1)
        return AttentionOptions(self.scale, self.logits_soft_cap or None, sinks)

    def count_prompts(self, pool: PagePool, mass: StepMass, q: torch.Tensor) -> None:
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
                earlier = self._kept.pop(prompt.row, asked[:0])
                asked = asked[-wanted.window :]
                both = torch.cat([asked[:0] if prompt.fresh else earlier, asked])
                self._kept[prompt.row] = both[-wanted.window :].clone()

    def _seed(self, pool: PagePool, prompt: Prompt, q: torch.Tensor) -> None:
        """Add the attention of consecutive prompt queries [n, H, G, D] to their request's mass."""
        assert prompt.update is not None
        options = replace(self._options(), mass=self.engine.settings.flow.mass)
        seed_mass(self.engine.backend, q, pool, prompt.pages, prompt.rows, prompt.update, options)

    def _audit(self, pool: PagePool, rows: Decoding | FixedDecoding, q: torch.Tensor, lse: torch.Tensor) -> None:
        """What share of the exact attention the selection held, on average over rows that left pages out."""
        everything = rows.quota(DENSE, False, False)
        pages = self.engine.backend.select(None, everything, pool.num_kv_heads)
        exact = self.engine.backend.attend(q, pool, rows.rows, pages, self._options())[1]
        quota = self._quota(rows)
        held = torch.exp(lse - exact)[quota.pages > quota.count]
        if held.numel():  # budgets differ: this layer may attend everything where another does not
            self.engine.counters.add(audits=1, captured=float(held.mean()))


def layer_index(name: str) -> int:
    """The number in a layer's name, such as 5 of ``model.layers.5.self_attn.attn``.

    Raises:
        ConfigError: there is none, or more than one.
    """
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    if len(numbers) != 1:
        raise ConfigError(f"layer {name!r}: expected one layer number in its name, received {numbers}")
    return int(numbers[0])
