"""Rows of ops that move elements: views, padding, joining, splitting, indexing. They compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kvsieve.backends.triton.generate.call import Call, Row
from kvsieve.backends.triton.generate.ir import Builder, Op
from kvsieve.ops.shape import axis_order


def _reshape(call: Call) -> Op:
    return call.builder.regroup(call.op("self"), call.shape)


def _permute(call: Call) -> Op:
    x = call.op("self")
    return call.builder.permute(x, axis_order(call.name, len(x.shape), call.arguments))


def _expand(call: Call) -> Op:
    b, x, shape = call.builder, call.op("self"), call.shape
    return b.expand(b.regroup(x, (*(1,) * (len(shape) - len(x.shape)), *x.shape)), shape)


def _pad(call: Call) -> Op:
    """Each padded axis picks its old elements, clamped, and the value outside of them."""
    b, x = call.builder, call.op("self")
    widths, value = call.arguments["pad"], call.arguments["value"] or 0
    for number, (before, after) in enumerate(zip(widths[::2], widths[1::2], strict=True)):
        if before or after:
            axis = len(x.shape) - 1 - number
            x = window(b, x, axis, -before, (x.shape[axis] or 0) + after, value)
    return x


def window(b: Builder, x: Op, axis: int, start: int, end: int, outside: float) -> Op:
    """Elements ``start .. end`` of a static axis, ``outside`` where it has none."""
    old = x.shape[axis]
    assert old is not None
    index = b.map("({0} + {1})", b.iota(end - start), b.number(start, torch.int32))
    inside = b.take(x, axis, b.map("tl.minimum(tl.maximum({0}, 0), {1})", index, b.number(old - 1, torch.int32)))
    exists = b.map("(({0} >= 0) & ({0} < {1}))", index, b.number(old, torch.int32), dtype=torch.bool)
    exists = b.regroup(exists, tuple(end - start if one == axis else 1 for one in range(len(x.shape))))
    return b.where(exists, inside, b.number(outside, x.dtype))


def part(b: Builder, x: Op, axis: int, start: int, count: int, step: int = 1) -> Op:
    """Elements ``start, start + step, ...`` of a static axis."""
    if (start, count, step) == (0, x.shape[axis], 1):
        return x
    index = b.map("({0} * {2} + {1})", b.iota(count), b.number(start, torch.int32), b.number(step, torch.int32))
    return b.take(x, axis, index)


def pick(b: Builder, x: Op, axis: int, place: int) -> Op:
    """One element of a static axis, which goes: a masked sum, cheaper than a gather."""
    size = x.shape[axis]
    assert size is not None
    if size == 1:
        return b.squeeze(x, axis)
    chosen = b.map("({0} == {1})", b.along(size, axis, len(x.shape)), b.number(place, torch.int32), dtype=torch.bool)
    if x.dtype is torch.bool:
        x8 = b.cast(b.map("({0} & {1})", chosen, x, dtype=torch.bool), torch.int32)
        return b.cast(b.reduce("max", x8, (axis,)), torch.bool)
    return b.reduce("sum", b.where(chosen, x, b.number(0, x.dtype)), (axis,))


def join(b: Builder, parts: Sequence[Op], axis: int) -> Op:
    """Parts beside each other along a static axis: each fills its own stretch."""
    sizes = [x.shape[axis] or 0 for x in parts]
    total, start, result = sum(sizes), 0, None
    for x, size in zip(parts, sizes, strict=True):
        if size:
            moved = window(b, x, axis, -start, total - start, 0)
            place = b.along(total, axis, len(x.shape))
            behind = b.map("({0} >= {1})", place, b.number(start, torch.int32), dtype=torch.bool)
            result = moved if result is None else b.where(behind, moved, result)
        start += size
    assert result is not None
    return result


def _join(call: Call) -> Op:
    b, axis = call.builder, call.arguments["dim"] % len(call.shape)
    parts = [b.cast(call.of(node), call.dtype) for node in call.arguments["tensors"]]
    if call.name == "stack":
        parts = [b.unsqueeze(x, axis) for x in parts]
    page = call.shape.index(None) if None in call.shape else None
    parts = [x if page is None or x.shape[page] is None else b.expand(x, _paged(x, page)) for x in parts]
    return join(b, parts, axis)


def _paged(x: Op, page: int) -> tuple[int | None, ...]:
    return tuple(None if axis == page else size for axis, size in enumerate(x.shape))


def _split(call: Call) -> tuple[Op, ...]:
    b, x = call.builder, call.op("self")
    axis = call.view.axis(call.arguments["self"], call.arguments["dim"])
    results: list[Op] = []
    if call.name == "unbind":
        return tuple(pick(b, x, axis, place) for place in range(x.shape[axis] or 0))
    start = 0
    for value in call.view.node.meta["val"]:
        count = int(value.shape[axis])
        results.append(part(b, x, axis, start, count))
        start += count
    return tuple(results)


def _slice(call: Call) -> Op:
    b, x, arguments = call.builder, call.op("self"), call.arguments
    axis = call.view.axis(arguments["self"], arguments["dim"])
    size = x.shape[axis]
    if size is None:
        return x
    if call.name == "select":
        return pick(b, x, axis, arguments["index"] % size)
    start = arguments["start"] or 0
    start = max(0, start + size if start < 0 else start)
    if call.name == "narrow":
        return part(b, x, axis, start, arguments["length"])
    count = call.shape[axis]
    assert count is not None
    return part(b, x, axis, start, count, arguments["step"])


def _index(call: Call) -> Op:
    """One index that is the same for all pages stays on its axis. Others go to the end as one; the pick is made there,
    and its axes go where torch puts them."""
    b, arguments = call.builder, call.arguments
    if call.name == "embedding":
        x, indices = call.op("weight"), {0: call.op("indices")}
    elif call.name == "index_select":
        x = call.op("self")
        indices = {call.view.axis(arguments["self"], arguments["dim"]): call.op("index")}
    else:
        x = call.op("self")
        listed = enumerate(arguments["indices"])
        indices = {axis: call.of(node) for axis, node in listed if isinstance(node, fx.Node)}
    if any(op.dtype is torch.bool for op in indices.values()):
        raise call.refuse("a mask as index")
    return index_axes(b, x, indices)


def index_axes(b: Builder, x: Op, indices: dict[int, Op]) -> Op:
    """``x[:, i, j]``: see torch's indexing for the place of the picked axes."""
    axes = list(indices)
    rest = [axis for axis in range(len(x.shape)) if axis not in axes]
    sizes = [x.shape[axis] or 0 for axis in axes]
    total = 1
    flat: Op | None = None
    for size, index in zip(sizes, indices.values(), strict=True):
        index = b.cast(index, torch.int64)
        index = b.map("tl.where({0} < 0, {0} + {1}, {0})", index, b.number(size, torch.int64))
        flat = index if flat is None else b.map("({0} * {2} + {1})", flat, index, b.number(size, torch.int64))
        total *= size
    assert flat is not None
    if len(axes) == 1 and flat.page_axis is None:
        return _on_its_axis(b, x, axes[0], flat)
    source = b.permute(x, [*rest, *axes])
    source = b.regroup(source, (*source.shape[: len(rest)], total))
    return _placed(b, x, source, flat, rest, axes)


