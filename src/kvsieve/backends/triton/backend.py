"""The Triton backend: scoring by kernels that are generated from the flow, the rest by hand-written ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvsieve.backends.attention import prefill_requests
from kvsieve.backends.base import PHASES, AttentionOptions, Backend, Selection, Tuning
from kvsieve.backends.triton.attend import attend
from kvsieve.backends.triton.evict import MOST_SLOTS, evict_one
from kvsieve.backends.triton.generate import (
    Refused,
    ScoreProgram,
    SummarizeProgram,
    generate_score,
    generate_summarize,
)
from kvsieve.backends.triton.launch import INTERPRETED
from kvsieve.backends.triton.seed import prompt_mass
from kvsieve.backends.triton.select import select
from kvsieve.backends.triton.store import Logits, add_mass, enter, rebase, write
from kvsieve.errors import ConfigError
from kvsieve.graph import FlowGraphs
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.slots import Trim
from kvsieve.plan import MassRows, Quota, Rows, Writes
from kvsieve.window import Window


@dataclass(frozen=True)
class GeneratedFlow:
    """A flow's kernels."""

    summarize: SummarizeProgram | None
    score: ScoreProgram | None


class TritonBackend(Backend):
    """Runs on a CUDA GPU; with ``TRITON_INTERPRET=1`` on the CPU, for tests. A flow is refused if no kernel can be
    generated for it."""

    name = "triton"
    page_major = True

    def kernels(self, pool: LayerPool) -> dict[str, str]:
        generated = dict.fromkeys(("summarize", "score"), "Triton, generated from the flow")
        return dict.fromkeys(PHASES, "Triton") | generated

    def check_device(self, device: torch.device) -> None:
        if device.type != "cuda" and not INTERPRETED:
            raise ConfigError(
                f"backend {self.name}: expected tensors on a CUDA device, received {device}; use backend compiled there"
            )

    def refusal(self, graphs: FlowGraphs) -> str | None:
        try:
            _generated(graphs)
        except Refused as reason:
            return f"no kernel is generated for it: {reason}; backend triton+compiled runs it"
        return None

    def prepare(self, graphs: FlowGraphs, device: torch.device) -> GeneratedFlow:
        return _generated(graphs)

    def enter(self, pool: LayerPool, rows: torch.Tensor) -> None:
        enter(pool, rows)

    def write(self, pool: LayerPool, writes: Writes, k: torch.Tensor, v: torch.Tensor) -> None:
        write(pool, writes, k, v)

    def store(self, flow: Any, pool: LayerPool, writes: Writes, k: torch.Tensor, v: torch.Tensor) -> None:
        summarize = None if flow is None else flow.summarize
        if summarize is None or not writes.step or writes.slots is not None or not len(writes.filled):
            super().store(flow, pool, writes, k, v)
        else:
            summarize.store(pool, writes, k, v)

    def trim(self, pool: LayerPool, one: Trim) -> None:
        if one.stored == one.kept + 1 and one.stored <= MOST_SLOTS:
            evict_one(pool, one)
        else:  # once a prompt
            super().trim(pool, one)

    def summarize(self, flow: GeneratedFlow, pool: LayerPool, blocks: torch.Tensor) -> None:
        if flow.summarize is not None:
            flow.summarize.run(pool, blocks)

    def score(self, flow: GeneratedFlow, q: torch.Tensor, pool: LayerPool, window: Window) -> torch.Tensor:
        assert flow.score is not None
        return flow.score.run(q, pool, window)

    def tune(
        self,
        flow: GeneratedFlow,
        q: torch.Tensor,
        pool: LayerPool,
        window: Window | None,
        blocks: torch.Tensor,
        seconds: Callable[[str], float | None],
    ) -> tuple[Tuning, ...]:
        found = []
        if flow.summarize is not None:
            found.append(flow.summarize.tune(pool, blocks, lambda: seconds("summarize")))
        if flow.score is not None and window is not None:
            found.append(flow.score.tune(q, pool, window, lambda: seconds("score")))
        return tuple(found)

    def select(self, scores: torch.Tensor | None, quota: Quota, heads: int) -> Selection:
        return select(scores, quota, heads)

    def attend(
        self, q: torch.Tensor, pool: LayerPool, rows: Rows, selection: Selection, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor, Logits | None]:
        out, lse, raw = attend(q, pool, rows, selection, options)
        if raw is None or options.mass is None:
            return out, lse, None
        return out, lse, Logits(raw, lse, options.mass.group)

    @staticmethod
    def rebase(pool: LayerPool, rows: Rows, mass: MassRows) -> None:
        rebase(pool, rows, mass)

    def add_mass(self, pool: LayerPool, rows: Rows, mass: MassRows, selection: Selection, increment: Logits) -> None:
        self.rebase(pool, rows, mass)
        add_mass(pool, rows, mass, selection, increment)

    def prompt_mass(
        self, q: torch.Tensor, pool: LayerPool, blocks: torch.Tensor, first: int, options: AttentionOptions
    ) -> torch.Tensor:
        return prompt_mass(q, pool, blocks, first, options)

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: LayerPool, rows: Rows, options: AttentionOptions
    ) -> torch.Tensor:
        return prefill_requests(q, k, v, pool, rows, options)


def _generated(graphs: FlowGraphs) -> GeneratedFlow:
    return GeneratedFlow(
        generate_summarize(graphs) if graphs.summarize is not None else None,
        generate_score(graphs) if graphs.score is not None else None,
    )
