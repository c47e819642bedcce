"""What a configuration means, in one line of the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from kvsieve.flow import flow_name

if TYPE_CHECKING:
    from kvsieve.integrations.vllm.engine import Engine
    from kvsieve.integrations.vllm.flowlayer import FlowLayer

logger = logging.getLogger("vllm.kvsieve")
EXAMPLE_TOKENS = 4096


def announce(engine: Engine, sparse: Mapping[str, FlowLayer], layers: int, dtype: torch.dtype) -> None:
    """Log, once for a group of layers, what is attended, what it saves and what memory it takes."""
    logger.info("%s", describe(engine, sparse, layers, dtype))


def describe(engine: Engine, sparse: Mapping[str, FlowLayer], layers: int, dtype: torch.dtype) -> str:
    """The line that :func:`announce` logs."""
    settings = engine.settings
    page = settings.page_size
    pages = EXAMPLE_TOKENS // page
    kept_bytes, dense_bytes, summaries, state = 0, 0, 0, 0
    for impl in sparse.values():
        token = 2 * impl.head_size * dtype.itemsize * impl.num_kv_heads
        kept = min(pages, impl.budget.kept(pages))
        scored = impl.graphs.score_bytes_per_page(dtype) * impl.budget.window(pages) if kept < pages else 0
        dense_bytes += pages * page * token
        kept_bytes += kept * page * token + scored * impl.num_kv_heads
        of_pages, of_rows = impl.side_bytes(pages, dtype)
        summaries += of_pages
        state += of_rows
    kept = min(pages, settings.budget.kept(pages))
    return (
        f"kvsieve: {flow_name(settings.flow)} on {len(sparse)} of {layers} layers, pages of {page}, backend "
        f"{engine.backend.name}. A request of {EXAMPLE_TOKENS} tokens attends {kept} of {pages} pages per step and KV "
        f"head: it reads {kept_bytes / 1e6:.1f} MB instead of {dense_bytes / 1e6:.1f} MB of K and V. Summaries take "
        f"{summaries / dense_bytes:.1%} of the KV cache's memory on top of it; state up to {state / 1e6:.0f} MB"
    )
