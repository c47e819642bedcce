"""Faults of the lowering: masks forgotten, wrong axes, wrong counts, when one segment becomes a batch."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from kvsieve.ops import along, reduce, shape
from kvsieve.ops.along import AlongAxis, AvgPool, MaxPool
from kvsieve.ops.reduce import Reduction
from kvsieve.ops.shape import Join
from kvsieve.ops.view import Batch, NodeView, Value
from kvsieve.verify.mutants.base import Table

TABLE = Table()
fault = TABLE.fault


def _unmasked(original: Any, module: ModuleType, name: str) -> Any:
    """A rule that leaves the padding in for one op."""

    def lower(self: Any, view: NodeView, batch: Batch) -> Any:
        if view.name != name:
            return original(self, view, batch)
        with mock.patch.object(module, "masked", lambda batch, value, *rest: value):
            return original(self, view, batch)

    return lower


for kind, op in (
    (AlongAxis, "softmax"),
    (AvgPool, "avg_pool1d"),
    (MaxPool, "max_pool1d"),
    (Reduction, "sum"),
    (Reduction, "mean"),
    (Reduction, "amax"),
    (Reduction, "amin"),
    (Reduction, "logsumexp"),
):
    fault(f"{op} over the pages sees the padding", 14, kind, "lower")(
        partial(_unmasked, module=reduce if kind is Reduction else along, name=op)
    )


@fault("a mean is divided by the padded width", None, Batch, "count")
def _(original: Any) -> Any:
    def count(self: Batch, rank: int) -> Any:
        number = torch.sum(torch.ones_like(self.valid), 1, dtype=torch.float32)
        for _ in range(rank):
            number = torch.unsqueeze(number, -1)
        return number

    return count


@fault("a deviation counts the padding", None, reduce, "_moment")
def _(original: Any) -> Any:
    def moment(name: str, *arguments: Any) -> Any:
        if name == "mean":
            return original(name, *arguments)
        with mock.patch.object(Batch, "filled", lambda self, value, number: value):
            return original(name, *arguments)

    return moment


@fault("a deviation ignores its correction", None, reduce, "_correction")
def _(original: Any) -> Any:
    return lambda arguments: 1.0


def _along(original: Any, name: str, function: Any) -> Any:
    """softmax and its like with another function of (x, dim)."""

    def lower(self: AlongAxis, view: NodeView, batch: Batch) -> Any:
        rule = AlongAxis(function, self.identity) if name in view.name else self
        return original(rule, view, batch)

    return lower


@fault("softmax runs over the batch", 1, AlongAxis, "lower")
def _(original: Any) -> Any:
    return _along(original, "softmax", lambda x, dim: torch.softmax(x, 0))


@fault("softmax runs over the query heads", None, AlongAxis, "lower")
def _(original: Any) -> Any:
    return _along(original, "softmax", lambda x, dim: torch.softmax(x, max(1, dim - 1)))


@fault("softmax lacks its normalisation", None, AlongAxis, "lower")
def _(original: Any) -> Any:
    return _along(original, "softmax", lambda x, dim: torch.exp(x - torch.amax(x, dim, True)))


@fault("cumsum runs from the newest page", None, AlongAxis, "lower")
def _(original: Any) -> Any:
    return _along(original, "cumsum", lambda x, dim: torch.flip(torch.cumsum(torch.flip(x, (dim,)), dim), (dim,)))


@fault("cumsum sees the padding", None, AlongAxis, "lower", "the padding stands behind the pages: no sum reaches it")
def _(original: Any) -> Any:
    return _unmasked(original, along, "cumsum")


def _reduced(original: Any, name: str, function: Any) -> Any:
    """Reductions of one name by another function of (x, dims, keepdim)."""

    def reduced(op: str, x: Any, dims: tuple[int, ...], keepdim: bool, arguments: Any) -> Any:
        return function(x, dims, keepdim) if op == name else original(op, x, dims, keepdim, arguments)

    return reduced


@fault("the maximum over query heads is a mean", 5, reduce, "_reduce")
def _(original: Any) -> Any:
    return _reduced(original, "amax", torch.mean)


@fault("a sum leaves out the last element", 23, reduce, "_reduce")
def _(original: Any) -> Any:
    return _reduced(original, "sum", lambda x, dims, keepdim: torch.sum(x[..., :-1], dims, keepdim))


@fault("a vote at the window's edge counts pages that do not exist", None, AvgPool, "lower")
def _(original: Any) -> Any:
    arguments = NodeView.args

    def counted(self: NodeView) -> dict[str, Any]:
        return {**arguments(self), "count_include_pad": True}

    def lower(self: AvgPool, view: NodeView, batch: Batch) -> Value:
        with mock.patch.object(NodeView, "args", counted):
            pooled: Value = original(self, view, batch)
        return pooled

    return lower


@fault("joined tensors come in reverse order", None, shape.Join, "lower")
def _(original: Any) -> Any:
    arguments = NodeView.args

    def reverse(self: NodeView) -> dict[str, Any]:
        bound = arguments(self)
        return {**bound, "tensors": list(reversed(bound["tensors"]))}

    def lower(self: Join, view: NodeView, batch: Batch) -> Value:
        with mock.patch.object(NodeView, "args", reverse):
            joined: Value = original(self, view, batch)
        return joined

    return lower
