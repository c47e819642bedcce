"""Rows of ops that order the elements of a static axis: each element counts those that come before it."""

from __future__ import annotations

import torch

from kvsieve.backends.triton.generate.call import Call, Row
from kvsieve.backends.triton.generate.ir import Builder, Op
from kvsieve.backends.triton.generate.shapes import part, pick


def first_place(b: Builder, x: Op, axis: int, kind: str, keepdim: bool) -> Op:
    """Where along an axis the ``max`` or ``min`` stands first, int64. NaN is both."""
    size = x.shape[axis]
    assert size is not None
    best = b.reduce(kind, x, (axis,), True)
    same = "(({0} == {1}) | (({0} != {0}) & ({1} != {1})))"
    place = b.along(size, axis, len(x.shape))
    candidates = b.where(b.map(same, x, best, dtype=torch.bool), place, b.number(size, torch.int32))
    return b.cast(b.reduce("min", candidates, (axis,), keepdim), torch.int64)


def ordered(b: Builder, x: Op, axis: int, descending: bool) -> tuple[Op, Op]:
    """Sorted values and their old places along a static axis, stable; NaN is the largest."""
    size, rank = x.shape[axis], len(x.shape)
    assert size is not None
    here, there = b.unsqueeze(x, axis + 1), b.unsqueeze(x, axis)  # i along ``axis``, j behind it
    i, j = b.along(size, axis, rank + 1), b.along(size, axis + 1, rank + 1)
    nan = "(({1} != {1}) & ({0} == {0}))"
    before = "({1} > {0}) | " + nan if descending else "({1} < {0}) | (({0} != {0}) & ({1} == {1}))"
    equal = "(({0} == {1}) | (({0} != {0}) & ({1} != {1})))"
    first = b.map(f"(({before}) | ({equal} & ({{3}} < {{2}})))", here, there, i, j, dtype=torch.bool)
    place = b.reduce("sum", b.cast(first, torch.int32), (axis + 1,))  # how many come before element i
    mine = b.map("({0} == {1})", b.unsqueeze(place, axis + 1), j, dtype=torch.bool)
    values = b.reduce("sum", b.where(mine, here, b.number(0, x.dtype)), (axis,))
    places = b.reduce("sum", b.where(mine, b.expand(i, mine.shape), b.number(0, torch.int32)), (axis,))
    return values, b.cast(places, torch.int64)


def _axis(call: Call) -> tuple[Op, int, bool]:
    """The operand, its axis, and whether it had none."""
    x = call.op("self")
    flag = x.dtype is torch.bool
    x = call.builder.cast(x, torch.int32) if flag else x
    if not x.shape:
        return call.builder.unsqueeze(x, 0), 0, True
    return x, (call.arguments["dim"] if call.arguments["dim"] is not None else -1) % len(x.shape), False


def _sorted(call: Call) -> tuple[Op, ...]:
    b = call.builder
    x, axis, scalar = _axis(call)
    arguments = call.arguments
    size = x.shape[axis]
    assert size is not None
    descending = bool(arguments.get("descending", arguments.get("largest", False)))
    values, places = ordered(b, x, axis, descending)
    if call.name == "topk":
        pair = [part(b, one, axis, 0, arguments["k"]) for one in (values, places)]
    elif call.name == "sort":
        pair = [values, places]
    else:
        place = arguments["k"] - 1 if call.name == "kthvalue" else (size - 1) // 2
        pair = [pick(b, one, axis, place) for one in (values, places)]
        if call.name == "median" and x.dtype.is_floating_point:
            pair[0] = _nan_wins(b, x, axis, pair[0])
        if arguments["keepdim"]:
            pair = [b.unsqueeze(one, axis) for one in pair]
    shape = x.shape[:axis] + x.shape[axis + 1 :] if scalar else None
    pair = [b.cast(pair[0], call.dtype), pair[1]]
    return tuple(pair if shape is None or pair[0].shape == shape else [b.regroup(one, shape) for one in pair])


def _nan_wins(b: Builder, x: Op, axis: int, value: Op) -> Op:
    strange = b.cast(b.map("({0} != {0})", x, dtype=torch.bool), torch.int32)
    return b.map('tl.where({1} > 0, float("nan"), {0})', value, b.reduce("max", strange, (axis,)))


def _place(call: Call) -> Op:
    x, axis, scalar = _axis(call)
    result = first_place(call.builder, x, axis, call.name.removeprefix("arg"), bool(call.arguments["keepdim"]))
    return call.builder.regroup(result, ()) if scalar else result


def _running_extreme(call: Call) -> tuple[Op, ...]:
    b, kind = call.builder, call.name.removeprefix("cum")
    x, axis, scalar = _axis(call)
    size = x.shape[axis]
    assert size is not None
    best = b.scan(kind, x, axis)
    sign = ">=" if kind == "max" else "<="
    place = b.along(size, axis, len(x.shape))
    reached = b.map(f"(({{0}} {sign} {{1}}) | ({{0}} != {{0}}))", x, best, dtype=torch.bool)
    last = b.scan("max", b.where(reached, place, b.number(0, torch.int32)), axis)
    pair = (b.cast(best, call.dtype), b.cast(last, torch.int64))
    return tuple(b.regroup(one, ()) for one in pair) if scalar else pair


def _flip(call: Call) -> Op:
    b, x = call.builder, call.op("self")
    for axis in call.view.axes(call.arguments["self"], call.arguments["dims"]):
        size = x.shape[axis]
        assert size is not None
        x = part(b, x, axis, size - 1, size, -1) if size > 1 else x
    return x


def rows() -> dict[str, Row]:
    """The rows, by the names of the op table."""
    ranks = "comparisons of all pairs; then masked sums"
    table = {name: Row(_sorted, ranks, "none") for name in ("sort", "topk", "kthvalue", "median")}
    table |= {name: Row(_place, "f.max, then the first place equal to it", "none") for name in ("argmax", "argmin")}
    table |= {name: Row(_running_extreme, "a scan", "none") for name in ("cummax", "cummin")}
    table["flip"] = Row(_flip, "tl.gather", "none")
    return table
