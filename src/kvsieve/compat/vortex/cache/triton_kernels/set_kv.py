"""New K and V into the pool."""

from __future__ import annotations

import torch

from kvsieve.compat.vortex.abs.tensor import plain


def set_kv_buffer_launcher(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    new_k: torch.Tensor,
    new_v: torch.Tensor,
    loc: torch.Tensor,
    page_size: int,
) -> None:
    """Store the tokens of a call, in place.

    Token slot ``s`` of KV head ``h`` lies at row ``(s // page_size) * heads + h``, inner index ``s % page_size``.

    Args:
        k_cache, v_cache: [rows, page_size, D] (or flat). new_k, new_v: [n, heads, D]. loc: [n] token slots.
    """
    loc = plain(loc).long()
    heads = torch.arange(new_k.shape[1], device=loc.device)
    rows = (loc // page_size)[:, None] * new_k.shape[1] + heads
    for cache, new in ((k_cache, new_k), (v_cache, new_v)):
        pages = plain(cache).view(-1, page_size, new.shape[-1])
        pages[rows, (loc % page_size)[:, None]] = plain(new).to(cache.dtype)
