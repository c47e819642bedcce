"""Ops along an axis: reductions, softmax, cumulative sums, pooling. Over the page axis they see real pages only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kvsieve.ops.view import Batch, NodeView, Proxy, Refused, Value

INFINITY = float("inf")

IDENTITY: dict[str, float] = {
    "sum": 0.0,
    "mean": 0.0,
    "var": 0.0,
    "std": 0.0,
    "linalg_vector_norm": 0.0,
    "any": 0.0,
    "all": 1.0,
    "prod": 1.0,
    "amax": -INFINITY,
    "max": -INFINITY,
    "logsumexp": -INFINITY,
    "amin": INFINITY,
    "min": INFINITY,
}


def shifted(value: Value, axes: Sequence[int]) -> tuple[int, ...]:
    """Axes of one segment as axes of the lowered value."""
    return tuple(axis + 1 for axis in axes) if value.batched else tuple(axes)


def masked(batch: Batch, value: Value, axes: Sequence[int], identity: float, floating: bool) -> Value:
    """The value with padding replaced by the identity if the page axis is among ``axes``."""
    if value.page_axis is None or value.page_axis not in axes:
        return value
    number: float | int | bool = identity if floating else bool(identity)
    return Value(batch.filled(value, number), value.shape, True)


class Reduction:
    """sum, mean, amax, amin, prod, any, all, var, std, logsumexp, vector norm; also max/min along one axis."""

    def check(self, view: NodeView) -> None:
        arguments = view.args()
        node = arguments["self"] if "self" in arguments else arguments["input"]
        name = view.op._overloadpacket.__name__
        axes = view.axes(node, arguments.get("dim"))
        if view.page_axis(node) not in axes:
            return
        if name in ("max", "min") and "dim" in arguments and _uses_indices(view):
            raise Refused(
                f"{name} over the page axis is asked for indices, which depend on what else is in the window",
                f"use a{name} for the value, or pages['position'] where it equals the {name}",
            )
        if not view.floating(node) and name not in ("sum", "any", "all"):
            raise Refused(f"{name} over the page axis of a {node.meta['val'].dtype} tensor", "cast it to float first")

    def lower(self, view: NodeView, batch: Batch) -> Value | tuple[Value, ...]:
        arguments = view.args()
        node = arguments["self"] if "self" in arguments else arguments["input"]
        name = view.op._overloadpacket.__name__
        source = batch[node]
        axes = view.axes(node, arguments.get("dim"))
        over_pages = source.page_axis is not None and source.page_axis in axes
        keepdim = bool(arguments.get("keepdim", False))
        if name in ("max", "min") and arguments.get("dim") is not None and not over_pages:
            return _tuple_op(view, batch, view.op, source, axes[0], keepdim)
        value = masked(batch, source, axes, IDENTITY[name], view.floating(node))
        dims = shifted(value, axes)
        if over_pages and name in ("mean", "var", "std"):
            others = math.prod(source.shape[axis] or 1 for axis in axes)
            proxy = self._moment(name, batch, value, dims, keepdim, others, arguments)
        else:
            proxy = self._reduce(name, value.proxy, dims, keepdim, arguments) if dims else value.proxy
        shape = view.shape_of(view.node) if name not in ("max", "min") else _reduced(source.shape, axes, keepdim)
        result = Value(proxy, shape, value.batched)
        return (result,) if name in ("max", "min") and arguments.get("dim") is not None else result

    def _reduce(self, name: str, x: Proxy, dims: tuple[int, ...], keepdim: bool, arguments: dict[str, Any]) -> Proxy:
        if name in ("amax", "max"):
            return torch.amax(x, dims, keepdim)
        if name in ("amin", "min"):
            return torch.amin(x, dims, keepdim)
        if name == "linalg_vector_norm":
            return torch.linalg.vector_norm(x, arguments["ord"], dims, keepdim)
        if name == "prod":
            for dim in reversed(dims):
                x = torch.prod(x, dim, keepdim)
            return x
        if name in ("var", "std"):
            return getattr(torch, name)(x, dims, correction=_correction(arguments), keepdim=keepdim)
        return getattr(torch, name)(x, dims, keepdim)

    def _moment(
        self,
        name: str,
        batch: Batch,
        value: Value,
        dims: tuple[int, ...],
        keepdim: bool,
        others: int,
        arguments: dict[str, Any],
    ) -> Proxy:
        """Mean, variance or deviation over each segment's own pages (times ``others`` elements a page)."""
        count = batch.count(value.rank) * others
        mean = torch.sum(value.proxy, dims, True) / count
        if name != "mean":
            centred = batch.filled(Value(value.proxy - mean, value.shape, True), 0.0)
            mean = torch.sum(centred * centred, dims, True) / torch.clamp(count - _correction(arguments), min=0)
            mean = torch.sqrt(mean) if name == "std" else mean
        return mean if keepdim else torch.squeeze(mean, dims)


