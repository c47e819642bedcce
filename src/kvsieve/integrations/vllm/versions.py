"""What differs between the versions of vLLM that the CUDA backend knows: 0.26 and 0.32, model runners V1 and V2.

Both give a layer the cache as ``[blocks, H, block_size, 2 * D]``, strided, and store a step's tokens before attention;
FlashAttention's metadata, builder and implementation take the same arguments. The rest is here.
"""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.integrations.vllm.planner import Facts


def facts_of(common: Any) -> Facts:
    """What the planner needs of vLLM's metadata of a step.

    0.26 still has ``_seq_lens_cpu``; since then there is an upper bound alone, exact but for speculative decoding. The
    runners pad ``is_prefilling`` and the bounds, or leave them shorter than the batch.
    """
    rows = common.num_reqs
    bounds = common.seq_lens_cpu_upper_bound
    if bounds is None:
        bounds = getattr(common, "_seq_lens_cpu", None)
    if bounds is None:
        bounds = common.seq_lens.cpu()
    prefilling = common.is_prefilling
    if prefilling is None:
        prefilling = torch.zeros(0, dtype=torch.bool)
    return Facts(
        common.query_start_loc_cpu[: rows + 1],
        _padded(bounds, rows),
        _padded(prefilling, rows),
        common.max_seq_len,
        common.num_actual_tokens,
        common.seq_lens[:rows],
        common.block_table_tensor[:rows],
        common.slot_mapping,
    )


def cache_of(layer: Any) -> torch.Tensor | None:
    """A layer's cache, None before it is allocated; it was a list of one when pipelines had several virtual engines."""
    cache = layer.kv_cache[0] if isinstance(layer.kv_cache, (list, tuple)) else layer.kv_cache
    return cache if isinstance(cache, torch.Tensor) and cache.dim() == 4 else None


def leave_out_what_reuses_metadata(builder: Any) -> None:
    """vLLM may otherwise change metadata in place, for another group of layers or a draft model (0.32), and leave the
    plan in it as it was."""
    builder.supports_update_block_table = False
    builder.supports_draft_decode_metadata_update = False


def captures_decode_steps(vllm_config: Any) -> bool:
    """Whether vLLM was asked to capture whole decode steps."""
    mode = vllm_config.compilation_config.cudagraph_mode
    return mode is not None and bool(mode.has_full_cudagraphs())


def most_rows(vllm_config: Any) -> int:
    """Rows of a decode step, padding included, at most."""
    captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    return int(max(vllm_config.scheduler_config.max_num_seqs, captured))


def _padded(values: torch.Tensor, rows: int) -> torch.Tensor:
    values = values[:rows].cpu()
    return values if len(values) == rows else torch.cat((values, values.new_zeros(rows - len(values))))
