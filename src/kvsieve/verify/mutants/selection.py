"""Faults of the selection: ranking, ties, sinks, recent pages, budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kvsieve.backends import select
from kvsieve.backends.base import Selection
from kvsieve.backends.eager import EagerBackend
from kvsieve.call import Call
from kvsieve.verify.mutants.base import Table

TABLE = Table()
fault = TABLE.fault


@fault("one page set serves all KV heads", 5, EagerBackend, "select")
def _(original: Any) -> Any:
    def select_pages(self: Any, scores: Any, quota: Any, heads: int) -> Selection:
        selection: Selection = original(self, scores, quota, heads)
        return replace(selection, pages=selection.pages[:, :1].expand(-1, heads, -1))

    return select_pages


def _exchanged(original: Any, leaves: Callable[[Any], int]) -> Any:
    """``select`` that, over budget, gives one page up for a window page that was not chosen."""

    def select_pages(self: Any, scores: Any, quota: Any, heads: int) -> Selection:
        selection: Selection = original(self, scores, quota, heads)
        pages = selection.pages.clone()
        for i, (total, count) in enumerate(zip(quota.pages.tolist(), quota.count.tolist(), strict=True)):
            place = leaves(quota) % count
            for head in range(heads if total > count else 0):
                listed = pages[i, head, :count].tolist()
                other = next(page for page in range(quota.sink, total) if page not in listed)
                pages[i, head, :count] = torch.tensor(sorted([*listed[:place], *listed[place + 1 :], other]))
        return replace(selection, pages=pages)

    return select_pages


@fault("the first sink page drops out past the top-k", 28, EagerBackend, "select")
def _(original: Any) -> Any:
    return _exchanged(original, lambda quota: 0)


@fault("the last sink page is not kept", 7, EagerBackend, "select")
def _(original: Any) -> Any:
    return _exchanged(original, lambda quota: max(0, quota.sink - 1))


@fault("one recent page too few", 30, EagerBackend, "select")
def _(original: Any) -> Any:
    return _exchanged(original, lambda quota: -quota.recent)


@fault("the page of the newest token is not listed", 30, EagerBackend, "select")
def _(original: Any) -> Any:
    return _exchanged(original, lambda quota: -1)


@fault("a short prompt attends its recent pages only", 26, EagerBackend, "select")
def _(original: Any) -> Any:
    def select_pages(self: Any, scores: Any, quota: Any, heads: int) -> Selection:
        selection: Selection = original(self, scores, quota, heads)
        short = quota.pages == quota.count
        skipped = torch.where(short, (quota.count - quota.recent).clamp(min=0), 0)
        pages = selection.pages + skipped[:, None, None]
        return Selection(pages, selection.count - skipped)

    return select_pages


@fault("a group that is no power of two stays dense", 22, Call, "_step")
def _(original: Any) -> Any:
    def step(self: Any, layer: Any, q: torch.Tensor, plan: Any, options: Any) -> Any:
        if q.shape[2] & (q.shape[2] - 1):
            layer = replace(layer, graphs=None, budget=None)
        return original(self, layer, q, plan, options)

    return step


def _key_of(original: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The order key of other scores."""

    def order_key(scores: torch.Tensor) -> torch.Tensor:
        key: torch.Tensor = original(change(scores))
        return key

    return order_key


@fault("pages are ranked by a float16 key", 17, select, "order_key")
def _(original: Any) -> Any:
    return _key_of(original, lambda scores: scores.half().float())


@fault("NaN scores rank first", None, select, "order_key")
def _(original: Any) -> Any:
    return _key_of(original, lambda scores: torch.nan_to_num(scores, nan=torch.inf, posinf=torch.inf))


@fault("NaN scores rank as 0", None, select, "order_key")
def _(original: Any) -> Any:
    return _key_of(original, lambda scores: torch.nan_to_num(scores, nan=0.0, posinf=torch.inf, neginf=-torch.inf))


@fault("pages are ranked by magnitude", None, select, "order_key")
def _(original: Any) -> Any:
    return _key_of(original, torch.abs)


@fault("negative scores are clamped to 0", None, select, "order_key")
def _(original: Any) -> Any:
    return _key_of(original, lambda scores: scores.clamp(min=0.0))


@fault("-0 ranks below +0", None, select, "order_key")
def _(original: Any) -> Any:
    def order_key(scores: torch.Tensor) -> torch.Tensor:
        key: torch.Tensor = original(scores)
        return torch.where((scores == 0) & torch.signbit(scores), key - 1, key)

    return order_key


@fault("the newer page stays at equal rank", 16, select, "top_pages")
def _(original: Any) -> Any:
    def top_pages(scores: torch.Tensor, valid: torch.Tensor, topk: torch.Tensor, most: int) -> torch.Tensor:
        width = scores.shape[-1]
        best = original(scores.flip(-1), valid.flip(-1), topk, most)
        return torch.sort(torch.where(best < width, width - 1 - best, width), -1).values

    return top_pages


@fault("ties are broken by chance", 18, select, "top_pages")
def _(original: Any) -> Any:
    random = torch.Generator().manual_seed(0)

    def top_pages(scores: torch.Tensor, valid: torch.Tensor, topk: torch.Tensor, most: int) -> torch.Tensor:
        order = torch.randperm(scores.shape[-1], generator=random)
        best = original(scores[..., order], valid[..., order], topk, most)
        padded = torch.cat([order, torch.tensor([len(order)])])
        return torch.sort(padded[best], -1).values

    return top_pages


@fault("pages that tie with the last chosen one are left out", 16, select, "top_pages")
def _(original: Any) -> Any:
    def top_pages(scores: torch.Tensor, valid: torch.Tensor, topk: torch.Tensor, most: int) -> torch.Tensor:
        width = scores.shape[-1]
        best: torch.Tensor = original(scores, valid, topk, most)
        picked = torch.where(best < width, torch.gather(scores, 2, best.clamp(max=width - 1)), torch.inf)
        last = picked.amin(-1, keepdim=True)
        tied = ((scores == last) & valid[:, None]).sum(-1, keepdim=True) > (picked == last).sum(-1, keepdim=True)
        return torch.sort(torch.where(tied & (picked == last), width, best), -1).values

    return top_pages


@fault("a page that ties is listed twice", 16, select, "top_pages")
def _(original: Any) -> Any:
    def top_pages(scores: torch.Tensor, valid: torch.Tensor, topk: torch.Tensor, most: int) -> torch.Tensor:
        width = scores.shape[-1]
        best: torch.Tensor = original(scores, valid, topk, most)
        picked = torch.gather(scores, 2, best.clamp(max=width - 1))
        same = (picked[..., :, None] == scores[..., None, :]) & valid[:, None, None]
        return torch.where((best < width) & same.any(-1), same.int().argmax(-1), best)

    return top_pages


@fault("padded pages are ranked with the real ones", 16, select, "top_pages")
def _(original: Any) -> Any:
    def top_pages(scores: torch.Tensor, valid: torch.Tensor, topk: torch.Tensor, most: int) -> torch.Tensor:
        best: torch.Tensor = original(scores, torch.ones_like(valid), topk, most)
        return best

    return top_pages


@fault("request 0's number of pages holds for the batch", 25, select, "top_pages")
def _(original: Any) -> Any:
    def top_pages(scores: torch.Tensor, valid: torch.Tensor, topk: torch.Tensor, most: int) -> torch.Tensor:
        best: torch.Tensor = original(scores, valid, topk[:1].expand_as(topk), most)
        return best

    return top_pages
