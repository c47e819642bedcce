"""Contractions through tensor cores: query rows against stored values of pages; exact products, sums in float32.

Rows that the flow computes from queries have the bits of float32: three parts of bfloat16 hold them, and are rows of
the same product. float16 has no room for the last parts, nor for large rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvsieve.backends.triton.generate import matrices
from kvsieve.backends.triton.generate.ir import Op, walk
from kvsieve.backends.triton.generate.matrices import ROWS
from kvsieve.backends.triton.generate.tile import PAGES, Dim, Tile, shape_text

if TYPE_CHECKING:
    from kvsieve.backends.triton.generate.printer import Printer

FEWEST, MOST = 2, 64
"""Query rows for which it pays, parts counted."""
FEWEST_SUMMED = 8
"""Products to be added up from which on it pays to fill a tile with zeros."""
PARTS = 4
"""Rows in place of a computed one: its three parts, and zeros."""
SIGNS = ("f.maximum({0}, {1})", "f.minimum({0}, {1})")


def keeps_values(op: Op) -> bool:
    """Whether an op's values are stored ones (or zeros), so that the stored dtype holds them."""
    if op.kind in ("regroup", "permute", "gather"):
        return keeps_values(op.operands[0])
    if op.kind == "map" and op.data in SIGNS:
        x, number = op.operands
        return keeps_values(x) and number.kind == "number" and number.data == 0
    return op.kind in ("query", "field") and op.dtype.is_floating_point


def _sides(op: Op) -> tuple[Op, Op, str, str]:
    """The operand that does not vary over pages, the other, and the letters of their axes."""
    (a, x), (first, second, _) = op.operands, op.data
    return (a, x, first, second) if x.paged else (x, a, second, first)


def suits(op: Op, own_dtypes: frozenset[str], dtype: torch.dtype) -> bool:
    """Whether a contraction may run on tensor cores, of queries and pages in ``dtype``; ``own_dtypes`` are fields that
    are not stored in it."""
    if op.kind != "contract":
        return False
    (a, x, first, second), output = _sides(op), op.data[2]
    summed = [letter for letter in first if letter not in output]
    rows = [letter for letter in first if letter in output]
    if (
        a.paged
        or None not in x.shape
        or len(summed) != 1
        or len(rows) != 1
        or summed[0] not in second
        or None in a.shape
    ):
        return False
    if set(rows) & set(second) or any(letter not in output for letter in second if letter != summed[0]):
        return False
    width, most = a.shape[first.index(summed[0])] or 0, MOST
    count = math.prod(a.shape[first.index(letter)] or 1 for letter in rows)
    stored = not any(one.kind == "field" and one.data in own_dtypes for one in _sources(x))
    if not keeps_values(a):
        most = MOST // PARTS if dtype == torch.bfloat16 and a.dtype == torch.float32 else 0
    columns = [letter for letter, size in zip(second, x.shape, strict=True) if size and letter != summed[0]]
    fewest = FEWEST_SUMMED if matrices.loads(x, second, columns, True) else ROWS
    return FEWEST <= count <= most and width >= fewest and keeps_values(x) and stored


def found(outputs: Sequence[Op], own_dtypes: frozenset[str], dtype: torch.dtype) -> list[Op]:
    """The contractions for tensor cores."""
    return [op for op in walk(outputs) if suits(op, own_dtypes, dtype)]


def _sources(op: Op) -> list[Op]:
    return [op] if not op.operands else [leaf for operand in op.operands for leaf in _sources(operand)]


def printed(printer: Printer, op: Op, shift: int) -> Tile:
    """``tl.dot`` of the rows and the pages' values, and the sum of the products of a row's parts."""
    (a, x, first, second), output = _sides(op), op.data[2]
    summed = next(letter for letter in first if letter not in output)
    page = next(letter for letter, size in zip(second, x.shape, strict=True) if size is None)
    rows = [letter for letter in first if letter != summed]
    columns = [letter for letter in second if letter not in (summed, page)]
    sizes = {**dict(zip(first, a.shape, strict=True)), **dict(zip(second, x.shape, strict=True))}
    pads = {letter: printer.pad(size) for letter, size in sizes.items() if size is not None}
    height = math.prod(pads[one] for one in rows)
    place = None if shift else matrices.loads(x, second, columns, printer.apart)
    width = pads[summed] if place is None else matrices.padded(pads[summed])
    slots = 0 if keeps_values(a) else PARTS
    left = _rows(printer, _matrix(printer, a, first, [*rows, summed], (height, pads[summed]), shift), slots, width)
    held = math.prod(pads[one] for one in columns)
    tall: Dim = f"PAGES * {held}" if held > 1 else PAGES
    if place is None:
        order = [*columns, summed]
        right = f"tl.trans({_matrix(printer, x, second.replace(page, ''), order, (tall, pads[summed]), shift).text})"
    else:
        matrix = matrices.loaded(printer, x, place, second, columns, summed)
        right = f"tl.trans({matrix.text})" if matrix.dims == (tall, width) else matrix.text
    printer.largest = max(printer.largest, held * pads[summed])
    printer.dot_rows = min(held, printer.dot_rows) if printer.dots else held
    printer.dots += 1
    text = f"tl.trans(tl.dot({left}, {right}))"
    if slots:
        text = f"tl.sum(tl.reshape({text}, {shape_text((tall, slots, height))}), 1)"
    result = printer.assign(printer.names.new("products"), Tile(text, (tall, height)), "", True)
    apart: tuple[Dim, ...] = (PAGES, *(pads[one] for one in (*columns, *rows)))
    text = result.text if len(apart) == 2 else f"tl.reshape({result.text}, {shape_text(apart)})"
    order = [letter for letter in output if letter != page]
    axes = [0, *(1 + [*columns, *rows].index(letter) for letter in order)]
    if axes != sorted(axes):
        text = f"tl.permute({text}, {shape_text(axes)})"
    return Tile(text, tuple(apart[axis] for axis in axes))


def _rows(printer: Printer, rows: Tile, slots: int, width: int) -> str:
    """Query rows [height, summed] with zeros up to ``width``; in parts, if they have ``slots``."""
    assert rows.dims is not None
    height, summed = rows.dims
    text, dims = rows.text, (height, width)
    if width != summed:
        text = printer.assign(printer.names.new("wide"), Tile(f"f.widened({text}, {width})", dims)).text
    if slots:
        parts = Tile(f"f.in_parts({text}, {slots}, DOT)", (slots * int(height), width))
        text = printer.assign(printer.names.new("parts"), parts).text
    return text


def _matrix(printer: Printer, x: Op, letters: str, order: list[str], dims: tuple[Dim, Dim], shift: int) -> Tile:
    """An operand as a matrix, its axes in order; stored values are cast first, as axes may move through shared memory.

    What does not vary over pages is 0 where the axis that is summed is padded: computed, it might be anything there,
    and so might values of pages that were regrouped.
    """
    tile = printer.solid(x, shift)
    assert tile.dims is not None
    if not x.paged:
        cut = printer.mask(tile, [letters.index(order[-1])], x.statics, "0.0")
        tile = printer.assign(printer.names.new("cut"), Tile(cut, tile.dims)) if cut != tile.text else tile
    axes = [0, *(1 + letters.index(letter) for letter in order)]
    narrow = f"{tile.text}.to(DOT)" if keeps_values(x) else tile.text
    text = narrow if axes == sorted(axes) else f"tl.permute({narrow}, {shape_text(axes)})"
    return Tile(text if tile.dims == dims and axes == sorted(axes) else f"tl.reshape({text}, {shape_text(dims)})", dims)
