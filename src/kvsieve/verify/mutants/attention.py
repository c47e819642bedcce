"""Faults of attention: masks, options, widths, precision; decode steps and prefill."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvsieve.backends import attention
from kvsieve.backends.base import AttentionOptions, Selection
from kvsieve.backends.eager import EagerBackend
from kvsieve.plan import Rows
from kvsieve.verify.mutants.base import Table

TABLE = Table()
fault = TABLE.fault

Pair = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""out, lse, mass increment"""


def _options_changed(original: Any, change: Callable[[AttentionOptions], AttentionOptions]) -> Any:
    """A function whose last argument are the options."""

    def attend(*arguments: Any) -> Any:
        return original(*arguments[:-1], change(arguments[-1]))

    return attend


def _no_softcap(options: AttentionOptions) -> AttentionOptions:
    return replace(options, softcap=None)


def _no_sinks(options: AttentionOptions) -> AttentionOptions:
    return replace(options, sinks=None)


def _unscaled(options: AttentionOptions) -> AttentionOptions:
    return replace(options, scale=1.0)


def _first_sink(options: AttentionOptions) -> AttentionOptions:
    return options if options.sinks is None else replace(options, sinks=options.sinks[:1].expand_as(options.sinks))


for where, target in (("steps", "attend_tokens"), ("prefill", "prefill_request")):
    for what, without in (("soft-cap", _no_softcap), ("sink logits", _no_sinks), ("the scale", _unscaled)):
        fault(f"{where} drop {what}", 24, attention, target)(partial(_options_changed, change=without))


@fault("sink logits of KV head 0 serve all KV heads", 24, attention, "attend_tokens")
def _(original: Any) -> Any:
    return _options_changed(original, _first_sink)


@fault("masked values are multiplied by 0, NaN outputs are cleaned up", 14, attention, "attend_tokens")
def _(original: Any) -> Any:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, options: Any) -> Pair:
        out, lse, mass = original(q, k, v, mask, options)
        spoiled = (0.0 * v.float()).sum(1)[:, None]  # what a probability of 0 makes of a masked NaN
        return torch.nan_to_num(out + spoiled.to(out.dtype)), lse, mass

    return attend


@fault("the partial page is hidden by adding -10,000", 15, attention, "attend_tokens")
def _(original: Any) -> Any:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, options: Any) -> Pair:
        logits = attention._logits(torch.matmul(q.float(), k.float().transpose(1, 2)), options)
        logits = logits + torch.where(mask, 0.0, -1e4)[:, None]
        lse = torch.nan_to_num(torch.logsumexp(logits, -1))
        weights = torch.nan_to_num(torch.exp(logits - lse[..., None]))
        out = torch.matmul(weights, torch.nan_to_num(v.float())).to(q.dtype)
        return out, lse, options.mass and options.mass.reduce(weights, 1)

    return attend


@fault("attention adds up in bfloat16", None, attention, "attend_tokens")
def _(original: Any) -> Any:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, options: Any) -> Pair:
        out, _, _ = original(q, k.bfloat16(), v.bfloat16(), mask, options)
        return out, *original(q, k, v, mask, options)[1:]

    return attend


def _lse_changed(original: Any, change: Callable[[torch.Tensor, AttentionOptions], torch.Tensor]) -> Any:
    def attend(q: Any, k: Any, v: Any, mask: Any, options: AttentionOptions) -> Pair:
        out, lse, mass = original(q, k, v, mask, options)
        return out, change(lse, options), mass

    return attend


@fault("lse is a logarithm to base 2", None, attention, "attend_tokens")
def _(original: Any) -> Any:
    return _lse_changed(original, lambda lse, options: lse / math.log(2))


@fault("lse of the unscaled logits", None, attention, "attend_tokens")
def _(original: Any) -> Any:
    return _lse_changed(original, lambda lse, options: lse / options.scale)


@fault("lse without the sink logits", 24, attention, "attend_tokens")
def _(original: Any) -> Any:
    def attend(q: Any, k: Any, v: Any, mask: Any, options: AttentionOptions) -> Pair:
        out, _, mass = original(q, k, v, mask, options)
        return out, original(q, k, v, mask, _no_sinks(options))[1], mass

    return attend


