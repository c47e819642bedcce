"""Fields of several axes as matrices for tensor cores, loaded as such: no values move from thread to thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsieve.backends.triton.generate.fields import TOKENS, eviction
from kvsieve.backends.triton.generate.ir import Op
from kvsieve.backends.triton.generate.tile import axis_index, times
from kvsieve.backends.triton.launch import power_of_two

if TYPE_CHECKING:
    from kvsieve.backends.triton.generate.printer import Printer

LEAST_SUMMED = 16
"""Products that a tensor core adds up, at least."""
Axis = tuple[int, int]
"""The size of an axis of a page, and its stride."""


@dataclass(frozen=True)
class Matrix:
    """A field as [summed, pages * columns]: the axis that is summed, and those that are not, in their order."""

    field: Op
    columns: tuple[Axis, ...]
    summed: Axis

    @property
    def per_page(self) -> int:
        """Columns of a page."""
        return math.prod(size for size, _ in self.columns)

    @property
    def depth(self) -> int:
        """The size of the summed axis, zeros counted."""
        return power_of_two(self.summed[0], LEAST_SUMMED)


def matrix_of(x: Op, letters: str, columns: Sequence[str], summed: str, apart: bool) -> Matrix | None:
    """The matrix of a value that is a field of several axes: permuted, or with axes of size 1 put in or taken out.

    None for anything else, where columns would have to be padded, and where the tokens of a page lie ``apart``.
    """
    found = _strided(x)
    if found is None:
        return None
    field, strides = found
    statics = [letter for letter, size in zip(letters, x.shape, strict=True) if size is not None]
    axes = dict(zip(statics, zip(x.statics, strides, strict=True), strict=True))
    if len(field.statics) < 2 or (apart and field.data in TOKENS):
        return None
    if any(power_of_two(axes[one][0]) != axes[one][0] for one in columns):
        return None
    return Matrix(field, tuple(axes[one] for one in columns), axes[summed])


def _strided(op: Op) -> tuple[Op, tuple[int, ...]] | None:
    """The field that a value is, and the stride of each of the value's static axes."""
    if op.kind == "field":
        return op, tuple(math.prod(op.statics[axis + 1 :]) for axis in range(len(op.statics)))
    if op.kind not in ("permute", "regroup"):
        return None
    (x,) = op.operands
    under = _strided(x)
    if under is None:
        return None
    field, strides = under
    if op.kind == "permute":
        order = [x.static_axis(axis) for axis in op.data if x.shape[axis] is not None]
        return field, tuple(strides[axis] for axis in order)
    if [size for size in op.statics if size != 1] != [size for size in x.statics if size != 1]:
        return None
    long = iter([stride for stride, size in zip(strides, x.statics, strict=True) if size != 1])
    return field, tuple(0 if size == 1 else next(long) for size in op.statics)


def printed(printer: Printer, matrix: Matrix) -> str:
    """The loaded matrix [depth, pages * columns], 0 beyond the window and behind the summed axis: its transpose where
    the summed axis is the contiguous one."""
    if matrix not in printer.matrices:
        printer.matrices[matrix] = _loaded(printer, matrix)
    return printer.matrices[matrix]


def _loaded(printer: Printer, matrix: Matrix) -> str:
    name, (size, stride), depth = matrix.field.data, matrix.summed, matrix.depth
    column, block, valid = _columns(printer, matrix.per_page)
    upright = stride == 1
    down, along = (axis_index(axis, 2) for axis in ((0, 1) if upright else (1, 0)))
    head, page = (printer.arguments.add(f"{name}_{what}", f"field_{what}", name) for what in ("head", "page"))
    where = [printer.arguments.add(f"{name}_ptr", "field", name), f"head * {head}", f"{block}{down} * {page}"]
    where += [f"{one}{down}" for one in _within(column, matrix.columns)]
    where.append(f"tl.arange(0, {depth}){along}{times(stride)}")
    mask = f"{valid}{down}" + (f" & (tl.arange(0, {depth}){along} < {size})" if depth != size else "")
    printer.loaded += matrix.field.elements
    printer.held += matrix.field.elements
    loaded = printer.names.new(f"{name}_matrix")
    text = f"tl.load({' + '.join(where)}, mask={mask}, other=0{eviction(matrix.field)}).to(DOT)"
    printer.page_lines.append(f"{loaded} = {text}")
    return f"tl.trans({loaded})" if upright else loaded


def _within(column: str, axes: Sequence[Axis]) -> list[str]:
    """Offsets in their pages of the columns that run over some axes."""
    offsets: list[str] = []
    below = 1
    for size, stride in reversed(axes):
        if size > 1:
            place = f"({column} // {below}) % {size}" if below > 1 else f"{column} % {size}"
            offsets.insert(0, f"({place}{times(stride)})")
        below *= size
    return offsets


def _columns(printer: Printer, per_page: int) -> tuple[str, str, str]:
    """Names of the columns of matrices with so many a page, of their blocks, and of where they are in the window."""
    if per_page == 1:
        return "", printer.block(), "valid"
    if per_page not in printer.columns:
        words = ("column", "page", "block", "valid")
        column, page, block, valid = (printer.names.new(f"{word}_{per_page}") for word in words)
        pointer, stride = (printer.arguments.add(one, "input") for one in ("table_ptr", "table_stride"))
        printer.vector_lines += [
            f"{column} = tl.arange(0, PAGES * {per_page})",
            f"{page} = start + {column} // {per_page}",
            f"{valid} = {page} < width",
            f"{block} = tl.load({pointer} + place * {stride} + sink + {page}, mask={valid}, other=0)",
        ]
        printer.columns[per_page] = column, block, valid
    return printer.columns[per_page]
