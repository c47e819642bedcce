"""The indexer's context: geometry, budget, and the step's page lists and work list."""

from __future__ import annotations

from typing import Any, Final

import torch

from kvsieve.compat.vortex.abs.context_base import ContextBase

PAGE_LISTS = ("dense_kv_indptr", "dense_kv_indices", "sparse_kv_indptr", "sparse_kv_indices", "kv_last_page_len")
WORK_LIST = ("winfo_q_indices", "winfo_kv_offsets", "winfo_kv_lens", "winfo_num_workloads", "winfo_chunk_size")


class Context(ContextBase):
    """Fields as in vortex_torch v1, all freely assignable.

    Tensors: :data:`PAGE_LISTS` and :data:`WORK_LIST`, int32, filled by ``plan_decode``. Segments are
    ``request * num_kv_heads + head``.
    """

    title = "Indexer"
    fields = (
        *ContextBase.fields,
        *PAGE_LISTS,
        *WORK_LIST,
        "batch_size",
        "max_num_workloads",
        "max_chunk_size",
        "min_chunk_size",
        "group_size",
        "num_kv_heads",
        "num_qo_heads",
        "head_dim",
        "num_sms",
        "page_size",
        "max_num_pages",
        "max_num_pages_per_request",
        "indexer_dtype",
        "topk_val",
        "page_reserved_bos",
        "page_reserved_eos",
    )

    def __init__(self) -> None:
        super().__init__()
        self.batch_size: int = 0

    def set_batch_size(self, n: int) -> None:
        """Requests in this step."""
        self.batch_size = n

    def read_server(self, parent: Any, model_runner: Any) -> None:
        """From an attention backend and a model runner of SGLang's kind; the work list is allocated."""
        args = model_runner.server_args
        tokens = args.vortex_max_seq_lens
        tokens = model_runner.model_config.context_len if tokens < 0 else tokens
        requests = int(model_runner.req_to_token_pool.size)
        self.dense_kv_indices, self.sparse_kv_indices = parent.kv_indices_decode[:2]
        self.dense_kv_indptr, self.sparse_kv_indptr = parent.kv_indptr_decode[:2]
        self.kv_last_page_len = parent.kv_last_page_len_decode
        for name in ("group_size", "num_kv_heads", "num_qo_heads", "head_dim"):
            setattr(self, name, getattr(parent, name))
        self.page_size = args.page_size
        self.max_num_pages_per_request = -(-tokens // args.page_size)
        self.max_num_pages = self.max_num_pages_per_request * requests * parent.num_kv_heads
        self.max_chunk_size, self.min_chunk_size = args.vortex_lb_max_chunk_size, args.vortex_lb_min_chunk_size
        self.topk_val = args.vortex_topk_val
        self.page_reserved_bos, self.page_reserved_eos = args.vortex_page_reserved_bos, args.vortex_page_reserved_eos
        self.max_num_workloads = self.max_num_pages // max(1, self.min_chunk_size) + requests * parent.num_kv_heads
        device = self.dense_kv_indices.device
        for name in WORK_LIST:
            size = 1 if name in WORK_LIST[3:] else self.max_num_workloads
            setattr(self, name, torch.zeros(size, dtype=torch.int32, device=device))


ctx: Final[Context] = Context()
"""A context that a process may share."""


def get_ctx() -> Context:
    """:data:`ctx`."""
    return ctx
