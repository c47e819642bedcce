"""Prompts: vLLM's own dense CPU kernel, on a scratch cache in the packed layout that it wants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvsieve.integrations.vllm.cache import CachePool
from kvsieve.integrations.vllm.plan import Batch, ragged


@dataclass(frozen=True)
class KernelOptions:
    """What vLLM's kernel needs to know of a group of layers."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    isa: str


class Prefill:
    """The rows of a step that are attended densely: prompts, chunks of them, several tokens at once.

    ``tokens`` [T]: their new tokens in the flat token axis, None if that is all of it. ``sources`` [N]: slots of all
    tokens of these requests in vLLM's cache; None if all of them are new and thus at hand. ``targets`` [N]: slots in
    the scratch cache, of ``blocks`` blocks.
    """

    def __init__(self, batch: Batch, places: torch.Tensor, options: KernelOptions) -> None:
        from vllm import _custom_ops as ops
        from vllm import envs

        size = options.block_size
        counts = (batch.starts[1:] - batch.starts[:-1])[places].to(torch.int64)
        lengths = batch.lengths[places].to(torch.int64)
        every = len(places) == len(batch.lengths)
        self.tokens = None if every else _ranges(batch.starts[:-1][places].to(torch.int64), counts)
        row, position = ragged(lengths)
        held = (lengths + size - 1) // size
        first = torch.cumsum(held, 0) - held
        self.blocks = int(held.sum())
        self.targets = first[row] * size + position
        self.sources = None
        if not torch.equal(counts, lengths):
            blocks = batch.blocks[places].to(torch.int64)
            self.sources = blocks[row, position // size] * size + position % size
        self.starts = torch.nn.functional.pad(torch.cumsum(counts, 0), (1, 0)).to(torch.int32)
        self.lengths = lengths.to(torch.int32)
        self.table = (first[:, None] + torch.arange(int(held.max()))).clamp(max=self.blocks - 1).to(torch.int32)
        self.options = options
        self.schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(places),
            num_heads=options.heads,
            num_kv_heads=options.kv_heads,
            head_dim=options.head_dim,
            seq_lens=self.lengths,
            dtype=options.dtype,
            query_start_loc=self.starts,
            causal=True,
            sliding_window_size=-1,
            isa=options.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )

    def attend(
        self, impl: Any, pool: CachePool, scratch: ScratchCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention of these rows' new tokens: q [T, Hq, D], k, v [T, H, D] -> [T, Hq, D]."""
        from vllm import _custom_ops as ops

        if self.tokens is not None:
            q, k, v = (x[self.tokens] for x in (q, k, v))
        if self.sources is not None:
            k, v = pool.tokens_at(self.sources)
        key_cache, value_cache = scratch.halves(self.blocks, self.options)
        ops.cpu_attn_reshape_and_cache(k, v, key_cache, value_cache, self.targets, self.options.isa)
        out = torch.empty(q.shape, dtype=q.dtype)
        ops.cpu_attention_with_kv_cache(
            query=q,
            key_cache=key_cache,
            value_cache=value_cache,
            output=out,
            query_start_loc=self.starts,
            seq_lens=self.lengths,
            scale=impl.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.table,
            softcap=impl.logits_soft_cap,
            scheduler_metadata=self.schedule,
            s_aux=impl.sinks,
        )
        return out


class ScratchCache:
    """A cache for the kernel, shared by all layers: it holds the requests of one layer's call at a time."""

    def __init__(self) -> None:
        self._memory: dict[KernelOptions, torch.Tensor] = {}

    def halves(self, blocks: int, options: KernelOptions) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for so many blocks, as vLLM's kernel views a cache: K and V, each [blocks, H, block_size, D]."""
        known = self._memory.get(options)
        if known is None or known.shape[0] < blocks:
            shape = blocks, options.kv_heads, 2 * options.block_size, options.head_dim
            with torch.inference_mode(False):
                known = self._memory[options] = torch.zeros(shape, dtype=options.dtype)  # stale tokens stay finite
        key_cache, value_cache = known.chunk(2, dim=2)
        return key_cache, value_cache


def _ranges(starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    row, place = ragged(counts)
    return starts[row] + place
