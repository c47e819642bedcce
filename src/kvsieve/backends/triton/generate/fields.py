"""Leaves of a kernel: fields through the page table, queries, constants, places, and values of earlier stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from kvsieve.backends.triton.generate.ir import TRITON_TYPES, Op
from kvsieve.backends.triton.generate.stages import HOISTED
from kvsieve.backends.triton.generate.tile import HEADS, PAGES, Dim, Tile, axis_index, clamped, shape_text, times
from kvsieve.mass import FIELDS as MASS_FIELDS

if TYPE_CHECKING:
    from kvsieve.backends.triton.generate.printer import Printer

TOKENS = ("k", "v")
"""Fields whose first axis is the tokens of a page, which an engine may keep apart in memory."""
WHOLE: Mapping[int, str] = {}
"""No axis of which only a part is loaded."""
STREAMED = 32
"""Elements per page from which on a field is a stream."""


def _load(
    printer: Printer,
    pointer: str,
    places: Sequence[str],
    masks: Sequence[str],
    statics: Sequence[int],
    rank: int,
    more: str = "",
    outer: str = "",
    index: Mapping[int, str] = WHOLE,
) -> str:
    """A load of contiguous static axes at places that have the axes of a tile; ``outer``: the stride of the first;
    ``index``: places along an axis of which not all is loaded."""
    offsets, mask = printer.inner(statics, rank, outer, index)
    where = " + ".join(part for part in (pointer, *places, offsets) if part)
    cut = " & ".join(part for part in (*masks, mask) if part)
    return f"tl.load({where}, mask={cut}, other=0{more})" if cut else f"tl.load({where}{more})"


def field(printer: Printer, op: Op, shift: int, pick: Op | None = None) -> Tile:
    """A stored field of the pages, through their table, in the dtype that is computed in; 0 beyond the window.
    ``pick``: what takes elements of it, if no others are to be loaded."""
    name, rank, result = op.data, printer.lead + len(op.statics), pick or op
    valid = printer.shifted(shift)[1]
    place = "block" if printer.summaries else printer.row(shift) if name in printer.states else printer.block(shift)
    pointer = printer.arguments.add(f"{name}_ptr", "field", name)
    printer.loaded += result.elements
    printer.held += result.elements
    printer.exact &= pick is None and all(printer.pad(size) == size for size in op.statics)
    if printer.wide:
        return _row_of_heads(printer, op, pointer, place, valid)
    places = (
        f"{printer.head(rank)} * {printer.arguments.add(f'{name}_head', 'field_head', name)}",
        f"{printer.page(rank, place)} * {printer.arguments.add(f'{name}_page', 'field_page', name)}",
    )
    outer = printer.arguments.add(f"{name}_token", "field_token", name) if printer.apart and name in TOKENS else ""
    mask, index = printer.page(rank, valid), _index(printer, pick)
    text = _load(printer, pointer, places, (mask,), op.statics, rank, eviction(result), outer, index)
    text += f".to({TRITON_TYPES[op.dtype]})"
    text += " * mass_scale" if _scaled(printer, op) else ""
    return Tile(text, printer.full(result.statics))


def picked(printer: Printer, op: Op) -> Tile:
    """The elements that a gather picks of a field or of the queries."""
    x = op.operands[0]
    return query(printer, x, 0, op) if x.kind == "query" else field(printer, x, 0, op)


def _index(printer: Printer, pick: Op | None) -> Mapping[int, str]:
    """The places that are picked, by their static axis."""
    if pick is None:
        return WHOLE
    x, index = pick.operands
    tile, axis = printer.align(printer.solid(index), index, pick), x.static_axis(pick.data)
    places = Tile(clamped(tile.text, x.statics[axis]), tile.dims)
    return {axis: printer.assign(printer.names.new("places"), places).text}


def _row_of_heads(printer: Printer, op: Op, pointer: str, place: str, valid: str) -> Tile:
    """All heads of a page, which lie side by side, as one row."""
    dims: tuple[Dim, ...] = (PAGES, HEADS, *op.statics)
    stride = printer.arguments.add(f"{op.data}_page", "field_page", op.data)
    row = f"HEADS * {op.elements}" if op.elements > 1 else "HEADS"
    where = f"{pointer} + {printer.page(2, place)} * {stride} + tl.arange(0, {row})[None, :]"
    text = f"tl.load({where}, mask={printer.page(2, valid)}, other=0{eviction(op)}).to({TRITON_TYPES[op.dtype]})"
    text = text if len(dims) == 2 else f"tl.reshape({text}, {shape_text(dims)})"
    return Tile(f"{text} * mass_scale" if _scaled(printer, op) else text, dims)


def eviction(op: Op) -> str:
    """A field that is read once should not push others out of the cache."""
    return ', eviction_policy="evict_first"' if op.elements >= STREAMED else ""


def _scaled(printer: Printer, op: Op) -> bool:
    """Whether a field is stored in units of its own; then the unit is loaded."""
    if op.data not in MASS_FIELDS:
        return False
    printer.vector("mass_scale", f"tl.load({printer.arguments.add('mass_scale_ptr', 'input')} + request)")
    return True


def query(printer: Printer, op: Op, shift: int, pick: Op | None = None) -> Tile:
    """The query rows of the request and KV head: float32 [1, group, head_dim], or what ``pick`` takes of them."""
    rank = printer.lead + 2
    index = [f"tl.arange(0, {printer.pad(size)}){axis_index(rank - 2 + i, rank)}" for i, size in enumerate(op.statics)]
    masks = [
        f"({one} < {size})" if printer.pad(size) != size else "" for one, size in zip(index, op.statics, strict=True)
    ]
    for name in ("q_request", "q_head", "q_group"):
        printer.arguments.add(name, "input")
    for axis, places in _index(printer, pick).items():
        index[axis], masks[axis] = places, ""
    where = f"{printer.arguments.add('q_ptr', 'input')} + request * q_request + {printer.head(rank)} * q_head"
    mask = f", mask={' & '.join(filter(None, masks))}, other=0" if any(masks) else ""
    text = f"tl.load({where} + {index[0]}.to(tl.int64) * q_group + {index[1]}{mask}).to(tl.float32)"
    return Tile(text, printer.full((pick or op).statics, 1))


def constant(printer: Printer, op: Op, shift: int) -> Tile:
    """A tensor of the flow, the same for every page."""
    rank = printer.lead + len(op.statics)
    name = printer.names.kept(op, op.name or "constant")
    pointer = printer.arguments.constant(op, name)
    zero = f"tl.zeros({shape_text((1,) * rank)}, tl.int32)"
    text = _load(printer, f"{pointer} + {zero}", (), (), op.statics, rank)
    return Tile(f"{text}.to({TRITON_TYPES[op.dtype]})", printer.ones([printer.pad(size) for size in op.statics]))


def position(printer: Printer, op: Op, shift: int) -> Tile:
    """Positions of the pages' first tokens: float32 [PAGES]."""
    page = printer.page(printer.lead, printer.shifted(shift)[0])
    return Tile(f"((sink + {page}) * page_size).to(tl.float32)", (PAGES, *printer.ones()[1:]))


