"""Faults of summaries, scores and state: what the eager backend does with a flow's lowered graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kvsieve.backends import eager
from kvsieve.backends.eager import EagerBackend
from kvsieve.layers import Layers
from kvsieve.verify.mutants.base import Table, with_columns
from kvsieve.window import Window

TABLE = Table()
fault = TABLE.fault

LONG = 2**15

Change = Callable[[torch.Tensor, torch.Tensor, Window], torch.Tensor]
"""State before and after a step, [H, B, W, *shape], and the window -> what is stored instead."""


def _state_changed(original: Any, change: Change) -> Any:
    """``score`` whose state goes through ``change`` before it is stored."""

    def score(self: Any, flow: Any, q: Any, pool: Any, window: Window) -> Any:
        rows = window.rows
        before = {name: field[:, rows].clone() for name, field in pool.state.items()}
        scores = original(self, flow, q, pool, window)
        for name, field in pool.state.items():
            after = field[:, rows].clone()
            valid = window.valid.reshape(1, *window.valid.shape, *[1] * (after.dim() - 3))
            wrong = change(before[name], torch.where(valid, after, 0), window)
            field[:, rows] = torch.where(valid, wrong, after).to(field.dtype)
        return scores

    return score


@fault("state is summed over the batch", 1, EagerBackend, "score")
def _(original: Any) -> Any:
    return _state_changed(original, lambda before, after, window: after.sum(1, keepdim=True).expand_as(after))


@fault("state of KV head 0 serves all KV heads", 2, EagerBackend, "score")
def _(original: Any) -> Any:
    return _state_changed(original, lambda before, after, window: after[:1].expand_as(after))


@fault("state is stored one page late", None, EagerBackend, "score")
def _(original: Any) -> Any:
    return _state_changed(original, lambda before, after, window: after.roll(1, 2))


@fault("state of pages that entered after the prompt never moves", 6, EagerBackend, "score")
def _(original: Any) -> Any:
    prompt: dict[int, int] = {}

    def change(before: torch.Tensor, after: torch.Tensor, window: Window) -> torch.Tensor:
        first = prompt.setdefault(after.shape[0] * 100 + after.shape[1], after.shape[2])
        return torch.cat([after[:, :, :first], before[:, :, first:]], 2)

    return _state_changed(original, change)


@fault("state is rounded to bfloat16 when it is stored", None, EagerBackend, "score")
def _(original: Any) -> Any:
    return _state_changed(original, lambda before, after, window: after.bfloat16().to(after.dtype))


@fault("state adds up without the old value's decay", 31, EagerBackend, "score")
def _(original: Any) -> Any:
    return _state_changed(original, lambda before, after, window: torch.maximum(before, after))


def _queries_changed(original: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``score`` of other queries, q [B, H, G, D]."""

    def score(self: Any, flow: Any, q: torch.Tensor, pool: Any, window: Any) -> Any:
        return original(self, flow, change(q), pool, window)

    return score


@fault("queries of a group are averaged before the bound", 5, EagerBackend, "score")
def _(original: Any) -> Any:
    return _queries_changed(original, lambda q: q.mean(2, keepdim=True).expand_as(q))


@fault("queries are dealt to KV heads in turn", 3, EagerBackend, "score")
def _(original: Any) -> Any:
    return _queries_changed(original, lambda q: q.flatten(1, 2).unflatten(1, (q.shape[2], q.shape[1])).transpose(1, 2))


@fault("only the first query head of a group is scored", 22, EagerBackend, "score")
def _(original: Any) -> Any:
    return _queries_changed(original, lambda q: q[:, :, :1].expand_as(q))


@fault("queries of request 0 score every request", 25, EagerBackend, "score")
def _(original: Any) -> Any:
    return _queries_changed(original, lambda q: q[:1].expand_as(q))


@fault("scores beyond 32,768 tokens are 0", 29, EagerBackend, "score")
def _(original: Any) -> Any:
    def score(self: Any, flow: Any, q: Any, pool: Any, window: Window) -> Any:
        scores = original(self, flow, q, pool, window)
        return torch.where(window.position[:, None] < LONG, scores, 0.0)

    return score


