"""Prints the values of one stage as lines of Triton."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvsieve.backends.triton.generate import dots, fields, folds, views
from kvsieve.backends.triton.generate.arguments import Arguments, Scratch
from kvsieve.backends.triton.generate.ir import TRITON_TYPES, Op
from kvsieve.backends.triton.generate.matrices import Matrix
from kvsieve.backends.triton.generate.names import Names
from kvsieve.backends.triton.generate.stages import Partial, StagePlan, running_partial
from kvsieve.backends.triton.generate.tile import (
    HEADS,
    PAGES,
    Dim,
    Tile,
    axis_index,
    identity,
    joined,
    literal,
    reshaped,
    shape_text,
)
from kvsieve.backends.triton.launch import power_of_two
from kvsieve.ops import show


@dataclass
class Printer:
    """One kernel's lines. ``wide``: all heads of a page in one tile, else one head at a time.

    ``largest``: elements per page of the largest tile; ``fixed``: of the largest without pages. ``apart``: the tokens
    of a page of K or V do not follow each other in memory.
    """

    plan: StagePlan
    stage: int
    wide: bool
    states: frozenset[str]
    scratch: dict[object, Scratch]
    names: Names = field(default_factory=Names)
    arguments: Arguments = field(default_factory=Arguments)
    fixed_lines: list[str] = field(default_factory=list)
    page_lines: list[str] = field(default_factory=list)
    largest: int = 1
    fixed: int = 1
    summaries: bool = False
    dot: frozenset[int] = frozenset()
    apart: bool = False
    dots: int = 0
    fewest_rows: int = 0
    most_rows: int = 0
    """Rows that a page has in the tensor-core products that have the fewest and the most."""
    loaded: int = 0
    held: int = 0
    """Elements per page that are loaded, of fields and of what earlier stages have stored."""
    exact: bool = True
    vector_lines: list[str] = field(default_factory=list)
    columns: dict[int, tuple[str, str, str]] = field(default_factory=dict)
    """Names for matrices of so many columns a page (:mod:`matrices`)."""
    matrices: dict[Matrix, str] = field(default_factory=dict)
    """Those that are loaded."""
    combined: dict[tuple[Partial, str], list[Tile]] = field(default_factory=dict)
    found: dict[Partial, list[Tile]] = field(default_factory=dict)
    _tiles: dict[tuple[int, int], Tile] = field(default_factory=dict)
    _vectors: dict[str, str] = field(default_factory=dict)
    _line: dict[bool, str] = field(default_factory=lambda: {True: "", False: ""})

    @property
    def holds_window(self) -> bool:
        """Whether the kernel's programs hold whole windows."""
        return self.plan.whole and self.stage > 0

    # Places

    def pad(self, size: int) -> int:
        """The size of an axis in a tile."""
        return power_of_two(size)

    @property
    def lead(self) -> int:
        """Axes of a tile before the static ones."""
        return 2 if self.wide else 1

    def ones(self, statics: Sequence[int] = ()) -> tuple[Dim, ...]:
        """The sizes of a tile that is the same for all pages and heads."""
        return (*(1,) * self.lead, *statics)

    def full(self, statics: Sequence[int], pages: Dim = PAGES) -> tuple[Dim, ...]:
        """The sizes of a tile of all heads that it may hold, with static axes of such sizes."""
        return (pages, *((HEADS,) if self.wide else ()), *(self.pad(size) for size in statics))

    def head(self, rank: int) -> str:
        """The KV head, or all of them along their axis of a tile."""
        return f"head{axis_index(1, rank)}" if self.wide else "head"

    def page(self, rank: int, name: str = "page") -> str:
        """A vector over pages along the page axis of a tile."""
        return f"{name}{axis_index(0, rank)}"

    def page_index(self, rank: int) -> str:
        """A vector as the page axis of a tile."""
        return axis_index(0, rank)

    def segment(self, rank: int) -> str:
        """The number of (request, head), for scratch and results."""
        return f"(request * heads + {self.head(rank)})"

    def segment_row(self, rank: int) -> str:
        """The number of (request, head), with the axes of a tile of one page."""
        return f"({self.segment(rank)} + tl.arange(0, 1){self.page_index(rank)})"

    def lines(self, paged: bool) -> list[str]:
        """Where lines go. What does not vary over pages comes first: layouts then follow the loads of pages."""
        return self.page_lines if paged or self.holds_window else self.fixed_lines

    def vector(self, name: str, text: str) -> str:
        """A vector over pages, or a number of the request, made once."""
        if name not in self._vectors:
            self.vector_lines.append(f"{name} = {text}")
            self._vectors[name] = name
        return name

    def shifted(self, distance: int) -> tuple[str, str]:
        """Names of the page numbers ``distance`` further on, and of where they are pages of the window."""
        if not distance:
            return "page", "valid"
        suffix = f"{'ahead' if distance > 0 else 'behind'}_{abs(distance)}"
        page = self.vector(f"page_{suffix}", f"page + {distance}")
        return page, self.vector(f"valid_{suffix}", f"({page} >= 0) & ({page} < width)")

    def block(self, shift: int = 0) -> str:
        """The vector of the pages' blocks."""
        return self._looked_up("block", "table", shift)

    def row(self, shift: int = 0) -> str:
        """The vector of the pages' state rows."""
        return self._looked_up("row", "row_table", shift)

    def _looked_up(self, name: str, table: str, shift: int) -> str:
        page, valid = self.shifted(shift)
        pointer = self.arguments.add(f"{table}_ptr", "input")
        stride = self.arguments.add(f"{table}_stride", "input")
        text = f"tl.load({pointer} + place * {stride} + sink + {page}, mask={valid}, other=0)"
        return self.vector(name + page.removeprefix("page"), text)

    def valid(self, shift: int, rank: int) -> str:
        """Where there are pages of the window, along the page axis of a tile."""
        return self.page(rank, self.shifted(shift)[1])

    # Values

    def value(self, op: Op, shift: int = 0) -> Tile:
        """The tile of an op, ``shift`` pages further on."""
        key = id(op), shift if op.paged else 0
        if key not in self._tiles:
            tile = fields.stored(self, op, shift) if self.plan.loads(op, self.stage) else self._make(op, shift)
            self._tiles[key] = tile
        return self._tiles[key]

    def _make(self, op: Op, shift: int) -> Tile:
        if op.kind == "number":
            return Tile(literal(op.data), None)
        if op.kind == "count":
            return Tile("width.to(tl.float32)", None)
        if op.kind == "iota":
            return Tile(
                f"tl.arange(0, {self.pad(op.data)}){axis_index(self.lead, self.lead + 1)}",
                self.ones([self.pad(op.data)]),
            )
        if op.kind in fields.LEAVES:
            return self.named(op, fields.LEAVES[op.kind](self, op, shift))
        made: Tile = getattr(self, f"_{op.kind}")(op, shift)
        return self.named(op, made)

    def named(self, op: Op, tile: Tile, base: str = "", of_chunk: bool = False) -> Tile:
        """The tile under a name of its own, unless it has one; ``of_chunk``: made from this chunk's pages."""
        if tile.dims is None or tile.text.isidentifier():
            return tile
        name = self.names.new(base or op.name or op.kind)
        paged = of_chunk or PAGES in tile.dims
        if op.line and op.line != self._line[paged]:
            self.lines(paged).append(f"# {op.line}")
        self._line[paged] = op.line or self._line[paged]
        return self.assign(name, tile, show(op.statics if of_chunk else op.shape), of_chunk)

    def assign(self, name: str, tile: Tile, comment: str = "", of_chunk: bool = False) -> Tile:
        """A line that gives the tile a name."""
        assert tile.dims is not None
        self.lines(of_chunk or PAGES in tile.dims).append(
            f"{name} = {tile.text}" + (f"  # {comment}" if comment else "")
        )
        self.count(tile.dims)
        return Tile(name, tile.dims)

    def count(self, dims: Sequence[Dim]) -> None:
        """Note a tile's size."""
        size = math.prod(dim for dim in dims if isinstance(dim, int))
        if PAGES in dims:
            self.largest = max(self.largest, size)
        else:
            self.fixed = max(self.fixed, size)

    def solid(self, op: Op, shift: int = 0, paged: bool = False) -> Tile:
        """The value with all static axes (and pages and heads, if ``paged``) at full size."""
        tile = self.value(op, shift)
        wanted = self.full(op.statics) if paged else self.ones([self.pad(size) for size in op.statics])
        if tile.dims is None:
            return Tile(f"tl.full({shape_text(wanted)}, {tile.text}, {TRITON_TYPES[op.dtype]})", wanted)
        dims = joined(tile.dims, wanted)
        if dims == tile.dims:
            return tile
        self.count(dims)
        return Tile(f"tl.broadcast_to({tile.text}, {shape_text(dims)})", dims)

    def aligned(self, op: Op, result: Op, shift: int) -> Tile:
        """The operand with its axes where those of the result are that they broadcast with."""
        return self.align(self.value(op, shift), op, result)

    def align(self, tile: Tile, op: Op, result: Op) -> Tile:
        """A tile of ``op`` beside those of ``result``."""
        if tile.dims is None:
            return tile
        offset = len(result.shape) - len(op.shape)
        statics: list[Dim] = []
        for axis, size in enumerate(result.shape):
            if size is not None:
                own = axis - offset
                statics.append(1 if own < 0 else tile.dims[self.lead + op.static_axis(own)])
        return reshaped(tile, (*tile.dims[: self.lead], *statics))

    # Leaves

    def inner(
        self, statics: Sequence[int], rank: int, outer: str = "", index: Mapping[int, str] = fields.WHOLE
    ) -> tuple[str, str]:
        """Offsets and mask of the contiguous axes of a field; ``outer``: the stride of the first, if it is another;
        ``index``: places along an axis of which not all is loaded."""
        offsets: list[str] = []
        masks: list[str] = []
        stride = 1
        for axis in reversed(range(len(statics))):
            size = statics[axis]
            if size > 1:
                everything = f"tl.arange(0, {self.pad(size)}){axis_index(rank - len(statics) + axis, rank)}"
                places = index.get(axis, everything)
                step: int | str = outer if outer and axis == 0 else stride
                offsets.insert(0, places if step == 1 else f"{places} * {step}")
                if self.pad(size) != size and axis not in index:
                    masks.insert(0, f"({places} < {size})")
            stride *= size
        return " + ".join(offsets), " & ".join(masks)

    # Within a page

    def _map(self, op: Op, shift: int) -> Tile:
        tiles = [self.aligned(operand, op, shift) for operand in op.operands]
        known = [tile.dims for tile in tiles if tile.dims is not None]
        if not known:
            dims = self.ones([1] * len(op.statics))
            text = f"tl.full({shape_text(dims)}, {tiles[0].text}, {TRITON_TYPES[op.operands[0].dtype]})"
            tiles[0], known = Tile(text, dims), [dims]
        return Tile(op.data.format(*(tile.text for tile in tiles)), joined(*known))

    def _regroup(self, op: Op, shift: int) -> Tile:
        (x,) = op.operands
        tile = self.value(x, shift)
        if tile.dims is None:
            return tile
        old, new = x.statics, op.statics
        if [size for size in old if size != 1] == [size for size in new if size != 1]:
            kept = iter(dim for dim, size in zip(tile.dims[self.lead :], old, strict=True) if size != 1)
            return reshaped(tile, (*tile.dims[: self.lead], *(1 if size == 1 else next(kept) for size in new)))
        return views.regrouped(self, op, self.solid(x, shift))

    def _permute(self, op: Op, shift: int) -> Tile:
        (x,) = op.operands
        tile = self.value(x, shift)
        if tile.dims is None:
            return tile
        order = [x.static_axis(axis) for axis in op.data if x.shape[axis] is not None]
        if order == sorted(order):
            return tile
        axes = (*range(self.lead), *(self.lead + axis for axis in order))
        dims = tuple(tile.dims[axis] for axis in axes)
        return Tile(f"tl.permute({tile.text}, {shape_text(axes)})", dims)

    def _expand(self, op: Op, shift: int) -> Tile:
        return self.aligned(op.operands[0], op, shift)

    def _gather(self, op: Op, shift: int) -> Tile:
        return fields.picked(self, op) if op.picks else views.gathered(self, op, shift)

    def mask(self, tile: Tile, axes: Sequence[int], statics: Sequence[int], other: str) -> str:
        """The tile with ``other`` where padded along static axes."""
        rank = self.lead + len(statics)
        cuts = [
            f"(tl.arange(0, {self.pad(statics[axis])}){axis_index(self.lead + axis, rank)} < {statics[axis]})"
            for axis in axes
            if self.pad(statics[axis]) != statics[axis]
        ]
        return f"tl.where({' & '.join(cuts)}, {tile.text}, {other})" if cuts else tile.text

    def _reduce(self, op: Op, shift: int) -> Tile:
        (x,) = op.operands
        kind, axes = op.data
        return self.reduced(kind, self.solid(x, shift), [x.static_axis(axis) for axis in axes], x.statics, x.dtype)

    def reduced(self, kind: str, tile: Tile, axes: Sequence[int], statics: Sequence[int], dtype: torch.dtype) -> Tile:
        """A reduction over static axes, padding left out."""
        assert tile.dims is not None
        text = self.mask(tile, axes, statics, identity(kind, dtype))
        dims = list(tile.dims)
        for axis in sorted(axes, reverse=True):
            text = f"{reduction(kind, dtype)}({text}, {self.lead + axis})"
            del dims[self.lead + axis]
        return Tile(text, tuple(dims))

    def _scan(self, op: Op, shift: int) -> Tile:
        (x,) = op.operands
        kind, axis = op.data
        tile = self.solid(x, shift)
        return Tile(f"{SCANS[kind]}({tile.text}, {self.lead + x.static_axis(axis)})", tile.dims)

    def _contract(self, op: Op, shift: int) -> Tile:
        return dots.printed(self, op) if id(op) in self.dot else views.contracted(self, op, shift)

    # Over pages

    def _shift(self, op: Op, shift: int) -> Tile:
        (x,), (distance, outside) = op.operands, op.data
        there = shift + distance
        tile, rank = self.value(x, there), self.lead + len(op.statics)
        dims = (PAGES, *(tile.dims[1:] if tile.dims else self.ones()[1:]))
        return Tile(f"tl.where({self.valid(there, rank)}, {tile.text}, {literal(outside)})", dims)

    def _fold(self, op: Op, shift: int) -> Tile:
        kind, part = op.data
        partial = Partial(kind, op.operands[0])
        tiles = folds.found(self, partial) if self.holds_window else folds.combined(self, partial, "chunks")
        tile: Tile = tiles[part]
        return tile

    def _weights(self, op: Op, shift: int) -> Tile:
        x, high = op.operands
        if self.holds_window:
            return folds.found(self, Partial("softmax", x))[2]
        values, base = self.align(self.solid(x, shift), x, op), self.aligned(high, op, shift)
        assert values.dims is not None and base.dims is not None
        return Tile(f"f.exp({values.text} - {base.text})", joined(values.dims, base.dims))

    def _running(self, op: Op, shift: int) -> Tile:
        return folds.continued(self, op, folds.combined(self, running_partial(op), "chunk"))


def reduction(kind: str, dtype: torch.dtype) -> str:
    """The function that reduces; that of floating extrema keeps NaN."""
    if kind in ("sum", "prod"):
        return "tl.sum" if kind == "sum" else "f.prod"
    return f"f.{kind}" if dtype.is_floating_point else f"tl.{kind}"


SCANS = {
    "sum": "tl.cumsum",
    "prod": "tl.cumprod",
    "log_sum": "f.running_log_sum",
    "max": "f.running_max",
    "min": "f.running_min",
}