def age(printer: Printer, op: Op, shift: int) -> Tile:
    """Tokens since the pages' last ones: float32 [PAGES]."""
    printer.vector("length", f"tl.load({printer.arguments.add('lengths_ptr', 'input')} + place)")
    page = printer.page(printer.lead, printer.shifted(shift)[0])
    return Tile(f"(length - (sink + {page} + 1) * page_size).to(tl.float32)", (PAGES, *printer.ones()[1:]))


def stored(printer: Printer, op: Op, shift: int) -> Tile:
    """A value per page, or one of the queries, that an earlier stage has left in scratch memory."""
    scratch, rank = printer.scratch[id(op)], printer.lead + len(op.statics)
    printer.arguments.add(f"{scratch.name}_ptr", "scratch", scratch.name)
    if scratch.stage == HOISTED:
        row, masks, dims = printer.segment_row(rank), [], printer.full(op.statics, 1)
    else:
        page, valid = (printer.page(rank, one) for one in printer.shifted(shift))
        row, masks, dims = f"({printer.segment(rank)} * width_bound + {page})", [valid], printer.full(op.statics)
        printer.held += op.elements
    text = _load(printer, f"{scratch.name}_ptr", (f"{row}{times(op.elements)}",), masks, op.statics, rank)
    text += f".to({TRITON_TYPES[op.dtype]})" if op.dtype is torch.bool else ""
    return printer.named(op, Tile(text, dims), scratch.name)


LEAVES: dict[str, Callable[[Printer, Op, int], Tile]] = {
    "field": field,
    "query": query,
    "constant": constant,
    "position": position,
    "age": age,
}
"""By kind of op."""
