"""Exact, deterministic page selection in plain tensor ops."""

from __future__ import annotations

import torch

from kvsieve.backends.base import Selection
from kvsieve.plan import Quota

INT32_MIN = -(2**31)


def select_pages(scores: torch.Tensor | None, quota: Quota, heads: int) -> Selection:
    """Sink pages, the best of the window (scores [Bs, H, W]), recent pages; all pages under budget."""
    best = None
    if scores is not None and quota.window is not None and quota.window.max_topk:
        best = top_pages(scores, quota.window.valid, quota.window.topk, quota.window.max_topk)
    return compose(best, quota, heads)


def order_key(scores: torch.Tensor) -> torch.Tensor:
    """float32 scores as int64 keys of the same order: -0 equals +0, NaN lies below -inf."""
    bits = (scores + 0.0).contiguous().view(torch.int32)  # + 0.0 turns -0 into +0
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return torch.where(torch.isnan(scores), INT32_MIN + 1, key)


def top_pages(scores: torch.Tensor, valid: torch.Tensor, topk: torch.Tensor, max_topk: int) -> torch.Tensor:
    """The ``topk`` [B] best pages of each window, the older one at equal rank.

    ``scores`` float32 [B, H, W], ``valid`` [B, W] -> window indices [B, H, max_topk] ascending, padded with W.
    """
    width = scores.shape[-1]
    key = torch.where(valid[:, None], order_key(scores), INT32_MIN)
    age = torch.arange(width - 1, -1, -1, device=scores.device)
    # Rank and age in one integer: no two pages are equal, so topk has nothing to decide.
    best = torch.topk(key * 2**31 + age, min(max_topk, width), dim=-1).indices
    place = torch.arange(best.shape[-1], device=scores.device)
    chosen = torch.where(place < topk[:, None, None], best, width)
    return torch.sort(chosen, dim=-1).values


def compose(best: torch.Tensor | None, quota: Quota, heads: int) -> Selection:
    """Sink, chosen and recent pages in ascending order; all pages for requests under budget.

    ``best``: window indices [Bs, H, k] of the scored requests, ascending, from :func:`top_pages`.
    """
    batch, device = quota.count.shape[0], quota.count.device
    place = torch.arange(quota.width, device=device)
    pages = place.expand(batch, heads, -1)
    if not quota.sparse:
        return Selection(pages, quota.count)
    count, total = quota.count[:, None, None], quota.pages[:, None, None]
    recent = total - count + place  # the last page of a list is the request's last page
    if best is None:
        chosen = recent
    else:
        assert quota.window is not None
        inner = torch.clamp(place - quota.sink, 0, best.shape[-1] - 1).expand(*best.shape[:2], -1)
        ranked = quota.sink + torch.gather(best, 2, inner)
        chosen = torch.zeros_like(recent.expand(batch, heads, -1)).index_copy(0, quota.window.requests, ranked)
    sparse = torch.where(place < quota.sink, place, torch.where(place < count - quota.recent, chosen, recent))
    return Selection(torch.where(total == count, pages, sparse), quota.count)