def _on_its_axis(b: Builder, x: Op, axis: int, index: Op) -> Op:
    taken = b.take(x, axis, b.regroup(index, (index.elements,)))
    return b.regroup(taken, (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


def _placed(b: Builder, x: Op, source: Op, flat: Op, rest: list[int], axes: list[int]) -> Op:
    """source [*rest, total] picked by flat [*I] -> axes in torch's order. The page axes of both are the same one."""
    picked, page = flat.shape, flat.page_axis
    kept = [x.shape[axis] for axis in rest]
    if page is not None and page != 0:  # bring the index's page axis to the front
        order = [page, *(axis for axis in range(len(picked)) if axis != page)]
        flat = b.permute(flat, order)
    count = flat.elements
    statics = [size for size in kept if size is not None]
    lead: tuple[int | None, ...] = (None,) if page is not None or None in kept else ()
    if None in kept:
        front = [kept.index(None), *(i for i, size in enumerate(kept) if size is not None), len(kept)]
        source = b.permute(source, front)
    elif lead:
        source = b.unsqueeze(source, 0)
    index = b.regroup(
        flat,
        (*lead, *(1,) * len(statics), count) if page is not None else (*(1,) * len(lead), *(1,) * len(statics), count),
    )
    out = b.gather(source, len(lead) + len(statics), index)  # [W?, *statics, count]
    inner = tuple(size for size in picked if size is not None)
    out = b.regroup(out, (*lead, *statics, *inner))
    first = axes[0] if axes == list(range(axes[0], axes[0] + len(axes))) else 0
    return _ordered(b, out, kept, picked, first)


def _ordered(b: Builder, out: Op, kept: Sequence[int | None], picked: Sequence[int | None], first: int) -> Op:
    """[W?, *kept, *picked] (statics) to kept axes with the picked ones put at ``first``."""
    lead = 1 if None in out.shape else 0
    places: list[Any] = []
    position = lead
    kept_places = []
    for size in kept:
        kept_places.append(0 if size is None else position)
        position += size is not None
    picked_places = []
    for size in picked:
        picked_places.append(0 if size is None else position)
        position += size is not None
    places = [*kept_places[:first], *picked_places, *kept_places[first:]]
    return b.permute(out, places)


def _gather(call: Call) -> Op:
    b, x, index = call.builder, call.op("self"), call.op("index")
    if not x.shape:
        return x
    axis = call.arguments["dim"] % len(x.shape)
    for one, (size, wanted) in enumerate(zip(x.shape, index.shape, strict=True)):
        if one != axis and size is not None and wanted is not None and wanted < size:
            x = part(b, x, one, 0, wanted)
    return b.gather(x, axis, index)


def rows() -> dict[str, Row]:
    """The rows, by the names of the op table."""
    exact = "none"
    reshapes = ("reshape", "view", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
    table = {name: Row(_reshape, "an index, tl.reshape, or tl.gather where padding moves", exact) for name in reshapes}
    orders = ("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "numpy_T", "mT")
    table |= {name: Row(_permute, "tl.permute; nothing for the page axis", exact) for name in orders}
    table |= {name: Row(_expand, "nothing: it broadcasts", exact) for name in ("expand", "expand_as", "broadcast_to")}
    table |= {name: Row(_pad, "tl.gather and tl.where", exact) for name in ("pad", "constant_pad_nd")}
    table |= {name: Row(_join, "tl.gather and tl.where", exact) for name in ("cat", "concat", "concatenate", "stack")}
    table |= {name: Row(_split, "tl.gather", exact) for name in ("split", "split_with_sizes", "chunk")}
    table["unbind"] = Row(_split, "a masked sum", exact)
    table |= {name: Row(_slice, "tl.gather, or a masked sum", exact) for name in ("slice", "select", "narrow")}
    table |= {name: Row(_index, "tl.gather", exact) for name in ("index", "index_select", "embedding")}
    table["gather"] = Row(_gather, "tl.gather", exact)
    return table