@fault("scores of the previous step are ranked", 32, EagerBackend, "score")
def _(original: Any) -> Any:
    last: dict[int, torch.Tensor] = {}

    def score(self: Any, flow: Any, q: Any, pool: Any, window: Any) -> Any:
        scores = original(self, flow, q, pool, window)
        old = last.get(id(pool), scores)
        last[id(pool)] = scores
        return old if old.shape == scores.shape else scores

    return score


@fault("a flow sees ages that count the newest token twice", None, EagerBackend, "score")
def _(original: Any) -> Any:
    def score(self: Any, flow: Any, q: Any, pool: Any, window: Window) -> Any:
        return original(self, flow, q, pool, replace(window, lengths=window.lengths + 1))

    return score


@fault("a page's position is that of its block", 19, EagerBackend, "score")
def _(original: Any) -> Any:
    def score(self: Any, flow: Any, q: Any, pool: Any, window: Window) -> Any:
        position = window.blocks.float() * pool.page_size
        return original(self, flow, q, pool, with_columns(window, position=position))

    return score


@fault("positions start at 0 in the window", 27, EagerBackend, "score")
def _(original: Any) -> Any:
    def score(self: Any, flow: Any, q: Any, pool: Any, window: Window) -> Any:
        return original(self, flow, q, pool, with_columns(window, position=window.position - window.position[:, :1]))

    return score


@fault("two fields are gathered into one hidden buffer", 34, eager, "gather_pages")
def _(original: Any) -> Any:
    buffers: dict[Any, torch.Tensor] = {}

    def gather_pages(field: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        pages: torch.Tensor = original(field, index)
        buffer = buffers.setdefault((tuple(pages.shape), pages.dtype), torch.empty_like(pages))
        return buffer.copy_(pages)

    return gather_pages


@fault("flows compute in bfloat16", 17, eager, "_run")
def _(original: Any) -> Any:
    def run(program: Any, valid: Any, fields: Any) -> Any:
        coarse = {name: x.bfloat16() if x.is_floating_point() else x for name, x in fields.items()}
        return original(program, valid, coarse)

    return run


def _summaries_changed(original: Any, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Any:
    """``summarize`` of other pages, k [N, p, D], v [N, p, Dv]."""

    def run(program: Any, valid: Any, fields: dict[str, torch.Tensor]) -> Any:
        return original(program, valid, fields if "q" in fields else change(fields))

    return run


@fault("a page is summarised without its last token", None, eager, "_run")
def _(original: Any) -> Any:
    def change(fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: torch.cat([x[:, :1], x[:, :-1]], 1) for name, x in fields.items()}

    return _summaries_changed(original, change)


@fault("V is summarised from K", 33, eager, "_run")
def _(original: Any) -> Any:
    def change(fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        k, v = fields["k"], fields["v"]
        return {"k": k, "v": torch.nn.functional.pad(k, (0, max(0, v.shape[2] - k.shape[2])))[..., : v.shape[2]]}

    return _summaries_changed(original, change)


@fault("KV head 0 summarises for all KV heads", 2, EagerBackend, "summarize")
def _(original: Any) -> Any:
    def summarize(self: Any, flow: Any, pool: Any, blocks: torch.Tensor) -> None:
        original(self, flow, pool, blocks)
        for field in pool.summaries.values():
            field[:, blocks] = field[:1, blocks].clone()

    return summarize


@fault("flows are traced with the default scale", 24, Layers, "_prepare")
def _(original: Any) -> Any:
    def prepare(self: Any, index: Any, d: int, dv: int, group: int, scale: float, device: Any) -> Any:
        return original(self, index, d, dv, group, d**-0.5, device)

    return prepare


@fault("every layer is layer 0 to a flow", None, Layers, "_prepare")
def _(original: Any) -> Any:
    def prepare(self: Any, index: int, *geometry: Any) -> Any:
        return original(self, 0, *geometry)

    return prepare
