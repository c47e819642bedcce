"""Reductions. Over the page axis they see the segment's own pages only: padding is replaced by the identity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kvsieve.ops.view import Batch, NodeView, Proxy, Refused, Shape, Value, show, unpack

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


def masked(batch: Batch, value: Value, axes: Sequence[int], identity: float, dtype: torch.dtype) -> Value:
    """The value with padding replaced by the identity if the page axis is among ``axes``."""
    if value.page_axis is None or value.page_axis not in axes:
        return value
    return batch.filled(value, _number(identity, dtype))


def cast(value: Value, dtype: torch.dtype | None) -> Value:
    """The value in the dtype that an op was asked to compute in, if it was."""
    return value if dtype is None else Value(value.proxy.to(dtype), value.shape, value.batched)


class Reduction:
    """sum, mean, amax, amin, prod, any, all, var, std, logsumexp, vector norm; also max and min along one axis."""

    over_pages = "reduced over the segment's own pages; max and min give values there, no indices"

    def check(self, view: NodeView) -> None:
        node, axes, arguments = _operand(view)
        if view.page_axis(node) in axes and _is_pair(view.name, arguments) and _uses_indices(view):
            raise Refused(
                f"{view.name} over the page axis is asked for indices, which depend on what else is in the window",
                f"use a{view.name} for the value, or pages['position'] where it equals the {view.name}",
            )
        if 0 in (view.shape_of(node)[axis] for axis in axes) and view.name not in ("sum", "prod", "any", "all"):
            raise Refused(
                f"{view.name} over an empty axis of {show(view.shape_of(node))}", "reduce at least one element"
            )

    def lower(self, view: NodeView, batch: Batch) -> Value | tuple[Value, ...]:
        node, axes, arguments = _operand(view)
        dtype = arguments.get("dtype")
        source = cast(batch[node], dtype)
        keepdim = bool(arguments.get("keepdim", False))
        shape = _reduced(source.shape, axes, keepdim)
        if not source.rank:  # torch lets a scalar be reduced over "its" axis 0
            source, axes, keepdim = Value(source.proxy[..., None], (1,), source.batched), (0,), False
        pair, over_pages = _is_pair(view.name, arguments), source.page_axis in axes
        if pair and not over_pages:
            return unpack(view, view.op(source.proxy, *source.shifted(axes), keepdim), source.batched)
        identity = INFINITY if arguments.get("ord", 0) < 0 else IDENTITY[view.name]
        value = masked(batch, source, axes, identity, dtype or view.dtype(node))
        if over_pages and view.name in ("mean", "var", "std"):
            proxy = _moment(view.name, batch, value, axes, keepdim, arguments)
        else:
            proxy = _reduce(view.name, value.proxy, value.shifted(axes), keepdim, arguments)
        result = Value(proxy, shape, value.batched)
        return (result,) if pair else result


def _operand(view: NodeView) -> tuple[fx.Node, tuple[int, ...], dict[str, Any]]:
    arguments = view.args()
    node = arguments["self"]
    return node, view.axes(node, arguments.get("dim")), arguments


def _is_pair(name: str, arguments: dict[str, Any]) -> bool:
    return name in ("max", "min") and "dim" in arguments


def _uses_indices(view: NodeView) -> bool:
    return any(user.args[1] == 1 and user.users for user in view.node.users)


def _reduce(name: str, x: Proxy, dims: tuple[int, ...], keepdim: bool, arguments: dict[str, Any]) -> Proxy:
    if name in ("max", "min"):
        return getattr(torch, "a" + name)(x, dims, keepdim)
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
    name: str, batch: Batch, value: Value, axes: tuple[int, ...], keepdim: bool, arguments: dict[str, Any]
) -> Proxy:
    """Mean, variance or deviation over each segment's own pages (and the elements of a page, if reduced too)."""
    dims = value.shifted(axes)
    count = batch.count(value.rank) * math.prod(
        size for size in (value.shape[axis] for axis in axes) if size is not None
    )
    result = torch.sum(value.proxy, dims, True) / count
    if name != "mean":
        centred = batch.filled(Value(value.proxy - result, value.shape, True), 0.0).proxy
        result = torch.sum(centred * centred, dims, True) / torch.clamp(count - _correction(arguments), min=0)
        result = torch.sqrt(result) if name == "std" else result
    return result if keepdim else torch.squeeze(result, dims)


def _correction(arguments: dict[str, Any]) -> float:
    if "unbiased" in arguments:
        return 1.0 if arguments["unbiased"] else 0.0
    return 1.0 if arguments["correction"] is None else float(arguments["correction"])


def _reduced(shape: Shape, axes: Sequence[int], keepdim: bool) -> Shape:
    if keepdim:
        return tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in axes)


def _number(identity: float, dtype: torch.dtype) -> float | bool:
    """The identity as a number of ``dtype``: integers have no infinity."""
    if dtype.is_floating_point:
        return identity
    if dtype is torch.bool:
        return identity > 0
    limits = torch.iinfo(dtype)
    return int(min(max(identity, limits.min), limits.max))
