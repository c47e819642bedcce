"""The compiled backend on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvsieve.backends.attention import attend_selected, prefill_requests, prompt_mass
from kvsieve.backends.base import AttentionOptions, Backend, Selection
from kvsieve.backends.compiled import native
from kvsieve.backends.compiled.build import load_kernels
from kvsieve.backends.compiled.graph import CompiledProgram, compile_program
from kvsieve.backends.select import select_pages
from kvsieve.graph import FlowGraphs
from kvsieve.lower import lower
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.slots import Trim, occupy
from kvsieve.plan import MassRows, Quota, Rows, Writes
from kvsieve.window import Window

SEGMENT_FIELDS = ("valid", "blocks", "rows", "position", "age", "mass_scale")


@dataclass(frozen=True)
class CompiledFlow:
    """A flow's programs, each with its gather and its stores."""

    summarize: CompiledProgram | None
    score: CompiledProgram | None


class CompiledBackend(Backend):
    """Runs every flow that traces. A flow is compiled when it first runs; torch keeps the result on disk.

    On a CPU, attention, selection and storing are C++ kernels (built at first use); elsewhere they are PyTorch ops.
    """

    name = "compiled"

    def kernels(self, pool: LayerPool) -> dict[str, str]:
        names = {**super().kernels(pool), **dict.fromkeys(("summarize", "score"), "torch.compile (inductor)")}
        if _is_native(pool):
            found = ("select", "attend", "mass", *(("write",) if _is_head_major(pool) else ()))
            names |= {phase: f"C++ kvsieve_{phase}" for phase in found}
        return names

    def refusal(self, graphs: FlowGraphs) -> str | None:
        return None

    def prepare(self, graphs: FlowGraphs, device: torch.device) -> CompiledFlow:
        if device.type == "cpu":
            load_kernels()  # without a compiler the user hears it here, before anything is stored
        summarize = score = None
        if graphs.summarize is not None:
            stored = dict.fromkeys(graphs.summary_fields, "blocks")
            summarize = compile_program(lower(graphs.summarize), ("k", "v"), (), stored, device, 1)
        if graphs.score is not None:
            by_block = ("k", "v", *graphs.summary_fields)
            stored = dict.fromkeys(graphs.state_writes, "rows")
            score = compile_program(lower(graphs.score), by_block, tuple(graphs.state_fields), stored, device, 2)
        return CompiledFlow(summarize, score)

    def write(self, pool: LayerPool, writes: Writes, k: torch.Tensor, v: torch.Tensor) -> None:
        if _is_head_major(pool):
            native.write(pool, writes, k, v)
            if writes.slots is not None:
                occupy(pool, *writes.slots)
        else:
            super().write(pool, writes, k, v)

    def trim(self, pool: LayerPool, one: Trim) -> None:
        if _is_head_major(pool):
            native.trim(pool, one)
        else:
            super().trim(pool, one)

    def summarize(self, flow: CompiledFlow, pool: LayerPool, blocks: torch.Tensor) -> None:
        if flow.summarize is None or not len(blocks):
            return
        index = pool.places(blocks, pool.k.shape[1]).flatten()
        valid = torch.ones(len(index), 1, dtype=torch.bool, device=blocks.device)
        flow.summarize(lambda name: valid if name == "valid" else index if name == "blocks" else storage(pool, name))

    def score(self, flow: CompiledFlow, q: torch.Tensor, pool: LayerPool, window: Window) -> torch.Tensor:
        assert flow.score is not None
        batch, heads = q.shape[:2]
        flat = window.by_segment(pool)
        queries = q.transpose(0, 1).reshape(heads * batch, *q.shape[2:]).contiguous()
        queries = queries.clone() if queries.is_inference() else queries  # guarded on, and compiled apart

        def find(name: str) -> torch.Tensor:
            if name == "q":
                return queries
            return getattr(flat, name) if name in SEGMENT_FIELDS else storage(pool, name)

        (scores,) = flow.score(find)
        return scores.view(heads, batch, -1)[..., : window.valid.shape[1]].transpose(0, 1)

    def select(self, scores: torch.Tensor | None, quota: Quota, heads: int) -> Selection:
        if quota.count.device.type != "cpu" or not quota.sparse:
            return select_pages(scores, quota, heads)
        return native.select(scores, quota, heads)

    def attend(
        self, q: torch.Tensor, pool: LayerPool, rows: Rows, selection: Selection, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if _is_native(pool):
            return native.attend(q, pool, rows, selection, options)
        return attend_selected(q, pool, rows, selection, options)

    def add_mass(
        self, pool: LayerPool, rows: Rows, mass: MassRows, selection: Selection, increment: torch.Tensor
    ) -> None:
        if _is_native(pool):
            native.add_mass(pool, rows, mass, selection, increment)
        else:
            super().add_mass(pool, rows, mass, selection, increment)

    def prompt_mass(
        self, q: torch.Tensor, pool: LayerPool, blocks: torch.Tensor, first: int, options: AttentionOptions
    ) -> torch.Tensor:
        if _is_native(pool):
            return native.prompt_mass(q, pool, blocks, first, options)
        return prompt_mass(q, pool, blocks, first, options)

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: LayerPool, rows: Rows, options: AttentionOptions
    ) -> torch.Tensor:
        return prefill_requests(q, k, v, pool, rows, options)


def _is_native(pool: LayerPool) -> bool:
    """Whether the C++ kernels know a pool's device and dtype; they find their pages in any order."""
    return pool.device.type == "cpu" and pool.dtype in native.TYPES


def _is_head_major(pool: LayerPool) -> bool:
    """Whether the kernels that store and move tokens know a pool, too."""
    return _is_native(pool) and not pool.page_major


def storage(pool: LayerPool, name: str) -> torch.Tensor:
    """A field of the pool with heads and rows in one axis."""
    if name in ("k", "v"):
        return pool.flat(pool.k if name == "k" else pool.v)
    return pool.flat((pool.summaries if name in pool.summaries else pool.state)[name])
