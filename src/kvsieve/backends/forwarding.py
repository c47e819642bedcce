"""A backend around another one: checks and measurements change one method and leave the rest as it is."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.backends.base import AttentionOptions, Backend, Increment, Selection
from kvsieve.graph import FlowGraphs
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.slots import Trim
from kvsieve.plan import MassRows, Quota, Rows, Writes
from kvsieve.window import Window


class ForwardingBackend(Backend):
    """Does what ``inner`` does."""

    def __init__(self, inner: Backend) -> None:
        self.inner, self.name, self.page_major = inner, inner.name, inner.page_major

    def kernels(self, pool: LayerPool) -> dict[str, str]:
        return self.inner.kernels(pool)

    def refusal(self, graphs: FlowGraphs) -> str | None:
        return self.inner.refusal(graphs)

    def check_device(self, device: torch.device) -> None:
        self.inner.check_device(device)

    def prepare(self, graphs: FlowGraphs, device: torch.device) -> Any:
        return self.inner.prepare(graphs, device)

    def enter(self, pool: LayerPool, rows: torch.Tensor) -> None:
        self.inner.enter(pool, rows)

    def write(self, pool: LayerPool, writes: Writes, k: torch.Tensor, v: torch.Tensor) -> None:
        self.inner.write(pool, writes, k, v)

    def trim(self, pool: LayerPool, one: Trim) -> None:
        self.inner.trim(pool, one)

    def summarize(self, flow: Any, pool: LayerPool, blocks: torch.Tensor) -> None:
        self.inner.summarize(flow, pool, blocks)

    def score(self, flow: Any, q: torch.Tensor, pool: LayerPool, window: Window) -> torch.Tensor:
        return self.inner.score(flow, q, pool, window)

    def select(self, scores: torch.Tensor | None, quota: Quota, heads: int) -> Selection:
        return self.inner.select(scores, quota, heads)

    def attend(
        self, q: torch.Tensor, pool: LayerPool, rows: Rows, selection: Selection, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor, Increment | None]:
        return self.inner.attend(q, pool, rows, selection, options)

    def add_mass(self, pool: LayerPool, rows: Rows, mass: MassRows, selection: Selection, increment: Increment) -> None:
        self.inner.add_mass(pool, rows, mass, selection, increment)

    def prompt_mass(
        self, q: torch.Tensor, pool: LayerPool, blocks: torch.Tensor, first: int, options: AttentionOptions
    ) -> torch.Tensor:
        return self.inner.prompt_mass(q, pool, blocks, first, options)

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: LayerPool, rows: Rows, options: AttentionOptions
    ) -> torch.Tensor:
        return self.inner.prefill(q, k, v, pool, rows, options)


class ScoringBy(ForwardingBackend):
    """Does what ``inner`` does, and summarizes and scores as ``scoring`` does."""

    def __init__(self, inner: Backend, scoring: Backend, name: str) -> None:
        super().__init__(inner)
        self.scoring, self.name = scoring, name

    def kernels(self, pool: LayerPool) -> dict[str, str]:
        theirs = self.scoring.kernels(pool)
        return self.inner.kernels(pool) | {phase: theirs[phase] for phase in ("summarize", "score")}

    def refusal(self, graphs: FlowGraphs) -> str | None:
        return self.scoring.refusal(graphs)

    def prepare(self, graphs: FlowGraphs, device: torch.device) -> Any:
        return self.scoring.prepare(graphs, device)

    def summarize(self, flow: Any, pool: LayerPool, blocks: torch.Tensor) -> None:
        self.scoring.summarize(flow, pool, blocks)

    def score(self, flow: Any, q: torch.Tensor, pool: LayerPool, window: Window) -> torch.Tensor:
        return self.scoring.score(flow, q, pool, window)
