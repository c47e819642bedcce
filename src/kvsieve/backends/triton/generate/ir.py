"""The small language between ATen and Triton: a dozen kinds of op, each of which one printer prints.

An op has a one-segment shape (None is the page axis) and says whether it varies over pages at all. In ``summarize``
no shape has a page axis, but everything made from K and V varies over pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvsieve.ops import Shape


@dataclass(eq=False)
class Op:
    """One value of the program.

    Kinds and their ``data``: ``field`` (name), ``query``, ``constant`` (tensor), ``number`` (float, int or bool),
    ``position``, ``age``, ``count`` (of window pages), ``iota`` (size); ``map`` (text with {0}, {1}, ...), ``regroup``,
    ``permute`` (order), ``expand``, ``gather`` (axis), ``reduce`` (kind, axes), ``scan`` (kind, axis), ``contract``
    (letters of both operands and of the result); over the page axis ``fold`` (kind; a softmax folds to a maximum and a
    sum, ``part`` tells which), ``weights`` (terms of such a sum), ``running`` (kind), ``shift`` (distance, what stands
    outside).
    """

    kind: str
    shape: Shape
    dtype: torch.dtype
    operands: tuple[Op, ...] = ()
    data: Any = None
    paged: bool = False
    name: str = ""
    line: str = ""

    @property
    def statics(self) -> tuple[int, ...]:
        """The sizes of all axes but the page axis."""
        return tuple(size for size in self.shape if size is not None)

    @property
    def page_axis(self) -> int | None:
        """Where the page axis is among all axes; None if there is none."""
        return self.shape.index(None) if None in self.shape else None

    @property
    def elements(self) -> int:
        """Elements per page."""
        return math.prod(self.statics)

    @property
    def picks(self) -> bool:
        """Whether it takes elements of a field or of the queries, the same for all pages, along an axis longer than 1,
        and all along the others: they are loaded, and nothing else of it."""
        if self.kind != "gather" or self.operands[0].kind not in ("query", "field"):
            return False
        (x, index), axis = self.operands, self.data
        others = x.shape[:axis] == self.shape[:axis] and x.shape[axis + 1 :] == self.shape[axis + 1 :]
        return others and not index.paged and x.shape[axis] != 1

    def static_axis(self, axis: int) -> int:
        """The place of a (non-page) axis among the static ones."""
        page = self.page_axis
        return axis - (page is not None and page < axis)


def walk(roots: Sequence[Op]) -> Iterator[Op]:
    """Every op that the roots depend on, operands first."""
    seen: set[int] = set()
    stack: list[tuple[Op, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        op, done = stack.pop()
        if done:
            yield op
        elif id(op) not in seen:
            seen.add(id(op))
            stack.append((op, True))
            stack.extend((operand, False) for operand in reversed(op.operands))


@dataclass
class Builder:
    """Makes ops; equal ops are made once."""

    name: str = ""
    line: str = ""
    _made: dict[Any, Op] = field(default_factory=dict)

    def make(self, kind: str, shape: Shape, dtype: torch.dtype, operands: Sequence[Op] = (), data: Any = None) -> Op:
        """The op of a kind, made anew unless there is an equal one."""
        key = kind, shape, dtype, tuple(map(id, operands)), _key(data)
        if key not in self._made:
            paged = any(op.paged for op in operands) or kind in ("position", "age")
            paged = (paged and kind != "fold") or (kind == "shift")
            self._made[key] = Op(kind, shape, dtype, tuple(operands), data, paged, self.name, self.line)
        return self._made[key]

    # Leaves

    def field(self, name: str, shape: Shape, dtype: torch.dtype) -> Op:
        op = self.make("field", shape, dtype, (), name)
        op.paged, op.name = True, name
        return op

    def number(self, value: float | int | bool, dtype: torch.dtype = torch.float32) -> Op:
        if dtype.is_floating_point:
            value = float(value)
        return self.make("number", (), dtype, (), value)

    def iota(self, size: int) -> Op:
        """0, 1, ..., size - 1, int32."""
        return self.make("iota", (size,), torch.int32, (), size)

    # Elementwise

    def map(self, text: str, *operands: Op, dtype: torch.dtype | None = None) -> Op:
        """``text`` with operands {0}, {1}, ... of shapes that broadcast from the right; the dtype of the first unless
        given."""
        shape = broadcast(*(op.shape for op in operands))
        return self.make("map", shape, dtype or operands[0].dtype, operands, text)

    def cast(self, x: Op, dtype: torch.dtype) -> Op:
        """The value in another dtype; a number stays a number."""
        if x.dtype is dtype:
            return x
        if x.kind == "number":
            return self.number(x.data if dtype is not torch.bool else bool(x.data), dtype)
        if dtype is torch.bool:
            return self.map("({0} != 0)", x, dtype=dtype)
        return self.map(f"{{0}}.to({TRITON_TYPES[dtype]})", x, dtype=dtype)

    def where(self, condition: Op, x: Op, y: Op) -> Op:
        """x where the condition (bool) holds, else y."""
        return self.map("tl.where({0}, {1}, {2})", condition, x, y, dtype=x.dtype)

    # Views

    def regroup(self, x: Op, shape: Shape) -> Op:
        """Row-major regrouping of the static axes; the page axis may move past axes of size 1 only."""
        return x if x.shape == shape else self.make("regroup", shape, x.dtype, (x,))

    def unsqueeze(self, x: Op, axis: int) -> Op:
        axis %= len(x.shape) + 1
        return self.regroup(x, (*x.shape[:axis], 1, *x.shape[axis:]))

    def squeeze(self, x: Op, axis: int) -> Op:
        axis %= len(x.shape)
        return self.regroup(x, (*x.shape[:axis], *x.shape[axis + 1 :]))

    def permute(self, x: Op, order: Sequence[int]) -> Op:
        order = tuple(order)
        if order == tuple(range(len(x.shape))):
            return x
        return self.make("permute", tuple(x.shape[axis] for axis in order), x.dtype, (x,), order)

    def expand(self, x: Op, shape: Shape) -> Op:
        return x if x.shape == shape else self.make("expand", shape, x.dtype, (x,))

    # Along static axes

    def reduce(self, kind: str, x: Op, axes: Sequence[int], keepdim: bool = False) -> Op:
        """``sum``, ``max``, ``min``, ``prod`` over static axes."""
        shape = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
        result = self.make("reduce", shape, x.dtype, (x,), (kind, tuple(axes))) if axes else x
        kept = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
        return self.regroup(result, kept) if keepdim else result

    def scan(self, kind: str, x: Op, axis: int) -> Op:
        """A running reduction along a static axis."""
        return self.make("scan", x.shape, x.dtype, (x,), (kind, axis))

    def gather(self, x: Op, axis: int, index: Op) -> Op:
        """``out[..., i, ...] = x[..., index[..., i, ...], ...]`` along a static axis; other axes broadcast."""
        one = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        other = (*index.shape[:axis], 1, *index.shape[axis + 1 :])
        shape = list(broadcast(one, other))
        shape[axis] = index.shape[axis]
        return self.make("gather", tuple(shape), x.dtype, (x, index), axis)

    def take(self, x: Op, axis: int, index: Op) -> Op:
        """``gather`` by a one-dimensional index, the same for all other axes."""
        shape: Shape = tuple(index.shape[0] if one == axis else 1 for one in range(len(x.shape)))
        return self.gather(x, axis, self.regroup(index, shape))

    def along(self, size: int, axis: int, rank: int) -> Op:
        """0, 1, ... along one of ``rank`` axes."""
        return self.regroup(self.iota(size), tuple(size if one == axis else 1 for one in range(rank)))

    def contract(self, a: Op, b: Op, first: str, second: str, output: str) -> Op:
        """einsum of two operands without repeated letters in one of them."""
        sizes = {**dict(zip(first, a.shape, strict=True)), **dict(zip(second, b.shape, strict=True))}
        shape = tuple(sizes[letter] for letter in output)
        return self.make("contract", shape, a.dtype, (a, b), (first, second, output))

    # Over the page axis

    def fold(self, kind: str, x: Op, part: int = 0) -> Op:
        """A reduction over the window: ``sum``, ``max``, ``min``, ``prod``; ``softmax`` with part 0 the maximum and
        part 1 the sum of exponentials. Drops the page axis."""
        shape = tuple(size for size in x.shape if size is not None)
        whole = self.make("fold", shape, x.dtype, (x,), (kind, 0))
        return whole if part == 0 else self.make("fold", shape, x.dtype, (x,), (kind, part))

    def weights(self, x: Op, high: Op) -> Op:
        """exp(x - high) of a softmax over the window: ``high`` is its maximum, 0 where that is infinite."""
        return self.make("weights", x.shape, x.dtype, (x, high))

    def running(self, kind: str, x: Op) -> Op:
        """A running reduction over the pages of the window."""
        op = self.make("running", x.shape, x.dtype, (x,), kind)
        op.paged = True
        return op

    def shift(self, x: Op, distance: int, outside: float | int | bool) -> Op:
        """The value ``distance`` pages further on; ``outside`` beyond the window."""
        return self.make("shift", x.shape, x.dtype, (x,), (distance, outside))

    def count(self) -> Op:
        """Pages of the window, float32."""
        return self.make("count", (), torch.float32)


TRITON_TYPES: Mapping[torch.dtype, str] = {
    torch.float32: "tl.float32",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}
"""What values are computed in."""


def broadcast(*shapes: Shape) -> Shape:
    """The shape of operands that broadcast from the right; the page axis counts as a size of its own."""
    rank = max(map(len, shapes))
    result: list[int | None] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if size != 1:
                result[axis] = size
    return tuple(result)


def _key(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return id(data)
    return repr(data)
