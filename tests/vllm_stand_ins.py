"""In place of vLLM's CUDA kernels: plain attention over the metadata that they get, and plain storing. The backend for
CUDA then runs on a CPU, in the place of vLLM's own there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata

from kvsieve.integrations.vllm.cuda import SieveFlashBackend


def plain_attention(
    self: FlashAttentionImpl, layer: Any, query: torch.Tensor, key: Any, value: Any, kv_cache: torch.Tensor,
    metadata: FlashAttentionMetadata | None, output: torch.Tensor, *more: Any, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """What FlashAttention computes of its metadata; a row of length 0 becomes 0."""
    if metadata is None:
        return output.fill_(0)
    starts, size = metadata.query_start_loc.tolist(), kv_cache.shape[2]
    for row, length in enumerate(metadata.seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        output[first:last] = 0
        if not length or first == last:
            continue
        at = torch.arange(length)
        found = kv_cache[metadata.block_table[row, at // size].long(), :, at % size]  # [T, H, 2 D]
        k, v = (x.transpose(0, 1).repeat_interleave(3, 0).double() for x in found.split(self.head_size, -1))
        logits = torch.matmul(query[first:last].transpose(0, 1).double() * self.scale, k.transpose(1, 2))
        seen = at <= torch.arange(length - (last - first), length)[:, None]
        p = torch.softmax(torch.where(seen, logits, float("-inf")), -1)
        output[first:last] = torch.matmul(p, v).transpose(0, 1).to(output.dtype)
    return output


class StandInBackend(SieveFlashBackend):
    """The backend for CUDA in the place of vLLM's for CPUs, so that an engine here runs it."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


def plain_storing(
    self: FlashAttentionImpl, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: Any
) -> None:
    """What vLLM's kernel does with a step's tokens."""
    slots = slots[slots >= 0].long()
    both = torch.cat((key, value), -1)[: len(slots)]
    cache[slots // cache.shape[2], :, slots % cache.shape[2]] = both.to(cache.dtype)
