"""Ops that take part of an axis: slice, select, indexing, gather. They leave the page axis whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kvsieve.ops.shape import WHOLE
from kvsieve.ops.view import Batch, NodeView, Proxy, Refused, Value, show

MASK = "mask pages with torch.where on pages['position'] or pages['age'] instead; " + WHOLE


class Slice:
    """slice, select, narrow along one axis that is not the page axis."""

    over_pages = "kept whole"

    def check(self, view: NodeView) -> None:
        arguments = view.args()
        node = arguments["self"]
        if view.axis(node, arguments["dim"]) == view.page_axis(node) and not _is_whole(arguments):
            raise Refused(f"{view.name} takes part of the page axis of {show(view.shape_of(node))}", MASK)

    def lower(self, view: NodeView, batch: Batch) -> Value:
        arguments = view.args()
        node = arguments.pop("self")
        source = batch[node]
        axis = view.axis(node, arguments["dim"])
        if axis == source.page_axis:
            return Value(source.proxy, view.shape, source.batched)
        (arguments["dim"],) = source.shifted((axis,))
        return Value(view.op(source.proxy, **arguments), view.shape, source.batched)


class Index:
    """``x[:, i]``, ``index_select`` and embedding tables: the indices may be constants or computed, per page too."""

    over_pages = "not indexed; indices may differ by page"

    def check(self, view: NodeView) -> None:
        node, indices = _indices(view)
        shown = show(view.shape_of(node))
        for axis, index in indices.items():
            if view.dtype(index) in (torch.bool, torch.uint8):
                raise Refused(f"{view.name} of {shown} by a mask makes a size that depends on values", MASK)
            if axis == view.page_axis(node):
                raise Refused(f"{view.name} takes part of the page axis of {shown}", MASK)

    def lower(self, view: NodeView, batch: Batch) -> Value:
        """Brings the indexed axes to the front, indexes them, and puts the result where torch would."""
        node, indices = _indices(view)
        source, axes = batch[node], list(indices)
        picks = [batch.filled(batch[index], 0) for index in indices.values()]
        rank = max(pick.rank for pick in picks)
        rest = [axis for axis in range(source.rank) if axis not in axes]
        order = source.shifted([*axes, *rest])
        table = torch.permute(source.proxy, (0, *order) if source.batched else order)
        index = [batch.align(pick, rank) for pick in picks]
        varies = any(pick.batched for pick in picks)
        if source.batched:
            index = [_segment_index(batch, rank) if varies else slice(None), *index]
        batched = source.batched or varies
        result = Value(table[tuple(index)], view.shape, batched)
        first = axes[0] if axes == list(range(axes[0], axes[0] + len(axes))) else 0
        target = result.shifted(range(first, first + rank))
        return Value(torch.movedim(result.proxy, result.shifted(range(rank)), target), view.shape, batched)


class Gather:
    """``torch.gather`` along an axis that is not the page axis: the elements that each page (or head) picks itself."""

    over_pages = "kept whole; shared by both operands"

    def check(self, view: NodeView) -> None:
        arguments = view.args()
        source, index = arguments["self"], arguments["index"]
        shapes = show(view.shape_of(source)), show(view.shape_of(index))
        page_axis = view.page_axis(source)
        if view.axis(source, arguments["dim"]) == page_axis or page_axis != view.page_axis(index):
            raise Refused(f"gather from {shapes[0]} by {shapes[1]} takes part of the page axis", MASK)

    def lower(self, view: NodeView, batch: Batch) -> Value:
        arguments = view.args()
        source, index = batch[arguments["self"]], batch.filled(batch[arguments["index"]], 0)
        if not source.rank:
            return source
        proxy = torch.gather(batch.expanded(source), arguments["dim"] % source.rank + 1, batch.expanded(index))
        return Value(proxy, view.shape, True)


def _indices(view: NodeView) -> tuple[fx.Node, dict[int, fx.Node]]:
    """The indexed node, and the index of each indexed axis."""
    arguments = view.args()
    if view.name == "embedding":
        return arguments["weight"], {0: arguments["indices"]}
    node = arguments["self"]
    if view.name == "index_select":
        return node, {view.axis(node, arguments["dim"]): arguments["index"]}
    return node, {axis: index for axis, index in enumerate(arguments["indices"]) if index is not None}


def _segment_index(batch: Batch, rank: int) -> Proxy:
    index = torch.arange(batch.segments, device=batch.device)
    for _ in range(rank):
        index = torch.unsqueeze(index, -1)
    return index


def _is_whole(arguments: dict[str, Any]) -> bool:
    if "start" not in arguments or "end" not in arguments:
        return False
    start, end, step = arguments["start"] or 0, arguments["end"], arguments["step"]
    return (
        start == 0
        and step == 1
        and (end is None or (isinstance(end, int) and end >= 2**62) or isinstance(end, fx.Node))
    )
