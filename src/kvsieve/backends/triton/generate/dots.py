"""Contractions through tensor cores: query rows against stored values of pages; exact products, sums in float32.

Rows that the flow computes from queries have the bits of float32: three parts of bfloat16 hold them, and are rows of
the same product. float16 has no room for the last parts, nor for large rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvsieve.backends.triton.generate import matrices
from kvsieve.backends.triton.generate.ir import Op, walk
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


@dataclass(frozen=True)
class Product:
    """A contraction over one axis of query rows [``row``, ``summed``] with pages [page, ``columns``, ``summed``], in
    any order of the axes: ``first`` and ``second`` are their letters."""

    rows: Op
    pages: Op
    first: str
    second: str
    row: str
    summed: str
    columns: tuple[str, ...]

    def size(self, letter: str) -> int:
        """The size of a static axis."""
        own = self.rows.shape[self.first.index(letter)] if letter in self.first else None
        return own or self.pages.shape[self.second.index(letter)] or 0

    def matrix(self, apart: bool) -> matrices.Matrix | None:
        """The matrix as which the pages are loaded, if they are; ``apart``: tokens do not follow each other."""
        return matrices.matrix_of(self.pages, self.second, self.columns, self.summed, apart)


def product(op: Op) -> Product | None:
    """A contraction of that form; None for others."""
    if op.kind != "contract":
        return None
    (rows, pages), (first, second, output) = op.operands, op.data
    if not pages.paged:
        rows, pages, first, second = pages, rows, second, first
    if rows.paged or None in rows.shape or None not in pages.shape or len(first) != 2:
        return None
    summed = [letter for letter in first if letter not in output]
    row = [letter for letter in first if letter in output]
    if len(summed) != 1 or summed[0] not in second or row[0] in second:
        return None
    columns = tuple(
        one for one, size in zip(second, pages.shape, strict=True) if size is not None and one not in summed
    )
    if any(one not in output for one in columns):
        return None
    return Product(rows, pages, first, second, row[0], summed[0], columns)


def suits(op: Op, own_dtypes: frozenset[str], dtype: torch.dtype) -> bool:
    """Whether a contraction may run on tensor cores, of queries and pages in ``dtype``; ``own_dtypes`` are fields that
    are not stored in it."""
    one = product(op)
    if one is None or not keeps_values(one.pages):
        return False
    most = MOST
    if not keeps_values(one.rows):
        most = MOST // PARTS if dtype == torch.bfloat16 and one.rows.dtype == torch.float32 else 0
    fewest = matrices.LEAST_SUMMED if one.matrix(apart=True) is None else FEWEST_SUMMED  # whatever engine stores it
    stored = not any(leaf.kind == "field" and leaf.data in own_dtypes for leaf in _sources(one.pages))
    return FEWEST <= one.size(one.row) <= most and one.size(one.summed) >= fewest and stored


def found(outputs: Sequence[Op], own_dtypes: frozenset[str], dtype: torch.dtype) -> list[Op]:
    """The contractions for tensor cores."""
    return [op for op in walk(outputs) if suits(op, own_dtypes, dtype)]


def _sources(op: Op) -> list[Op]:
    return [op] if not op.operands else [leaf for operand in op.operands for leaf in _sources(operand)]


def printed(printer: Printer, op: Op) -> Tile:
    """``tl.dot`` of the rows and the pages' values, and the sum of the products of a row's parts."""
    one = product(op)
    assert one is not None
    pads = {letter: printer.pad(one.size(letter)) for letter in (one.row, one.summed, *one.columns)}
    height, depth, per_page = pads[one.row], pads[one.summed], math.prod(pads[letter] for letter in one.columns)
    tall: Dim = f"PAGES * {per_page}" if per_page > 1 else PAGES
    left = _matrix(printer, one.rows, one.first, [one.row, one.summed], (height, depth))
    matrix = one.matrix(printer.apart)
    if matrix is None:
        statics = "".join(letter for letter in one.second if letter in pads)
        right = f"tl.trans({_matrix(printer, one.pages, statics, [*one.columns, one.summed], (tall, depth)).text})"
    else:
        left, right = _deepened(printer, left, matrix.depth), matrices.printed(printer, matrix)
    computed = not keeps_values(one.rows)
    if computed:
        dims = (PARTS * height, depth if matrix is None else matrix.depth)
        left = printer.assign(printer.names.new("parts"), Tile(f"f.in_parts({left.text}, {PARTS}, DOT)", dims))
    printer.largest = max(printer.largest, per_page * depth)
    printer.fewest_rows = min(per_page, printer.fewest_rows) if printer.dots else per_page
    printer.most_rows = max(per_page, printer.most_rows)
    printer.dots += 1
    text = f"tl.trans(tl.dot({left.text}, {right}))"
    if computed:
        text = f"tl.sum(tl.reshape({text}, {shape_text((tall, PARTS, height))}), 1)"
    result = printer.assign(printer.names.new("products"), Tile(text, (tall, height)), "", True)
    return _in_order(one, result.text, (PAGES, *(pads[letter] for letter in one.columns), height), op.data[2])


def _in_order(one: Product, text: str, dims: tuple[Dim, ...], output: str) -> Tile:
    """Products [page, columns, row] with the axes of the result."""
    text = text if len(dims) == 2 else f"tl.reshape({text}, {shape_text(dims)})"
    letters = [*one.columns, one.row]
    axes = [0, *(1 + letters.index(letter) for letter in output if letter in letters)]
    if axes != sorted(axes):
        text = f"tl.permute({text}, {shape_text(axes)})"
    return Tile(text, tuple(dims[axis] for axis in axes))


def _deepened(printer: Printer, rows: Tile, depth: int) -> Tile:
    """Query rows [height, summed] with zeros up to ``depth`` products."""
    assert rows.dims is not None
    if rows.dims[1] == depth:
        return rows
    return printer.assign(
        printer.names.new("deep"), Tile(f"f.zeros_behind({rows.text}, {depth})", (rows.dims[0], depth))
    )


def _matrix(printer: Printer, x: Op, letters: str, order: list[str], dims: tuple[Dim, Dim]) -> Tile:
    """An operand as a matrix, its axes in order; stored values are cast first, as axes may move through shared memory.

    What does not vary over pages is 0 where the axis that is summed is padded: computed, it might be anything there,
    and so might values of pages that were regrouped.
    """
    tile = printer.solid(x)
    assert tile.dims is not None
    if not x.paged:
        cut = printer.mask(tile, [letters.index(order[-1])], x.statics, "0.0")
        tile = printer.assign(printer.names.new("cut"), Tile(cut, tile.dims)) if cut != tile.text else tile
    axes = [0, *(1 + letters.index(letter) for letter in order)]
    narrow = f"{tile.text}.to(DOT)" if keeps_values(x) else tile.text
    text = narrow if axes == sorted(axes) else f"tl.permute({narrow}, {shape_text(axes)})"
    return Tile(text if tile.dims == dims and axes == sorted(axes) else f"tl.reshape({text}, {shape_text(dims)})", dims)
