"""vLLM's own cache of a layer as a pool of kvsieve: pages are views of its blocks, nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvsieve.graph import FieldSpec
from kvsieve.paging.pool import LayerPool, initial_value


class CachePool(LayerPool):
    """A layer's pages inside vLLM's cache, with the side fields that a flow needs beside it.

    A physical page is ``block * pages_per_block + page in the block``; it takes the place of a pool's block. Within a
    block of vLLM's CPU cache ``[blocks, H, block_size, 2 * D]`` the plug-in stores plain rows, page by page: ``[pages,
    H, 2 (K, V), p, D]``. vLLM may thus move whole blocks, and a page of K or V is one dense piece. All fields lie
    page-major, so that ``page * H + head`` is the place of a page in every one of them.
    """

    def __init__(
        self,
        cache: torch.Tensor,
        page_size: int,
        summary_fields: Mapping[str, FieldSpec],
        state_fields: Mapping[str, FieldSpec],
        state_rows: int,
    ) -> None:
        blocks, heads, block_size, width = cache.shape
        self.num_kv_heads, self.page_size, self.page_major = heads, page_size, True
        self.dtype, self.device = cache.dtype, cache.device
        self.pages = blocks * (block_size // page_size)
        self.rows_of_pages = cache.view(self.pages, heads, 2, page_size, width // 2)
        self.k, self.v = (self.rows_of_pages[:, :, part].transpose(0, 1) for part in (0, 1))
        with torch.inference_mode(False):  # they outlive a forward pass
            self._initial = {name: initial_value(spec).to(cache.device) for name, spec in state_fields.items()}
            self.summaries = {name: self._made(spec, self.pages) for name, spec in summary_fields.items()}
            self.state = {name: self._made(spec, state_rows) for name, spec in state_fields.items()}

    def store(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store tokens k, v [T, H, D] at vLLM's slots [T] (``block * block_size + offset``; -1: nowhere)."""
        if slots.shape[0] != k.shape[0]:
            k, v = k[: slots.shape[0]], v[: slots.shape[0]]
        pages, offsets = slots // self.page_size, slots % self.page_size
        self.rows_of_pages[pages, :, :, offsets] = torch.stack((k, v), 2)

    def tokens_at(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [T, H, D] of the tokens at vLLM's slots [T]."""
        found = self.rows_of_pages[slots // self.page_size, :, :, slots % self.page_size]
        return found[:, :, 0], found[:, :, 1]

    @property
    def side_bytes(self) -> int:
        """Memory of the side fields."""
        return sum(field.nbytes for field in (*self.summaries.values(), *self.state.values()))

    def _made(self, spec: FieldSpec, size: int) -> torch.Tensor:
        return self._storage(size, spec.shape, spec.dtype or self.dtype)
