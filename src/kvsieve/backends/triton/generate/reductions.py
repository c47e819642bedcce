"""Rows of reductions, within a page and over pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvsieve.backends.triton.generate.call import Call, Results, Row
from kvsieve.backends.triton.generate.ir import Builder, Op
from kvsieve.backends.triton.generate.ordering import first_place

INFINITY = float("inf")


def reduce_axes(b: Builder, kind: str, x: Op, axes: Sequence[int], keepdim: bool = False) -> Op:
    """``sum``, ``max``, ``min``, ``prod`` over any axes, the page axis among them or not."""
    page = x.page_axis
    static = [axis for axis in axes if axis != page]
    result = b.reduce(kind, x, static)
    if page is not None and page in axes:
        result = b.fold(kind, result)
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    return b.regroup(result, kept) if keepdim else result


def size_of(b: Builder, x: Op, axes: Sequence[int]) -> Op:
    """How many elements a reduction sees, a float."""
    number = math.prod(x.shape[axis] or 1 for axis in axes)
    if x.page_axis in axes:
        return b.map("({0} * {1})", b.count(), b.number(number)) if number != 1 else b.count()
    return b.number(number)


def log_sum(b: Builder, x: Op, axes: Sequence[int]) -> tuple[Op, Op]:
    """The maximum over axes, 0 where it is infinite, and the sum of exponentials from it; both keep their axes.

    Over the page axis alone, the next stage combines what the chunks of pages found.
    """
    page = x.page_axis
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    if list(axes) == [page]:
        high, total = (b.regroup(b.fold("softmax", x, part), kept) for part in (0, 1))
        return _finite(b, high), total
    high = _finite(b, reduce_axes(b, "max", x, axes, True))
    return high, reduce_axes(b, "sum", b.map("f.exp({0} - {1})", x, high), axes, True)


def _finite(b: Builder, x: Op) -> Op:
    return b.map('tl.where(tl.abs({0}) == float("inf"), 0.0, {0})', x)


def _operand(call: Call) -> tuple[Op, list[int], bool]:
    x, arguments = call.op("self"), call.arguments
    axes = list(call.view.axes(arguments["self"], arguments.get("dim")))
    keepdim = bool(arguments.get("keepdim", False))
    return x, axes, keepdim


def _sum(call: Call) -> Op:
    x, axes, keepdim = _operand(call)
    return reduce_axes(call.builder, call.name, call.builder.cast(x, call.dtype), axes, keepdim)


def _mean(call: Call) -> Op:
    b = call.builder
    x, axes, keepdim = _operand(call)
    x = b.cast(x, call.dtype)
    return b.map("({0} / {1})", reduce_axes(b, "sum", x, axes, keepdim), size_of(b, x, axes))


def _var(call: Call) -> Op:
    """In two passes: the mean, then the squares from it."""
    b = call.builder
    x, axes, keepdim = _operand(call)
    count = size_of(b, x, axes)
    mean = b.map("({0} / {1})", reduce_axes(b, "sum", x, axes, True), count)
    apart = b.map("({0} - {1})", x, mean)
    squares = reduce_axes(b, "sum", b.map("({0} * {0})", apart), axes, keepdim)
    if "unbiased" in call.arguments:
        correction = 1.0 if call.arguments["unbiased"] else 0.0
    else:
        given = call.arguments["correction"]
        correction = 1.0 if given is None else float(given)
    result = b.map("({0} / tl.maximum({1} - {2}, 0.0))", squares, count, b.number(correction))
    return result if call.name == "var" else b.map("tl.sqrt({0})", result)


def _norm(call: Call) -> Op:
    b = call.builder
    x, axes, keepdim = _operand(call)
    order = float(call.arguments["ord"])
    size = b.map("tl.abs({0})", x)
    if math.isinf(order):
        return reduce_axes(b, "max" if order > 0 else "min", size, axes, keepdim)
    if order == 0:
        return reduce_axes(b, "sum", b.cast(b.map("({0} != 0.0)", x, dtype=torch.bool), torch.float32), axes, keepdim)
    if order == 1:
        return reduce_axes(b, "sum", size, axes, keepdim)
    if order == 2:
        return b.map("tl.sqrt({0})", reduce_axes(b, "sum", b.map("({0} * {0})", x), axes, keepdim))
    powers = b.map("f.pow({0}, {1})", size, b.number(order))
    return b.map("f.pow({0}, {1})", reduce_axes(b, "sum", powers, axes, keepdim), b.number(1 / order))


def _extreme(call: Call) -> Results:
    b, kind = call.builder, call.name.removeprefix("a")
    x, axes, keepdim = _operand(call)
    flag = x.dtype is torch.bool
    x = b.cast(x, torch.int32) if flag else x
    value = reduce_axes(b, kind, x, axes, keepdim)
    value = b.cast(value, torch.bool) if flag else value
    if not isinstance(call.view.node.meta["val"], (tuple, list)):
        return value
    wanted = any(user.args[1] == 1 and user.users for user in call.view.node.users)
    if not wanted or not axes:
        zero = b.expand(b.regroup(b.number(0, torch.int64), (1,) * len(value.shape)), value.shape)
        return value, zero
    return value, first_place(b, x, axes[0], kind, keepdim)


def _logical(call: Call) -> Op:
    b = call.builder
    x, axes, keepdim = _operand(call)
    x = b.cast(b.cast(x, torch.bool), torch.int32)
    return b.cast(reduce_axes(b, "max" if call.name == "any" else "min", x, axes, keepdim), torch.bool)


def _logsumexp(call: Call) -> Op:
    b = call.builder
    x, axes, keepdim = _operand(call)
    high, total = log_sum(b, b.cast(x, call.dtype), axes)
    result = b.map("({0} + tl.log({1}))", high, total)
    return result if keepdim else b.regroup(result, call.shape)


def _softmax(call: Call) -> Op:
    b, x = call.builder, _cast(call)
    axes = call.view.axes(call.arguments["self"], call.arguments["dim"])
    high, total = log_sum(b, x, axes)
    if "log" in call.name:
        return b.map("({0} - {1} - tl.log({2}))", x, high, total)
    weights = b.weights(x, high) if list(axes) == [x.page_axis] else b.map("f.exp({0} - {1})", x, high)
    return b.map("({0} * {1})", weights, b.map("(1.0 / {0})", total))


def _cast(call: Call) -> Op:
    return call.builder.cast(call.op("self"), call.dtype)


def _running(call: Call) -> Op:
    b, x = call.builder, _cast(call)
    kind = {"cumsum": "sum", "cumprod": "prod", "logcumsumexp": "log_sum"}[call.name]
    if not x.shape:
        return x
    axis = call.arguments["dim"] % len(x.shape)
    return b.running(kind, x) if axis == x.page_axis else b.scan(kind, x, axis)


def rows() -> dict[str, Row]:
    """The rows, by the names of the op table."""
    tree = "log2(n) u of the sum of magnitudes in a page or chunk, one more u for each chunk of pages"
    table = {
        "sum": Row(_sum, "tl.sum", tree),
        "prod": Row(_sum, "f.prod", "n u"),
        "mean": Row(_mean, "tl.sum and a division", tree),
        "var": Row(_var, "two sums", "as sum, of the squares"),
        "std": Row(_var, "two sums and a square root", "as sum, of the squares"),
        "linalg_vector_norm": Row(_norm, "tl.sum of powers", "as sum, of the powers"),
        "logsumexp": Row(_logsumexp, "maximum, then sum of f.exp", "u |max| and a few u"),
    }
    table |= {name: Row(_logical, "tl.max or tl.min of 0 and 1", "none") for name in ("any", "all")}
    table |= {name: Row(_extreme, "f.max or f.min, which keep NaN", "none") for name in ("amax", "amin", "max", "min")}
    softmax = "(4 + |x - max|) u relative, and that of a sum of W terms"
    names = ("softmax", "_softmax", "log_softmax", "_log_softmax")
    table |= {name: Row(_softmax, "f.exp({0} - max) * (1 / sum), in two stages over pages", softmax) for name in names}
    for name in ("cumsum", "cumprod", "logcumsumexp"):
        table[name] = Row(_running, "a scan; over pages after the chunks before", "n u of the sum of magnitudes")
    return table
