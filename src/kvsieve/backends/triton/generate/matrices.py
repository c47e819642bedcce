"""Fields of several axes as matrices for tensor cores, loaded as such: no values move from thread to thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsieve.backends.triton.generate.fields import TOKENS, policy
from kvsieve.backends.triton.generate.ir import Op
from kvsieve.backends.triton.generate.tile import PAGES, Dim, Tile, axis_index, times
from kvsieve.backends.triton.launch import power_of_two

if TYPE_CHECKING:
    from kvsieve.backends.triton.generate.printer import Printer

ROWS = 16
"""Rows of the smallest tensor-core tile, and the fewest products that it adds up."""


@dataclass(frozen=True)
class Places:
    """Where the elements of a value lie in a page of a stored field: a stride for each static axis."""

    field: Op
    strides: tuple[int, ...]


def places(op: Op) -> Places | None:
    """Those of a field whose axes may have been permuted, taken out or put in; None for anything else."""
    if op.kind == "field":
        return Places(op, tuple(math.prod(op.statics[axis + 1 :]) for axis in range(len(op.statics))))
    if op.kind not in ("permute", "regroup"):
        return None
    (x,) = op.operands
    under = places(x)
    if under is None:
        return None
    if op.kind == "permute":
        order = [x.static_axis(axis) for axis in op.data if x.shape[axis] is not None]
        return Places(under.field, tuple(under.strides[axis] for axis in order))
    long = [stride for stride, size in zip(under.strides, x.statics, strict=True) if size != 1]
    if [size for size in op.statics if size != 1] != [size for size in x.statics if size != 1]:
        return None
    rest = iter(long)
    return Places(under.field, tuple(0 if size == 1 else next(rest) for size in op.statics))


def loads(x: Op, letters: str, columns: Sequence[str], apart: bool) -> Places | None:
    """Where a matrix lies that is loaded as one: several axes of a page, all but the summed one of power-of-two sizes,
    whose tokens follow each other."""
    found = places(x)
    sizes = dict(zip(letters, x.shape, strict=True))
    if found is None or len(found.field.statics) < 2 or (apart and found.field.data in TOKENS):
        return None
    return found if all(power_of_two(sizes[one] or 1) == sizes[one] for one in columns) else None


def loaded(printer: Printer, x: Op, found: Places, letters: str, columns: Sequence[str], summed: str) -> Tile:
    """The matrix: [pages * columns, summed], or turned where columns lie closer together; 0 beyond the window and
    where the summed axis is padded, to 16 at least."""
    static = [letter for letter, size in zip(letters, x.shape, strict=True) if size is not None]
    sizes, strides = dict(zip(static, x.statics, strict=True)), dict(zip(static, found.strides, strict=True))
    size, held = sizes[summed], math.prod(sizes[one] for one in columns)
    upright, width = strides[summed] == 1, padded(size)
    row, block, valid = _rows(printer, held)
    tall: Dim = PAGES if held == 1 else f"PAGES * {held}"
    name = found.field.data
    pointer = printer.arguments.add(f"{name}_ptr", "field", name)
    head, page = (printer.arguments.add(f"{name}_{what}", f"field_{what}", name) for what in ("head", "page"))
    down, along = (axis_index(axis, 2) for axis in ((0, 1) if upright else (1, 0)))
    within = _within(row, [(sizes[one], strides[one]) for one in columns])
    where = [pointer, f"head * {head}", f"{block}{down} * {page}", *(f"{one}{down}" for one in within)]
    where.append(f"tl.arange(0, {width}){along}{times(strides[summed])}")
    mask = f"{valid}{down}" + (f" & (tl.arange(0, {width}){along} < {size})" if width != size else "")
    text = f"tl.load({' + '.join(where)}, mask={mask}, other=0{policy(found.field)}).to(DOT)"
    printer.loaded += found.field.elements
    printer.held += found.field.elements
    dims = (tall, width) if upright else (width, tall)
    return printer.assign(printer.names.new(f"{name}_matrix"), Tile(text, dims), of_chunk=True)


def padded(size: int) -> int:
    """The size of a summed axis in a matrix."""
    return power_of_two(size, ROWS)


def _within(row: str, axes: Sequence[tuple[int, int]]) -> list[str]:
    """Offsets of a matrix's rows in their pages, by sizes and strides of the axes that they run over."""
    offsets: list[str] = []
    below = 1
    for size, stride in reversed(axes):
        if size > 1:
            place = f"({row} // {below}) % {size}" if below > 1 else f"{row} % {size}"
            offsets.insert(0, f"({place}{times(stride)})")
        below *= size
    return offsets


def _rows(printer: Printer, held: int) -> tuple[str, str, str]:
    """Names of the rows of matrices with so many a page, of their blocks, and of where they are in the window."""
    if held == 1:
        return "", printer.block(), "valid"
    if held not in printer.rows:
        row, page, block, valid = (printer.names.new(f"{what}_{held}") for what in ("row", "page", "block", "valid"))
        pointer, stride = (printer.arguments.add(one, "input") for one in ("table_ptr", "table_stride"))
        printer.vector_lines += [
            f"{row} = tl.arange(0, PAGES * {held})",
            f"{page} = start + {row} // {held}",
            f"{valid} = {page} < width",
            f"{block} = tl.load({pointer} + place * {stride} + sink + {page}, mask={valid}, other=0)",
        ]
        printer.rows[held] = row, block, valid
    return printer.rows[held]
