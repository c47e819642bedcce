"""The eager backend: the lowered graph and exact attention as plain PyTorch ops, on any device and dtype.

Segments are laid out head-major, ``N = H * B``, which the pool's layout gives without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvsieve.backends.attention import attend_selected, gather_pages, prefill_requests, prompt_mass
from kvsieve.backends.base import AttentionOptions, Backend, Selection
from kvsieve.backends.select import select_pages
from kvsieve.dtypes import default_dtype
from kvsieve.graph import FlowGraphs
from kvsieve.lower import Program, lower
from kvsieve.mass import FIELDS as MASS_FIELDS
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import Quota, Rows
from kvsieve.window import Window


@dataclass(frozen=True)
class EagerFlow:
    """A flow's lowered programs."""

    summarize: Program | None
    score: Program | None


class EagerBackend(Backend):
    """Runs every flow that traces; nothing is compiled."""

    name = "eager"

    def refusal(self, graphs: FlowGraphs) -> str | None:
        return None

    def prepare(self, graphs: FlowGraphs, device: torch.device) -> EagerFlow:
        programs = [lower(graph) if graph else None for graph in (graphs.summarize, graphs.score)]
        for program in programs:
            if program is not None:
                program.module.to(device)
        return EagerFlow(*programs)

    def summarize(self, flow: EagerFlow, pool: LayerPool, blocks: torch.Tensor) -> None:
        if flow.summarize is None or not len(blocks):
            return
        fields = {name: field.index_select(1, blocks).flatten(0, 1) for name, field in (("k", pool.k), ("v", pool.v))}
        valid = torch.ones(len(blocks) * pool.num_kv_heads, 1, dtype=torch.bool, device=blocks.device)
        for name, value in _run(flow.summarize, valid, fields).items():
            target = pool.summaries[name]
            target[:, blocks] = value.reshape(pool.num_kv_heads, len(blocks), *value.shape[1:]).to(target.dtype)

    def score(self, flow: EagerFlow, q: torch.Tensor, pool: LayerPool, window: Window) -> torch.Tensor:
        assert flow.score is not None
        batch, heads = q.shape[:2]
        inputs = {"q": q.transpose(0, 1).flatten(0, 1)}
        sources = {"k": (pool.k, window.blocks), "v": (pool.v, window.blocks)}
        sources |= {name: (pool_field, window.blocks) for name, pool_field in pool.summaries.items()}
        sources |= {name: (pool_field, window.rows) for name, pool_field in pool.state.items()}
        for name in flow.score.inputs:
            if name in sources:
                inputs[name] = gather_pages(*sources[name])
                if name in MASS_FIELDS:
                    assert window.mass_scale is not None
                    scale = window.mass_scale.repeat(heads, 1)
                    inputs[name] = inputs[name] * (scale[..., None] if name == "mass" else scale)
            elif name != "q":
                inputs[name] = getattr(window, name).repeat(heads, 1)
        results = _run(flow.score, window.valid.repeat(heads, 1), inputs)
        scores = results.pop("scores")
        rows = window.rows.flatten()
        for name, value in results.items():
            target = pool.state[name]
            target[:, rows] = value.reshape(heads, len(rows), *value.shape[2:]).to(target.dtype)
        return scores.float().reshape(heads, batch, -1).transpose(0, 1)

    def select(self, scores: torch.Tensor | None, quota: Quota, heads: int) -> Selection:
        return select_pages(scores, quota, heads)

    def attend(
        self, q: torch.Tensor, pool: LayerPool, rows: Rows, selection: Selection, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return attend_selected(q, pool, rows, selection, options)

    def prompt_mass(
        self, q: torch.Tensor, pool: LayerPool, blocks: torch.Tensor, first: int, options: AttentionOptions
    ) -> torch.Tensor:
        return prompt_mass(q, pool, blocks, first, options)

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: LayerPool, rows: Rows, options: AttentionOptions
    ) -> torch.Tensor:
        return prefill_requests(q, k, v, pool, rows, options)


def _run(program: Program, valid: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run a program on float32 inputs."""
    inputs = (fields[name].float() if fields[name].is_floating_point() else fields[name] for name in program.inputs)
    with default_dtype(torch.float32):  # what a quotient of integers is
        return dict(zip(program.outputs, program.module(valid, *inputs), strict=True))
