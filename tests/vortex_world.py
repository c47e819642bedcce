"""A small engine of vortex_torch's kind: a pool, permuted tables, a planned step; memory that is not listed is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvsieve.compat.vortex.abs import FORMAT, as_vtensor
from kvsieve.compat.vortex.cache import Context as CacheContext
from kvsieve.compat.vortex.cache import set_kv_buffer_launcher
from kvsieve.compat.vortex.indexer import Context
from kvsieve.compat.vortex.indexer.utils_sglang import plan_decode
from kvsieve.compat.vortex.utils import Mode

BATCHED, RAGGED, PAGED = FORMAT.BATCHED, FORMAT.RAGGED, FORMAT.PAGED


@dataclass
class World:
    """Requests of ``lengths`` tokens with ``heads`` KV heads; ``slots`` [B][tokens] are permuted page-wise."""

    lengths: tuple[int, ...] = (61, 23, 48)
    heads: int = 5
    group: int = 3
    head_dim: int = 6
    page_size: int = 5
    topk: int = 3
    bos: int = 1
    eos: int = 2
    max_chunk: int = 4
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(5))

    def __post_init__(self) -> None:
        p = self.page_size
        self.pages = [-(-length // p) for length in self.lengths]
        self.pool_pages = sum(self.pages) + 4
        order = torch.randperm(self.pool_pages, generator=self.random).tolist()
        self.blocks = [[order.pop() for _ in range(count)] for count in self.pages]
        self.slots = [
            [block * p + offset for block in blocks for offset in range(p)][:length]
            for blocks, length in zip(self.blocks, self.lengths, strict=True)
        ]
        self.req_indices = torch.tensor([2 * (len(self.lengths) - 1 - b) for b in range(len(self.lengths))])
        self.req_to_token = torch.full((2 * len(self.lengths), max(self.lengths)), -(10**6), dtype=torch.int32)
        for row, slots in zip(self.req_indices.tolist(), self.slots, strict=True):
            self.req_to_token[row, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
        self.ctx = self.context()

    @property
    def segments(self) -> int:
        return len(self.lengths) * self.heads

    @property
    def rows(self) -> int:
        """Rows of a field of the pool."""
        return self.pool_pages * self.heads + 1

    def context(self) -> Context:
        """An empty context of this geometry with room to spare."""
        ctx = Context()
        ctx.mode = Mode.execute
        ctx.num_kv_heads, ctx.group_size, ctx.num_qo_heads = self.heads, self.group, self.heads * self.group
        ctx.head_dim, ctx.page_size, ctx.topk_val = self.head_dim, self.page_size, self.topk
        ctx.page_reserved_bos, ctx.page_reserved_eos = self.bos, self.eos
        ctx.max_chunk_size, ctx.min_chunk_size, ctx.num_sms = self.max_chunk, 1, 4
        ctx.max_num_pages_per_request = max(self.pages)
        ctx.max_num_pages = max(self.pages) * self.segments + 7
        ctx.max_num_workloads = ctx.max_num_pages
        for name in ("dense_kv_indices", "sparse_kv_indices", "winfo_q_indices", "winfo_kv_offsets", "winfo_kv_lens"):
            setattr(ctx, name, self.ints(ctx.max_num_pages))
        for name in ("dense_kv_indptr", "sparse_kv_indptr", "kv_last_page_len"):
            setattr(ctx, name, self.ints(self.segments + 4))
        ctx.winfo_num_workloads, ctx.winfo_chunk_size = self.ints(1), self.ints(1)
        return ctx

    def ints(self, size: int) -> torch.Tensor:
        return torch.full((size,), -7, dtype=torch.int32, device=self.device)

    def plan(self, lengths: Sequence[int] | None = None) -> Context:
        """The context with this step's lists; ``lengths``: tokens so far, if not all."""
        lens = torch.tensor(list(lengths or self.lengths), dtype=torch.int32, device=self.device)
        plan_decode(lens, self.req_to_token.to(self.device), self.req_indices.to(self.device), self.ctx)
        return self.ctx

    def cache_context(self, tokens: int) -> CacheContext:
        ctx = CacheContext()
        ctx.mode, ctx.page_size, ctx.head_num, ctx.head_dim = Mode.execute, self.page_size, self.heads, self.head_dim
        ctx.max_new_tokens_per_batch, ctx.total_num_pages = tokens, self.pool_pages
        return ctx

    def random_tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(device=self.device, dtype=self.dtype)

    def scored(self) -> list[tuple[int, int, int]]:
        """(segment, place in the page listing, row in the pool) of every page that is scored, by plain loops."""
        found, start = [], 0
        for b, blocks in enumerate(self.blocks):
            for h in range(self.heads):
                if len(blocks) - self.bos - self.eos > self.topk:
                    for page in range(self.bos, len(blocks) - self.eos):
                        found.append((b * self.heads + h, start + page, blocks[page] * self.heads + h))
                start += len(blocks)
        return found

    def batched(self, d0: int, d1: int) -> Any:
        return as_vtensor(self.random_tensor(self.segments, d0, d1), BATCHED)

    def ragged(self, d0: int, d1: int) -> Any:
        """NaN outside the places that are scored."""
        x = torch.full((self.ctx.max_num_pages, d0, d1), float("nan"), dtype=self.dtype, device=self.device)
        places = [place for _, place, _ in self.scored()]
        x[places] = self.random_tensor(len(places), d0, d1)
        return as_vtensor(x, RAGGED)

    def paged(self, d0: int, d1: int, all_pages: bool = False) -> Any:
        """NaN outside the rows that are scored (or listed)."""
        x = torch.full((self.rows, d0, d1), float("nan"), dtype=self.dtype, device=self.device)
        rows = [row for _, _, row in self.scored()]
        if all_pages:
            rows = [block * self.heads + h for blocks in self.blocks for block in blocks for h in range(self.heads)]
        x[rows] = self.random_tensor(len(rows), d0, d1)
        return as_vtensor(x, PAGED)

    def write_kv(
        self, pool: dict[str, Any], request: int, first: int, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Store tokens ``first ..`` of a request, k and v [n, heads, D]; returns their slots."""
        loc = torch.tensor(self.slots[request][first : first + len(k)], dtype=torch.int64, device=self.device)
        set_kv_buffer_launcher(pool["k"], pool["v"], k, v, loc, self.page_size)
        return loc

    def pool(self, fields: dict[str, tuple[int, int]]) -> dict[str, Any]:
        """Fields full of NaN."""
        return {
            name: as_vtensor(torch.full((self.rows, *shape), float("nan"), dtype=self.dtype, device=self.device), PAGED)
            for name, shape in fields.items()
        }


def bare(x: Any) -> torch.Tensor:
    """A vTensor as an ordinary tensor."""
    return x.as_subclass(torch.Tensor) if isinstance(x, torch.Tensor) else x
