"""The cache side's context: geometry of the pool."""

from __future__ import annotations

from typing import Any

from kvsieve.compat.vortex.abs.context_base import ContextBase


class Context(ContextBase):
    """Fields as in vortex_torch v1, all freely assignable. ``head_num``: KV heads."""

    title = "Cache"
    fields = (
        *ContextBase.fields,
        "max_new_tokens_per_batch",
        "page_size",
        "total_num_pages",
        "head_dim",
        "head_num",
    )

    def read_server(self, parent: Any, model_runner: Any) -> None:
        """From a memory pool and a model runner of SGLang's kind."""
        args = model_runner.server_args
        self.page_size, self.total_num_pages = parent.page_size, parent.num_pages
        self.head_num, self.head_dim = parent.head_num, parent.head_dim
        self.max_new_tokens_per_batch = max(args.max_prefill_tokens, model_runner.req_to_token_pool.size)
