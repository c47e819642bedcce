"""Ops that move elements without computing. The page axis may move as a whole; nothing may cut or fold it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from kvsieve.ops.reduce import show
from kvsieve.ops.view import Batch, NodeView, Proxy, Refused, Shape, Value

WHOLE = "leave the page axis whole: reduce it (sum, mean, amax, softmax), pool it, or keep it"


class Reshape:
    """reshape, view, flatten, unflatten, squeeze, unsqueeze: row-major regrouping of the other axes."""

    def check(self, view: NodeView) -> None:
        source = view.shape_of(view.node.all_input_nodes[0])
        if None in source and not _keeps_pages(source, view.shape):
            raise Refused(f"{name_of(view)} mixes the page axis of {show(source)} into {show(view.shape)}", WHOLE)

    def lower(self, view: NodeView, batch: Batch) -> Value:
        source = batch[view.node.all_input_nodes[0]]
        sizes: list[Any] = batch.sizes(view.shape)
        if source.batched:
            sizes = [batch.segments, *sizes]
        return Value(torch.reshape(source.proxy, sizes), view.shape, source.batched)


class Permute:
    """permute, transpose, t, T, mT, movedim: any order of axes."""

    def check(self, view: NodeView) -> None:
        pass

    def lower(self, view: NodeView, batch: Batch) -> Value:
        arguments = view.args()
        node = arguments["self"]
        rank = view.rank(node)
        order = list(range(rank))
        if "dims" in arguments:
            order = [axis % rank for axis in arguments["dims"]]
        elif "source" in arguments:
            order = _moved(rank, arguments["source"], arguments["destination"])
        elif "dim0" in arguments or "axis0" in arguments:
            first = arguments.get("dim0", arguments.get("axis0"))
            second = arguments.get("dim1", arguments.get("axis1"))
            order[first], order[second] = order[second], order[first]
        elif name_of(view) == "mT":
            order[-1], order[-2] = order[-2], order[-1]
        else:
            order.reverse()
        source = batch[node]
        if source.batched:
            order = [0, *(axis + 1 for axis in order)]
        return Value(torch.permute(source.proxy, order), view.shape, source.batched)


class Expand:
    """expand, expand_as, broadcast_to: repeat singleton axes; may create the page axis."""

    def check(self, view: NodeView) -> None:
        pass

    def lower(self, view: NodeView, batch: Batch) -> Value:
        source = batch[view.args()["self"]]
        sizes: list[Any] = batch.sizes(view.shape)
        if source.batched:
            sizes = [batch.segments, *sizes]
        return Value(batch.align(source, len(view.shape)).expand(sizes), view.shape, source.batched)


class Slice:
    """slice, select, narrow, index_select along one axis that is not the page axis."""

    def check(self, view: NodeView) -> None:
        arguments = view.args()
        node = arguments["self"]
        axis = arguments["dim"] % view.rank(node)
        if axis == view.page_axis(node) and not _is_whole(arguments):
            raise Refused(
                f"{name_of(view)} takes part of the page axis of {show(view.shape_of(node))}",
                "mask pages by pages['position'] or pages['age'] instead; " + WHOLE,
            )

    def lower(self, view: NodeView, batch: Batch) -> Value:
        arguments = dict(view.args())
        node = arguments.pop("self")
        source = batch[node]
        axis = arguments["dim"] % view.rank(node)
        if axis == source.page_axis:
            return Value(source.proxy, view.shape, source.batched)
        arguments["dim"] = axis + 1 if source.batched else axis
        if "index" in arguments and isinstance(arguments["index"], fx.Node):
            arguments["index"] = constant(batch, arguments["index"], view)
        return Value(view.op(source.proxy, **arguments), view.shape, source.batched)


class Index:
    """``x[:, constant_indices]`` on axes other than the page axis."""

    def check(self, view: NodeView) -> None:
        arguments = view.args()
        page_axis = view.page_axis(arguments["self"])
        for axis, index in enumerate(arguments["indices"]):
            if index is not None and (axis == page_axis or view.page_axis(index) is not None):
                raise Refused(
                    f"indexing takes part of the page axis of {show(view.shape_of(arguments['self']))}",
                    "mask pages with torch.where instead; " + WHOLE,
                )

    def lower(self, view: NodeView, batch: Batch) -> Value:
        arguments = view.args()
        source = batch[arguments["self"]]
        indices = [None if index is None else constant(batch, index, view) for index in arguments["indices"]]
        if source.batched:
            indices = [None, *indices]
        return Value(view.op(source.proxy, indices), view.shape, source.batched)


class Join:
    """cat and stack along an axis that is not the page axis."""

    def check(self, view: NodeView) -> None:
        pass  # joining pages shows in the output shape, which graph.py refuses for every op

    def lower(self, view: NodeView, batch: Batch) -> Value:
        arguments = view.args()
        values = [batch[node] for node in arguments["tensors"]]
        batched = any(value.batched for value in values)
        proxies = [_batched(batch, value) if batched else value.proxy for value in values]
        axis = arguments["dim"] % len(view.shape)
        return Value(view.op(proxies, axis + 1 if batched else axis), view.shape, batched)


class Split:
    """split, chunk, unbind along an axis that is not the page axis."""

    def check(self, view: NodeView) -> None:
        arguments = view.args()
        node = arguments["self"]
        if arguments["dim"] % view.rank(node) == view.page_axis(node):
            raise Refused(f"{name_of(view)} cuts the page axis of {show(view.shape_of(node))}", WHOLE)

    def lower(self, view: NodeView, batch: Batch) -> tuple[Value, ...]:
        arguments = dict(view.args())
        node = arguments.pop("self")
        source = batch[node]
        axis = arguments["dim"] % view.rank(node)
        arguments["dim"] = axis + 1 if source.batched else axis
        parts = view.op(source.proxy, **arguments)
        shapes = {user.args[1]: view.shape_of(user) for user in view.node.users}
        return tuple(Value(parts[i], shapes.get(i, ()), source.batched) for i in range(max(shapes, default=0) + 1))


def constant(batch: Batch, node: fx.Node, view: NodeView) -> Proxy:
    """An index that is the same for all segments."""
    value = batch[node]
    if value.batched:
        raise Refused(f"{name_of(view)} indexes by a computed tensor", "use constant indices, torch.where or a mask")
    return value.proxy


def name_of(view: NodeView) -> str:
    return str(view.op._overloadpacket.__name__)


def _batched(batch: Batch, value: Value) -> Proxy:
    if value.batched:
        return value.proxy
    return value.proxy.expand([batch.segments, *batch.sizes(value.shape)])


def _keeps_pages(source: Shape, target: Shape) -> bool:
    """True if a row-major regrouping leaves the page axis a whole axis with the same elements before it."""
    if None not in target:
        return False
    before = [math.prod(size or 1 for size in shape[: shape.index(None)]) for shape in (source, target)]
    return before[0] == before[1]


def _is_whole(arguments: dict[str, Any]) -> bool:
    if "start" not in arguments or "end" not in arguments:
        return False
    start, end, step = arguments["start"] or 0, arguments["end"], arguments["step"]
    return start == 0 and step == 1 and (end is None or (isinstance(end, int) and end >= 2**62) or isinstance(end, fx.Node))


def _moved(rank: int, source: Any, destination: Any) -> list[int]:
    sources = [axis % rank for axis in ([source] if isinstance(source, int) else source)]
    targets = [axis % rank for axis in ([destination] if isinstance(destination, int) else destination)]
    order: list[int | None] = [None] * rank
    for origin, target in zip(sources, targets, strict=True):
        order[target] = origin
    rest = iter(axis for axis in range(rank) if axis not in sources)
    return [next(rest) if axis is None else axis for axis in order]
