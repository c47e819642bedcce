"""Sparse means not read: what happens if the pages that were not selected hold NaN."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.backends import Backend, get_backend
from kvsieve.backends.base import AttentionOptions, Selection
from kvsieve.graph import FlowGraphs
from kvsieve.paging.allocator import NULL_BLOCK
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import Quota, Rows, Window


class UnselectedNaN(Backend):
    """A backend with K and V of every block that no list names overwritten by NaN while attention runs.

    ``overwritten`` counts those among them that hold a page of a request in the batch, per KV head: pages left out.
    """

    name = "unselected NaN"

    def __init__(self, inner: str | Backend) -> None:
        self._inner = get_backend(inner)
        self.overwritten = 0

    def refusal(self, graphs: FlowGraphs) -> str | None:
        return self._inner.refusal(graphs)

    def prepare(self, graphs: FlowGraphs, device: torch.device) -> Any:
        return self._inner.prepare(graphs, device)

    def summarize(self, flow: Any, pool: LayerPool, blocks: torch.Tensor) -> None:
        self._inner.summarize(flow, pool, blocks)

    def score(self, flow: Any, q: torch.Tensor, pool: LayerPool, window: Window) -> torch.Tensor:
        return self._inner.score(flow, q, pool, window)

    def select(self, scores: torch.Tensor | None, quota: Quota, heads: int) -> Selection:
        return self._inner.select(scores, quota, heads)

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: LayerPool, rows: Rows, options: AttentionOptions
    ) -> torch.Tensor:
        return self._inner.prefill(q, k, v, pool, rows, options)

    def prompt_mass(self, *arguments: Any) -> torch.Tensor:
        return self._inner.prompt_mass(*arguments)

    def attend(
        self, q: torch.Tensor, pool: LayerPool, rows: Rows, selection: Selection, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        listed = selection.listed().expand(selection.pages.shape)
        pages = torch.where(listed, selection.pages, 0)
        blocks = torch.gather(rows.table[:, None].expand(-1, q.shape[1], -1), 2, pages)
        named = torch.zeros(pool.k.shape[:2], dtype=torch.bool, device=pool.k.device)
        for head in range(q.shape[1]):
            named[head, blocks[:, head][listed[:, head]]] = True
        kept = pool.k.clone(), pool.v.clone()
        pool.k[~named] = float("nan")
        pool.v[~named] = float("nan")
        held = torch.zeros(pool.k.shape[1], dtype=torch.bool, device=pool.k.device)
        held[rows.table.flatten()] = True
        held[NULL_BLOCK] = False  # the tail of a shorter request's table
        self.overwritten += int((held & ~named).sum())
        result = self._inner.attend(q, pool, rows, selection, options)
        pool.k.copy_(kept[0])
        pool.v.copy_(kept[1])
        return result
