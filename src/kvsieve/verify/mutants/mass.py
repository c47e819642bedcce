"""Faults of the attention mass: its seed, its decay, its store, its way through the life of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvsieve.backends import attention
from kvsieve.backends.base import AttentionOptions
from kvsieve.call import Call
from kvsieve.mass import FIELDS, AttentionMass, MassLedger
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.queries import KeptQueries
from kvsieve.paging.table import RequestTables
from kvsieve.plan import Plan
from kvsieve.verify.mutants.base import MASS, Table

TABLE = Table(MASS)
fault = TABLE.fault


def _add_changed(original: Any, change: Any) -> Any:
    """``add_mass`` with other values [..., H, K, p]."""

    def add(self: LayerPool, rows: torch.Tensor, values: torch.Tensor) -> None:
        original(self, rows, change(values))

    return add


@fault("attention is summed over the batch", 1, LayerPool, "add_mass")
def _(original: Any) -> Any:
    return _add_changed(original, lambda values: values.sum(0, True).expand_as(values) if values.dim() == 4 else values)


@fault("attention of KV head 0 is every KV head's mass", 2, LayerPool, "add_mass")
def _(original: Any) -> Any:
    return _add_changed(original, lambda values: values[..., :1, :, :].expand_as(values))


@fault("a token's mass is stored at its neighbour", None, LayerPool, "add_mass")
def _(original: Any) -> Any:
    return _add_changed(original, lambda values: values.roll(1, -1))


@fault("page sums of the mass are not kept", None, LayerPool, "add_mass")
def _(original: Any) -> Any:
    def add(self: LayerPool, rows: torch.Tensor, values: torch.Tensor) -> None:
        before = self.state["mass_sum"].clone()
        original(self, rows, values)
        self.state["mass_sum"].copy_(before)

    return add


@fault("steps add no mass", None, Call, "_add_mass")
def _(original: Any) -> Any:
    return lambda *arguments: None


@fault("stored mass is never rebased", None, LayerPool, "rebase_mass")
def _(original: Any) -> Any:
    return lambda *arguments: None


@fault("rebasing leaves the last page out", None, LayerPool, "rebase_mass")
def _(original: Any) -> Any:
    return lambda self, rows, factor: original(self, rows[:-1], factor)


@fault("a preempted request forgets the queries that do not count yet", None, RequestTables, "release")
def _(original: Any) -> Any:
    def release(self: RequestTables, request: Any) -> None:
        original(self, request)
        self[request].mass.pending = 0

    return release


@fault("a window keeps no queries for a crop", None, MassLedger, "call")
def _(original: Any) -> Any:
    def call(self: MassLedger, mass: AttentionMass, start: int, count: int, decode: bool, croppable: int) -> Any:
        return original(self, mass, start, count, decode, 0 if mass.window else croppable)

    return call


@fault("pages enter with the mass of their last owner", 10, LayerPool, "enter")
def _(original: Any) -> Any:
    def enter(self: LayerPool, rows: torch.Tensor) -> None:
        kept = {name: torch.nan_to_num(self.state[name][:, rows]) for name in FIELDS if name in self.state}
        original(self, rows)
        for name, value in kept.items():
            self.state[name][:, rows] = value

    return enter


@fault("prompt queries are not decayed", None, AttentionMass, "row_weights")
def _(original: Any) -> Any:
    return lambda self, rows: [1.0] * rows


@fault("the last eight prompt queries stand for all", 4, AttentionMass, "significant")
def _(original: Any) -> Any:
    return lambda self, rows: min(rows, 8)


@fault("query heads of a group are averaged", None, AttentionMass, "reduce")
def _(original: Any) -> Any:
    return lambda self, probabilities, dim: probabilities.mean(dim)


@fault("prompt queries see later tokens", 4, attention, "column_sums")
def _(original: Any) -> Any:
    def sums(q: torch.Tensor, k: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        mass = options.mass
        assert mass is not None
        logits = torch.einsum("nhgd,hld->hgnl", q.float(), k.float()) * options.scale
        received = mass.reduce(torch.softmax(logits, -1), 1)
        return torch.einsum("n,hnl->hl", torch.tensor(mass.row_weights(len(q)), dtype=torch.float32), received)

    return sums


@fault("prompt mass drops sink logits", 24, attention, "column_sums")
def _(original: Any) -> Any:
    return lambda q, k, options: original(q, k, replace(options, sinks=None))


@fault("prompt mass drops the soft-cap", 24, attention, "column_sums")
def _(original: Any) -> Any:
    return lambda q, k, options: original(q, k, replace(options, softcap=None))


@fault("kept queries are counted in reverse order", None, KeptQueries, "first")
def _(original: Any) -> Any:
    return lambda self, request, count: original(self, request, count).flip(0)


@fault("only the newest call's queries are kept", 27, KeptQueries, "keep")
def _(original: Any) -> Any:
    def keep(self: KeptQueries, request: Any, surviving: int, new: torch.Tensor, count: int) -> None:
        padding = torch.zeros(max(0, count - len(new)), *new.shape[1:], dtype=new.dtype)
        original(self, request, 0, torch.cat([padding, new]), count)

    return keep


@fault("a crop leaves the queries of the tokens it takes back", None, MassLedger, "crop")
def _(original: Any) -> Any:
    return lambda self, removed: None


@fault("a fork forgets the queries that do not count yet", None, RequestTables, "fork")
def _(original: Any) -> Any:
    def fork(self: RequestTables, request: Any) -> Any:
        twin, rows = original(self, request)
        self[twin].mass = replace(self[request].mass, pending=0)
        return twin, rows

    return fork


@fault("a fork shares the account of its source", 11, RequestTables, "fork")
def _(original: Any) -> Any:
    def fork(self: RequestTables, request: Any) -> Any:
        twin, rows = original(self, request)
        self[twin].mass = self[request].mass
        return twin, rows

    return fork


@fault("a step's mass is stored without its unit", None, MassLedger, "_update")
def _(original: Any) -> Any:
    return lambda self, *arguments: replace(original(self, *arguments), unit=1.0)


@fault("a query decays the mass twice", None, MassLedger, "_update")
def _(original: Any) -> Any:
    def update(self: MassLedger, mass: AttentionMass, rows: int, first: int) -> Any:
        self.age += 1
        return original(self, mass, rows, first)

    return update


@fault("score reads the mass as it is stored", None, Plan, "_window")
def _(original: Any) -> Any:
    def window(self: Plan, *arguments: Any) -> Any:
        result = original(self, *arguments)
        return replace(result, mass_scale=torch.ones_like(result.mass_scale))

    return window
