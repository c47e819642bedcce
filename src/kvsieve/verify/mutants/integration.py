"""Faults of the Transformers integration: padding, positions, rows, options, skipped and sliding layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvsieve.backends.base import AttentionOptions
from kvsieve.runtime import RequestId, Runtime
from kvsieve.verify.mutants.base import TRANSFORMERS, Table

TABLE = Table(TRANSFORMERS)
fault = TABLE.fault

CACHE = "kvsieve.integrations.transformers.cache"
LAYERS = "kvsieve.integrations.transformers.layers"
FORWARD = "kvsieve.integrations.transformers.forward"
ATTENTION = "kvsieve.integrations.transformers.attention"


@fault("padding is stored as tokens", 13, CACHE, "new_tokens")
def _(original: Any) -> Any:
    return lambda mask, seen, batch, rows: torch.ones(batch, rows, dtype=torch.bool)


@fault("heads and tokens are taken for each other", 3, FORWARD, "_flatten")
def _(original: Any) -> Any:
    def flatten(x: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        batch, heads, rows, width = x.shape
        mixed = x.reshape(batch, rows, heads, width)
        return mixed.flatten(0, 1) if real is None else mixed[real]

    return flatten


def _options(original: Any, **dropped: Any) -> Any:
    def options(scale: float, softcap: float | None, sinks: torch.Tensor | None) -> AttentionOptions:
        made: AttentionOptions = original(**{"scale": scale, "softcap": softcap, "sinks": sinks, **dropped})
        return made

    return options


@fault("the model's soft-cap is ignored", 24, ATTENTION, "AttentionOptions")
def _(original: Any) -> Any:
    return _options(original, softcap=None)


@fault("the model's sink logits are ignored", 24, ATTENTION, "AttentionOptions")
def _(original: Any) -> Any:
    return _options(original, sinks=None)


@fault("the model's scale is ignored", 24, ATTENTION, "AttentionOptions")
def _(original: Any) -> Any:
    return _options(original, scale=1.0)


@fault("sliding layers attend everything", 24, LAYERS, "dense_attention")
def _(original: Any) -> Any:
    def attend(query: Any, key: Any, value: Any, mask: Any, options: Any) -> Any:
        return original(query, key, value, None, options)

    return attend


@fault("dense layers repeat K heads in turn", 22, ATTENTION, "attend_masked")
def _(original: Any) -> Any:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: Any, options: Any) -> Any:
        group = q.shape[1] // k.shape[1]
        return original(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), allowed, options)

    return attend


@fault("skipped layers are sparse all the same", None, CACHE, "Runtime")
def _(original: Any) -> Any:
    def runtime(*arguments: Any, **options: Any) -> Any:
        return original(*arguments, **{**options, "dense_layers": ()})

    return runtime


@fault("rows of a batch get each other's outputs", 25, f"{FORWARD}:Forward", "attend")
def _(original: Any) -> Any:
    def attend(self: Any, *arguments: Any) -> torch.Tensor:
        out: torch.Tensor = original(self, *arguments)
        return out.flip(0)

    return attend


@fault("beam search leaves the rows where they are", None, f"{CACHE}:SparseCache", "_pick_rows")
def _(original: Any) -> Any:
    return lambda self, rows: None


@fault("beam search reorders twice", None, f"{CACHE}:SparseCache", "_pick_rows")
def _(original: Any) -> Any:
    def pick(self: Any, rows: list[int]) -> None:
        original(self, rows)
        original(self, rows)

    return pick


@fault("a rolled-back draft keeps one token", None, Runtime, "crop")
def _(original: Any) -> Any:
    def crop(self: Runtime, requests: Sequence[RequestId], lengths: Sequence[int]) -> None:
        longer = [min(length + 1, self.length(r)) for r, length in zip(requests, lengths, strict=True)]
        original(self, requests, longer)

    return crop


@fault("positions stop at 8", 2, f"{LAYERS}:PagedLayer", "get_seq_length")
def _(original: Any) -> Any:
    return lambda self: min(8, self.length)
