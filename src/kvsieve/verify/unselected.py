"""Sparse means not read: what happens if the pages that were not selected hold NaN."""

from __future__ import annotations

import torch

from kvsieve.backends import Backend, get_backend
from kvsieve.backends.base import AttentionOptions, Selection
from kvsieve.backends.forwarding import ForwardingBackend
from kvsieve.paging.allocator import NULL_BLOCK
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import Rows


class UnselectedNaN(ForwardingBackend):
    """A backend with K and V of every block that no list names overwritten by NaN while attention runs.

    ``overwritten`` counts those among them that hold a page of a request in the batch, per KV head: pages left out.
    """

    def __init__(self, inner: str | Backend) -> None:
        super().__init__(get_backend(inner))
        self.overwritten = 0

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
        result = super().attend(q, pool, rows, selection, options)
        pool.k.copy_(kept[0])
        pool.v.copy_(kept[1])
        return result
