"""What algebra knows: sums of products as contractions, and the sum of the larger of two products as two of them."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_lowercase

from kvsieve.backends.triton.generate.ir import Builder, Op, walk
from kvsieve.ops import Shape

PRODUCT, MAXIMUM = "({0} * {1})", "f.maximum({0}, {1})"

Bounds = frozenset[tuple[str, str]]
"""Pairs of summary fields of which the first is nowhere less than the second."""


def bounds_of(summaries: Mapping[str, Op]) -> Bounds:
    """Fields that are the maximum and the minimum of the same values over the same axes. Rounding keeps their order."""
    ends: dict[str, dict[tuple[int, str], str]] = {"max": {}, "min": {}}
    for name, op in summaries.items():
        if op.kind == "reduce" and op.data[0] in ends:
            kind, axes = op.data
            ends[kind][id(op.operands[0]), repr(axes)] = name
    return frozenset((high, ends["min"][key]) for key, high in ends["max"].items() if key in ends["min"])


def rewrite(outputs: Mapping[str, Op], builder: Builder, bounds: Bounds) -> dict[str, Op]:
    """The program with its patterns replaced."""
    new: dict[int, Op] = {}
    for op in walk(list(outputs.values())):
        builder.name, builder.line = op.name, op.line
        operands = tuple(new[id(operand)] for operand in op.operands)
        same = all(a is b for a, b in zip(operands, op.operands, strict=True))
        copy = op if same else builder.make(op.kind, op.shape, op.dtype, operands, op.data)
        copy.paged = op.paged
        new[id(op)] = _replaced(builder, copy, bounds)
    return {name: new[id(op)] for name, op in outputs.items()}


def _replaced(b: Builder, op: Op, bounds: Bounds) -> Op:
    if op.kind == "reduce" and op.data[0] == "sum" and op.operands[0].kind == "map":
        (x,), (_, axes) = op.operands, op.data
        if x.data == PRODUCT:
            return _as_contraction(b, x, axes) or op
        if x.data == MAXIMUM:
            return _as_bound(b, x, axes, bounds) or op
    if op.kind == "contract":
        return _without_factor(b, op)
    return op


def _as_contraction(b: Builder, product: Op, axes: tuple[int, ...]) -> Op | None:
    """``(a * x).sum(axes)`` with a query-side ``a``."""
    a, x = product.operands
    if a.paged:
        a, x = x, a
    if a.paged or not x.paged or "number" in (a.kind, x.kind):
        return None
    letters = ascii_lowercase[: len(product.shape)]
    output = "".join(letter for axis, letter in enumerate(letters) if axis not in axes)
    terms = [_letters(b, one, product.shape, letters) for one in (a, x)]
    if any(letters[axis] not in term for axis in axes for _, term in terms):
        return None
    if any(letter not in terms[0][1] + terms[1][1] for letter in output):
        return None
    (a, first), (x, second) = terms
    return _without_factor(b, b.contract(a, x, first, second, output))


def _letters(b: Builder, x: Op, shape: Shape, letters: str) -> tuple[Op, str]:
    """An operand without the axes that it broadcasts along, and the letters of the others."""
    offset, kept = len(shape) - len(x.shape), ""
    for axis in reversed(range(len(x.shape))):
        if x.shape[axis] == shape[axis + offset]:
            kept = letters[axis + offset] + kept
        else:
            x = b.squeeze(x, axis)
    return x, kept


def _as_bound(b: Builder, larger: Op, axes: tuple[int, ...], bounds: Bounds) -> Op | None:
    """``max(a * high, a * low).sum()`` is ``max(a, 0) . high + min(a, 0) . low`` where nowhere high < low.

    Each term of the one sum is a term of one of the two: no rounding is added. (An infinite bound gives NaN.)
    """
    sides = larger.operands
    if any(side.kind != "map" or side.data != PRODUCT for side in sides):
        return None
    for a in sides[0].operands:
        if a not in sides[1].operands or a.paged:
            continue
        high, low = (next(one for one in side.operands if one is not a) for side in sides)
        if (low.data, high.data) in bounds and high.kind == low.kind == "field":
            high, low = low, high
        if high.kind != "field" or low.kind != "field" or (high.data, low.data) not in bounds:
            return None
        zero = b.number(0.0)
        parts = []
        for text, x in (("f.maximum({0}, {1})", high), ("f.minimum({0}, {1})", low)):
            part = b.map(text, a, zero)
            parts.append(_as_contraction(b, b.map(PRODUCT, part, x), axes))
        return b.map("({0} + {1})", parts[0], parts[1]) if parts[0] and parts[1] else None
    return None


def _without_factor(b: Builder, op: Op) -> Op:
    """A number that multiplies an operand multiplies the result instead: the operand keeps its stored values."""
    operands, factors = list(op.operands), []
    for place, x in enumerate(operands):
        while x.kind == "map" and x.data == PRODUCT and any(one.kind == "number" for one in x.operands):
            factors += [one for one in x.operands if one.kind == "number"][:1]
            x = next((one for one in x.operands if one.kind != "number"), x.operands[1])
            if x.shape != operands[place].shape:
                return op
            operands[place] = x
    if not factors:
        return op
    result = b.contract(operands[0], operands[1], *op.data)
    for factor in factors:
        result = b.map(PRODUCT, result, factor)
    return result
