"""Ops along one axis that keep it: softmax, cumulative ops, pooling, sorting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvsieve.ops.reduce import INFINITY, cast, masked
from kvsieve.ops.view import Batch, NodeView, Proxy, Refused, Value, show, unpack


class AlongAxis:
    """softmax, log_softmax, cumsum, cumprod, logcumsumexp: over the page axis the identity hides the padding."""

    over_pages = "allowed over the segment's own pages"

    def __init__(self, function: Callable[..., Proxy], identity: float) -> None:
        self.function, self.identity = function, identity

    def check(self, view: NodeView) -> None:
        arguments = view.args()
        view.axis(arguments["self"], arguments["dim"])

    def lower(self, view: NodeView, batch: Batch) -> Value:
        arguments = view.args()
        node, dtype = arguments["self"], arguments.get("dtype")
        axes = view.axes(node, arguments["dim"])
        value = masked(batch, cast(batch[node], dtype), axes, self.identity, dtype or view.dtype(node))
        if axes:
            proxy = self.function(value.proxy, *value.shifted(axes))
        else:
            proxy = self.function(value.proxy[..., None], -1)[..., 0]
        return Value(proxy, view.shape, value.batched)


def softmax(x: Proxy, dim: int) -> Proxy:
    """Along the last axis: along another one PyTorch (2.13, CPU) adds up term after term in float32, which costs ten
    times the error in windows of 33,000 pages."""
    return _along_last(torch.softmax, x, dim)


def log_softmax(x: Proxy, dim: int) -> Proxy:
    """As :func:`softmax`."""
    return _along_last(torch.log_softmax, x, dim)


def _along_last(function: Callable[..., Proxy], x: Proxy, dim: int) -> Proxy:
    return torch.transpose(function(torch.transpose(x, dim, -1), -1), dim, -1)


class WithinPage:
    """Ops along an axis that must not be the page axis: sort, topk, kthvalue, median, argmax, flip, cummax, ..."""

    over_pages = "refused over pages, which the runtime ranks"

    def check(self, view: NodeView) -> None:
        arguments = view.args()
        node = arguments["self"]
        dims = _dims(arguments)
        if view.page_axis(node) in view.axes(node, dims):
            raise Refused(
                f"{view.name} over the page axis of {show(view.shape_of(node))}",
                "pages are ranked by the runtime: return the scores, or use a statistic of all pages (sum, mean, amax, "
                "softmax, cumsum)",
            )
        if dims is None:
            raise Refused(f"{view.name} of {show(view.shape_of(node))} without dim flattens it", "name the dim")

    def lower(self, view: NodeView, batch: Batch) -> Value | tuple[Value, ...]:
        arguments = dict(view.args())
        node = arguments.pop("self")
        source = batch[node]
        if not source.rank:
            source = Value(source.proxy[..., None], (1,), source.batched)
        axes = source.shifted(view.axes(node, _dims(arguments)) or (0,))
        if "dims" in arguments:
            arguments["dims"] = list(axes)
        else:
            (arguments["dim"],) = axes
        # torch.median of an expanded tensor reads memory that is not its own (torch 2.13, CPU)
        proxy = source.proxy.contiguous() if view.name == "median" else source.proxy
        result = view.op(proxy, **arguments)
        if isinstance(view.node.meta["val"], torch.Tensor):
            return Value(result, view.shape, source.batched)
        return unpack(view, result, source.batched)


class AvgPool:
    """avg_pool1d over the last axis; over the page axis the length must stay W (SnapKV's vote)."""

    over_pages = "allowed, if the number of pages stays"

    def check(self, view: NodeView) -> None:
        """A changed page count shows in the output shape, which graph.py refuses for every op."""

    def lower(self, view: NodeView, batch: Batch) -> Value:
        arguments = view.args()
        source = batch[arguments["self"]]
        last = source.rank - 1
        value = masked(batch, source, (last,), 0.0, torch.float32)
        if source.page_axis == last and not arguments["count_include_pad"]:
            ones = batch.filled(Value(torch.ones_like(value.proxy), value.shape, True), 0.0)
            inside = {**arguments, "count_include_pad": True}
            pooled = _avg_pool(value.proxy, inside) / _avg_pool(ones.proxy, inside)
        else:
            pooled = _avg_pool(value.proxy, arguments)
        return Value(torch.reshape(pooled, batch.sizes(view.shape, value.batched)), view.shape, value.batched)


class MaxPool:
    """max_pool1d over the last axis; over the page axis the length must stay W."""

    over_pages = "allowed, if the number of pages stays (odd kernel, stride 1)"

    def check(self, view: NodeView) -> None:
        pass

    def lower(self, view: NodeView, batch: Batch) -> Value:
        arguments = view.args()
        source = batch[arguments.pop("x")]
        value = masked(batch, source, (source.rank - 1,), -INFINITY, torch.float32)
        pooled = torch.nn.functional.max_pool1d(torch.flatten(value.proxy, 0, -2), *arguments.values())
        return Value(torch.reshape(pooled, batch.sizes(view.shape, value.batched)), view.shape, value.batched)


def _dims(arguments: dict[str, Any]) -> Any:
    return arguments["dims"] if "dims" in arguments else arguments.get("dim")


def _avg_pool(x: Proxy, arguments: dict[str, Any]) -> Proxy:
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
    return torch.nn.functional.avg_pool1d(torch.flatten(x, 0, -2), *(arguments[name] for name in names))
