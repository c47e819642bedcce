"""Ops that move elements without computing. The page axis may move as a whole; nothing may cut or fold it."""

from __future__ import annotations

import math
from typing import Any

import torch

from kvsieve.ops.view import Batch, NodeView, Refused, Shape, Value, show, unpack

WHOLE = "leave the page axis whole: reduce it (sum, mean, amax, softmax), pool it, or keep it"


class Reshape:
    """reshape, view, flatten, unflatten, squeeze, unsqueeze: row-major regrouping of the other axes."""

    over_pages = "stays a whole axis; squeeze names its dim"

    def check(self, view: NodeView) -> None:
        arguments = view.args()
        node = arguments["self"]
        source = view.shape_of(node)
        if None in source and not _keeps_pages(source, view.shape):
            raise Refused(f"{view.name} folds the page axis of {show(source)} into another", WHOLE)
        if view.name == "squeeze" and view.page_axis(node) in view.axes(node, arguments.get("dim")):
            raise Refused(f"squeeze of {show(source)} would drop the page axis where W is 1", "name the dim to squeeze")

    def lower(self, view: NodeView, batch: Batch) -> Value:
        source = batch[view.args()["self"]]
        proxy = torch.reshape(source.proxy, batch.sizes(view.shape, source.batched))
        return Value(proxy, view.shape, source.batched)


class Permute:
    """permute, transpose, t, T, mT, movedim: any order of axes."""

    over_pages = "moves as a whole"

    def check(self, view: NodeView) -> None:
        pass

    def lower(self, view: NodeView, batch: Batch) -> Value:
        arguments = view.args()
        source = batch[arguments["self"]]
        order = source.shifted(axis_order(view.name, source.rank, arguments))
        proxy = torch.permute(source.proxy, (0, *order) if source.batched else order)
        return Value(proxy, view.shape, source.batched)


class Expand:
    """expand, expand_as, broadcast_to: repeat singleton axes; may create the page axis."""

    over_pages = "kept; may be created from one value"

    def check(self, view: NodeView) -> None:
        pass

    def lower(self, view: NodeView, batch: Batch) -> Value:
        source = batch[view.args()["self"]]
        proxy = batch.align(source, len(view.shape)).expand(batch.sizes(view.shape, source.batched))
        return Value(proxy, view.shape, source.batched)


class Pad:
    """``torch.nn.functional.pad`` with a constant; a padded page axis shows in the output shape."""

    over_pages = "not padded"

    def check(self, view: NodeView) -> None:
        mode = view.args().get("mode", "constant")
        if mode != "constant":
            raise Refused(f"pad with mode {mode!r}", "pad with a constant")

    def lower(self, view: NodeView, batch: Batch) -> Value:
        arguments = view.args()
        source = batch[arguments["self"]]
        proxy = torch.nn.functional.pad(source.proxy, arguments["pad"], value=arguments["value"] or 0)
        return Value(proxy, view.shape, source.batched)


class Join:
    """cat and stack along an axis that is not the page axis."""

    over_pages = "kept, never joined"

    def check(self, view: NodeView) -> None:
        """Joining pages shows in the output shape, which graph.py refuses for every op."""

    def lower(self, view: NodeView, batch: Batch) -> Value:
        arguments = view.args()
        values = [batch[node] for node in arguments["tensors"]]
        batched = any(value.batched for value in values)
        proxies = [batch.expanded(value) if batched else value.proxy for value in values]
        axis = arguments["dim"] % len(view.shape)
        return Value(view.op(proxies, axis + 1 if batched else axis), view.shape, batched)


class Split:
    """split, chunk, unbind along an axis that is not the page axis."""

    over_pages = "refused over pages"

    def check(self, view: NodeView) -> None:
        arguments = view.args()
        node = arguments["self"]
        if view.axis(node, arguments["dim"]) == view.page_axis(node):
            raise Refused(f"{view.name} cuts the page axis of {show(view.shape_of(node))}", WHOLE)

    def lower(self, view: NodeView, batch: Batch) -> tuple[Value, ...]:
        arguments = view.args()
        node = arguments.pop("self")
        source = batch[node]
        (arguments["dim"],) = source.shifted((view.axis(node, arguments["dim"]),))
        return unpack(view, view.op(source.proxy, **arguments), source.batched)


def _keeps_pages(source: Shape, target: Shape) -> bool:
    """True if a row-major regrouping leaves the page axis a whole axis with the same elements before it."""
    if None not in target:
        return False
    before = [math.prod(size or 1 for size in shape[: shape.index(None)]) for shape in (source, target)]
    return before[0] == before[1]


def axis_order(name: str, rank: int, arguments: dict[str, Any]) -> list[int]:
    """The axes of the source in the order of the result."""
    if "dims" in arguments:
        return [axis % rank for axis in arguments["dims"]]
    if "source" in arguments:
        return _moved(rank, arguments["source"], arguments["destination"])
    order = list(range(rank))
    if name in ("t", "numpy_T"):
        return order[::-1]
    if name == "mT":
        first, second = -2, -1
    else:
        first, second = (arguments[key] for key in arguments if key.startswith(("dim", "axis")))
    if rank:
        order[first], order[second] = order[second], order[first]
    return order


def _moved(rank: int, source: Any, destination: Any) -> list[int]:
    sources, targets = ([axis % rank for axis in _listed(axes)] for axes in (source, destination))
    order: list[int | None] = [None] * rank
    for origin, target in zip(sources, targets, strict=True):
        order[target] = origin
    rest = iter(axis for axis in range(rank) if axis not in sources)
    return [next(rest) if axis is None else axis for axis in order]


def _listed(axes: int | list[int]) -> list[int]:
    return [axes] if isinstance(axes, int) else axes