class AlongAxis:
    """Shape-preserving ops along one axis: softmax, log_softmax, cumsum, cumprod; the identity hides the padding."""

    def __init__(self, function: Any, identity: float) -> None:
        self.function, self.identity = function, identity

    def check(self, view: NodeView) -> None:
        pass

    def lower(self, view: NodeView, batch: Batch) -> Value:
        arguments = view.args()
        node = arguments["self"]
        axes = view.axes(node, arguments["dim"])
        value = masked(batch, batch[node], axes, self.identity, view.floating(node))
        proxy = self.function(value.proxy, shifted(value, axes)[0]) if axes else self.function(value.proxy[..., None], -1)[..., 0]
        return Value(proxy, view.shape, value.batched)


class WithinPage:
    """Ops along an axis that must not be the page axis: sort, topk, median, argmax, argmin, flip, logcumsumexp."""

    def check(self, view: NodeView) -> None:
        arguments = view.args()
        node = arguments["self"]
        dims = arguments["dims"] if "dims" in arguments else arguments.get("dim")
        if dims is None:
            raise Refused(f"{view.op._overloadpacket.__name__} without dim flattens its input", "name the dim")
        if view.page_axis(node) in view.axes(node, dims):
            name = view.op._overloadpacket.__name__
            raise Refused(
                f"{name} over the page axis of {show(view.shape_of(node))}",
                "pages are ranked by the runtime: return the scores, or use a statistic (sum, mean, amax, softmax, cumsum)",
            )

    def lower(self, view: NodeView, batch: Batch) -> Value | tuple[Value, ...]:
        arguments = dict(view.args())
        node = arguments.pop("self")
        source = batch[node]
        key = "dims" if "dims" in arguments else "dim"
        axes = shifted(source, view.axes(node, arguments[key]))
        arguments[key] = list(axes) if key == "dims" else axes[0]
        result = view.op(source.proxy, **arguments)
        if isinstance(view.node.meta["val"], torch.Tensor):
            return Value(result, view.shape, source.batched)
        return _unpack(view, result, source.batched)


class Pool1d:
    """avg_pool1d, max_pool1d over the last axis; over the page axis the length must stay W (SnapKV's vote)."""

    def __init__(self, name: str) -> None:
        self.name = name

    def check(self, view: NodeView) -> None:
        pass  # a changed page count shows in the output shape, which graph.py refuses for every op

    def lower(self, view: NodeView, batch: Batch) -> Value:
        arguments = view.args()
        source = batch[arguments["x" if self.name == "max" else "self"]]
        last = source.rank - 1
        value = masked(batch, source, (last,), -INFINITY if self.name == "max" else 0.0, True)
        if self.name == "max":
            size = arguments["kernel_size"]
            pooled = torch.nn.functional.max_pool1d(torch.flatten(value.proxy, 0, -2), size, 1, size // 2)
        elif source.page_axis == last and not arguments["count_include_pad"]:
            ones = torch.where(batch.mask(source.rank, last), torch.ones_like(value.proxy), 0.0)
            inside = {**arguments, "count_include_pad": True}
            pooled = _avg_pool(value.proxy, inside) / _avg_pool(ones, inside)
        else:
            pooled = _avg_pool(value.proxy, arguments)
        sizes: list[Any] = batch.sizes(view.shape)
        sizes = [batch.segments, *sizes] if value.batched else sizes
        return Value(torch.reshape(pooled, sizes), view.shape, value.batched)


def _avg_pool(x: Proxy, arguments: dict[str, Any]) -> Proxy:
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
    return torch.nn.functional.avg_pool1d(torch.flatten(x, 0, -2), *(arguments[name] for name in names))


def _correction(arguments: dict[str, Any]) -> float:
    if "unbiased" in arguments:
        return 1.0 if arguments["unbiased"] else 0.0
    return 1.0 if arguments["correction"] is None else float(arguments["correction"])


def _reduced(shape: Sequence[int | None], axes: Sequence[int], keepdim: bool) -> tuple[int | None, ...]:
    if keepdim:
        return tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in axes)


def _uses_indices(view: NodeView) -> bool:
    return any(user.args[1] == 1 and user.users for user in view.node.users)


def _tuple_op(view: NodeView, batch: Batch, op: Any, source: Value, axis: int, keepdim: bool) -> tuple[Value, ...]:
    (dim,) = shifted(source, (axis,)) if source.rank else (-1,)
    return _unpack(view, op(source.proxy, dim, keepdim), source.batched)


def _unpack(view: NodeView, result: Proxy, batched: bool) -> tuple[Value, ...]:
    shapes = {user.args[1]: view.shape_of(user) for user in view.node.users}
    return tuple(Value(result[index], shapes.get(index, ()), batched) for index in range(max(shapes, default=0) + 1))


def show(shape: Sequence[int | None]) -> str:
    """A one-segment shape for messages: the page axis prints as W."""
    return "[" + ", ".join("W" if size is None else str(size) for size in shape) + "]"
