"""vLLM's own cache of a layer as a pool of kvsieve: pages are views of its blocks, nothing is copied.

A physical page is ``block * pages_per_block + page in the block``; it takes the place of a pool's block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvsieve.graph import FieldSpec
from kvsieve.paging.pool import LayerPool, initial_value


class PagePool(LayerPool):
    """Pages ``k``, ``v`` [H, pages, p, D] that lie in an engine's memory, with the side fields that a flow needs.

    Side fields lie page-major: ``page * H + head`` is the place of a page in each of them.
    """

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        summary_fields: Mapping[str, FieldSpec],
        state_fields: Mapping[str, FieldSpec],
        state_rows: int,
    ) -> None:
        self.k, self.v = k, v
        self.num_kv_heads, self.pages, self.page_size, _ = k.shape
        self.page_major, self.dtype, self.device = True, k.dtype, k.device
        with torch.inference_mode(False):  # they outlive a forward pass
            self.initial = {
                name: initial_value(spec).to(k.device, spec.dtype or k.dtype) for name, spec in state_fields.items()
            }
            self.summaries = {name: self._made(spec, self.pages) for name, spec in summary_fields.items()}
            self.state = {name: self._made(spec, state_rows) for name, spec in state_fields.items()}

    def _made(self, spec: FieldSpec, size: int) -> torch.Tensor:
        return self._storage(size, spec.shape, spec.dtype or self.dtype)


class CachePool(PagePool):
    """Pages of vLLM's CPU cache ``[blocks, H, block_size, 2 * D]``.

    Within a block the plug-in stores plain rows, page by page: ``[pages, H, 2 (K, V), p, D]``. vLLM may thus move whole
    blocks, a page of K or V is one dense piece, and K and V lie page-major, as the side fields do.
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
        self.rows_of_pages = cache.view(blocks * (block_size // page_size), heads, 2, page_size, width // 2)
        k, v = (self.rows_of_pages[:, :, part].transpose(0, 1) for part in (0, 1))
        super().__init__(k, v, summary_fields, state_fields, state_rows)

    def store(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store tokens k, v [T or more, H, D] at vLLM's slots [T] (``block * block_size + offset``).

        Padding, whose slot is -1, comes last and is stored nowhere.
        """
        if len(slots) and int(slots[-1]) < 0:
            slots = slots[slots >= 0]
        if len(slots) != len(k):
            k, v = k[: len(slots)], v[: len(slots)]
        pages, offsets = slots // self.page_size, slots % self.page_size
        self.rows_of_pages[pages, :, :, offsets] = torch.stack((k, v), 2)

    def tokens_at(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [T, H, D] of the tokens at vLLM's slots [T]."""
        found = self.rows_of_pages[slots // self.page_size, :, :, slots % self.page_size]
        return found[:, :, 0], found[:, :, 1]


def token_major_pages(cache: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``k``, ``v`` [H, pages, p, D] of a cache ``[blocks, H, block_size, 2 * D]``, as views.

    In it K and V of a token and head lie side by side, tokens outermost in a block: vLLM's way for its CUDA kernels.
    """
    _, heads, block_size, width = cache.shape
    pages = cache.unflatten(2, (block_size // page_size, page_size)).permute(1, 0, 2, 3, 4)
    k, v = pages.reshape(heads, -1, page_size, width).split(width // 2, -1)
    if k.data_ptr() != cache.data_ptr():
        raise ValueError(f"expected blocks whose pages follow each other in memory, received strides {cache.stride()}")
    return k, v
