"""Adds the attention of prompt queries to stored attention mass, on any backend."""

from __future__ import annotations

import torch

from kvsieve.backends.base import AttentionOptions, Backend
from kvsieve.mass import MassUpdate
from kvsieve.paging.pool import LayerPool


def seed_mass(
    backend: Backend,
    q: torch.Tensor,
    pool: LayerPool,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    update: MassUpdate,
    options: AttentionOptions,
) -> None:
    """Add the attention of consecutive queries [n, H, G, D] of one request to its stored mass, as ``update`` says.

    ``blocks``, ``rows`` [S or more]: blocks and state rows of the request, whose first S pages end with the last query.
    """
    pages = -(-(update.first + update.rows) // pool.page_size)
    blocks, rows = blocks[:pages], rows[:pages]
    if update.rebase is not None:
        pool.rebase_mass(rows, update.rebase)
    sums = backend.prompt_mass(q, pool, blocks, update.first, options)
    padded = torch.nn.functional.pad(sums * update.unit, (0, pages * pool.page_size - sums.shape[1]))
    pool.add_mass(rows.expand(len(sums), -1), padded.unflatten(1, (pages, pool.page_size)))