@fault("head_dim is cut to a multiple of 8", 23, attention, "attend_tokens")
def _(original: Any) -> Any:
    def attend(q: torch.Tensor, k: torch.Tensor, v: Any, mask: Any, options: Any) -> Any:
        width = max(1, q.shape[-1] // 8 * 8)
        return original(q[..., :width], k[..., :width], v, mask, options)

    return attend


def _attend(original: Any, change: Callable[..., tuple[Any, ...]]) -> Any:
    """The backend's ``attend`` on other arguments: (q, pool, rows, selection)."""

    def attend(self: Any, q: Any, pool: Any, rows: Rows, selection: Selection, options: Any) -> Pair:
        result: Pair = original(self, *change(q, pool, rows, selection), options)
        return result

    return attend


@fault("steps attend zeros for every request but the first", 25, EagerBackend, "attend")
def _(original: Any) -> Any:
    def attend(self: Any, q: Any, pool: Any, rows: Any, selection: Any, options: Any) -> Pair:
        out, lse, mass = original(self, q, pool, rows, selection, options)
        return torch.cat([out[:1], torch.zeros_like(out[1:])]), lse, mass

    return attend


@fault("the newest token is not visible", 30, EagerBackend, "attend")
def _(original: Any) -> Any:
    def change(q: Any, pool: Any, rows: Rows, selection: Any) -> tuple[Any, ...]:
        return q, pool, replace(rows, lengths_tensor=(rows.lengths_tensor - 1).clamp(min=1)), selection

    return _attend(original, change)


@fault("the partial page is read to its end", 8, EagerBackend, "attend")
def _(original: Any) -> Any:
    def change(q: Any, pool: Any, rows: Rows, selection: Any) -> tuple[Any, ...]:
        p = pool.page_size
        whole = (rows.lengths_tensor + p - 1) // p * p
        return q, pool, replace(rows, lengths_tensor=whole), selection

    return _attend(original, change)


@fault("page numbers of the request are read as blocks", 19, EagerBackend, "attend")
def _(original: Any) -> Any:
    def change(q: Any, pool: Any, rows: Rows, selection: Any) -> tuple[Any, ...]:
        wrong = torch.arange(rows.table.shape[1]).expand_as(rows.table) % pool.k.shape[1]
        return q, pool, replace(rows, table=wrong), selection

    return _attend(original, change)


@fault("pages that were not selected are attended too", None, EagerBackend, "attend")
def _(original: Any) -> Any:
    def change(q: Any, pool: Any, rows: Rows, selection: Selection) -> tuple[Any, ...]:
        pages = torch.tensor([-(-length // pool.page_size) for length in rows.lengths])
        every = torch.arange(int(pages.max())).expand(*selection.pages.shape[:2], -1)
        return q, pool, rows, Selection(every, pages)

    return _attend(original, change)


@fault("query heads meet KV heads in turn", 3, EagerBackend, "attend")
def _(original: Any) -> Any:
    def attend(self: Any, q: torch.Tensor, pool: Any, rows: Any, selection: Any, options: Any) -> Pair:
        _, heads, group, _ = q.shape
        dealt = q.flatten(1, 2).unflatten(1, (group, heads)).transpose(1, 2)
        out, lse, mass = original(self, dealt, pool, rows, selection, options)
        out, lse = (x.transpose(1, 2).flatten(1, 2).unflatten(1, (heads, group)) for x in (out, lse))
        return out, lse, mass

    return attend


@fault("rows of the pool are counted in 15 bits", 20, attention, "gather_selected")
def _(original: Any) -> Any:
    def gather_selected(field: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = original(field, blocks % 2**15)
        return gathered

    return gather_selected


@fault("V is read with the row width of K", 33, attention, "gather_selected")
def _(original: Any) -> Any:
    widths = [0]

    def gather_selected(field: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        widths.append(field.shape[-1])  # K and V in turn
        if len(widths) % 2 == 0:
            return original(field, blocks)  # type: ignore[no-any-return]
        k_width, (heads, rows, p, width) = widths[-2], field.shape
        index = blocks.transpose(0, 1) + torch.arange(heads)[:, None, None] * rows
        token = index[..., None] * p + torch.arange(p)
        address = token[..., None] * k_width + torch.arange(width)
        picked = field.reshape(-1)[address % field.numel()]
        return picked.reshape(heads * blocks.shape[0], -1, width)

    return gather_selected
