"""Values that need more than one line: regrouping with padding, gathers, contractions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvsieve.backends.triton.generate.ir import Op
from kvsieve.backends.triton.generate.tile import PAGES, Dim, Tile, axis_index, clamped, joined, reshaped, shape_text

if TYPE_CHECKING:
    from kvsieve.backends.triton.generate.printer import Printer


def regrouped(printer: Printer, op: Op, tile: Tile) -> Tile:
    """Row-major regrouping: a reshape where nothing is padded, else a gather of the flattened axes."""
    (x,) = op.operands
    assert tile.dims is not None
    old, new, lead = x.statics, op.statics, tile.dims[: printer.lead]
    wanted = (*lead, *(printer.pad(size) for size in new))
    if all(printer.pad(size) == size for size in (*old, *new)):
        return Tile(f"tl.reshape({tile.text}, {shape_text(wanted)})", wanted)
    total, target = (math.prod(map(printer.pad, sizes)) for sizes in (old, new))
    flat = printer.assign(
        printer.names.new("flat"), Tile(f"tl.reshape({tile.text}, {shape_text((*lead, total))})", (*lead, total))
    )
    index = _places(printer, f"tl.arange(0, {target})", new, old)
    name = printer.names.new("places")
    printer.lines(PAGES in lead).append(f"{name} = {index}")
    rank = printer.lead + 1
    spread = f"tl.broadcast_to({name}{axis_index(rank - 1, rank)}, {shape_text((*lead, target))})"
    printer.count((*lead, target))
    picked = f"tl.gather({_lengthened(printer, flat, rank - 1, target)}, {spread}, {rank - 1})"
    return Tile(f"tl.reshape({picked}, {shape_text(wanted)})", wanted)


def _places(printer: Printer, index: str, new: Sequence[int], old: Sequence[int]) -> str:
    """From places among the padded new axes to places among the padded old ones, 0 for padding."""
    parts, stride, below = [], 1, 1
    for size in reversed(new):
        part = f"({index} // {below}) % {printer.pad(size)}" if below > 1 else f"{index} % {printer.pad(size)}"
        part = f"tl.minimum({part}, {size - 1})" if printer.pad(size) != size else f"({part})"
        if size > 1:
            parts.append(part if stride == 1 else f"{part} * {stride}")
        stride, below = stride * size, below * printer.pad(size)
    row = "(" + " + ".join(parts or ["0"]) + ")"
    places, stride, below = [], 1, 1
    for size in reversed(old):
        if size > 1:
            place = f"({row} // {below}) % {size}" if below > 1 else f"{row} % {size}"
            places.append(f"({place}) * {stride}" if stride > 1 else f"({place})")
        stride, below = stride * printer.pad(size), below * size
    return " + ".join(places or [f"{index} * 0"])


def gathered(printer: Printer, op: Op, shift: int) -> Tile:
    """tl.gather of operands that broadcast."""
    x, index = op.operands
    axis = printer.lead + op.static_axis(op.data)
    source, places = (printer.align(printer.solid(one, shift), one, op) for one in (x, index))
    assert source.dims is not None and places.dims is not None
    dims = list(joined(_without(source.dims, axis), _without(places.dims, axis)))
    full, wanted = list(dims), list(dims)
    full[axis], wanted[axis] = source.dims[axis], places.dims[axis]
    size = x.shape[op.data]
    assert size is not None
    text = places.text if places.dims == tuple(wanted) else f"tl.broadcast_to({places.text}, {shape_text(wanted)})"
    held = printer.assign(
        printer.names.new("places"),
        Tile(f"{clamped(text, size)}.to(tl.int32)", tuple(wanted)),
    )
    base = source.text if source.dims == tuple(full) else f"tl.broadcast_to({source.text}, {shape_text(full)})"
    printer.count(full)
    base = _lengthened(printer, Tile(base, tuple(full)), axis, wanted[axis])
    if op.dtype is torch.bool:
        return Tile(f"(tl.gather({base}.to(tl.int32), {held.text}, {axis}) != 0)", tuple(wanted))
    return Tile(f"tl.gather({base}, {held.text}, {axis})", tuple(wanted))


def _lengthened(printer: Printer, tile: Tile, axis: int, size: Dim) -> str:
    """The tile repeated along an axis to ``size``, if it is shorter: Triton 3.6 does not compile every gather of more
    elements than there are."""
    assert tile.dims is not None
    before, own, after = tile.dims[:axis], tile.dims[axis], tile.dims[axis + 1 :]
    assert isinstance(own, int) and isinstance(size, int)
    if size <= own:
        return tile.text
    one, repeated = (*before, 1, own, *after), (*before, size // own, own, *after)
    printer.count(repeated)
    text = f"tl.broadcast_to({reshaped(tile, one).text}, {shape_text(repeated)})"
    return f"tl.reshape({text}, {shape_text((*before, size, *after))})"


def _without(dims: Sequence[Dim], axis: int) -> tuple[Dim, ...]:
    return tuple(1 if one == axis else dim for one, dim in enumerate(dims))


def contracted(printer: Printer, op: Op, shift: int) -> Tile:
    """Products, summed over the letters that the result lacks."""
    first, second, output = op.data
    sizes: dict[str, int | None] = {}
    for letters, x in zip((first, second), op.operands, strict=True):
        sizes.update(zip(letters, x.shape, strict=True))
    kept = [letter for letter in output if sizes[letter] is not None]
    summed = [letter for letter in sizes if letter not in output and sizes[letter] is not None]
    order = kept + summed
    a, b = (_spread(printer, x, letters, order, shift) for x, letters in zip(op.operands, (first, second), strict=True))
    text = f"({a.text} * {b.text})"
    if a.dims is None or b.dims is None:
        known = a.dims or b.dims or printer.ones([1] * len(order))
    else:
        known = joined(a.dims, b.dims)
    if not summed:
        return Tile(text, known)
    statics = [sizes[letter] or 1 for letter in order]
    printer.count(known)
    wanted = printer.ones(
        [printer.pad(size) if letter in summed else 1 for letter, size in zip(order, statics, strict=True)]
    )
    dims = joined(known, wanted)
    if dims != known:
        text = f"tl.broadcast_to({text}, {shape_text(dims)})"
    axes = range(len(kept), len(order))
    return printer.reduced("sum", Tile(text, dims), list(axes), statics, op.dtype)


def _spread(printer: Printer, x: Op, letters: str, order: Sequence[str], shift: int) -> Tile:
    """The operand with its axes in ``order``, and axes of size 1 for letters it lacks."""
    tile = printer.value(x, shift)
    if tile.dims is None:
        return tile
    own = [letter for letter, size in zip(letters, x.shape, strict=True) if size is not None]
    ranked = sorted(range(len(own)), key=lambda axis: order.index(own[axis]))
    lead = printer.lead
    if ranked != list(range(len(own))):
        axes = (*range(lead), *(lead + axis for axis in ranked))
        text = f"tl.permute({tile.text}, {shape_text(axes)})"
        tile = printer.assign(printer.names.new("turned"), Tile(text, tuple(tile.dims[axis] for axis in axes)))
    assert tile.dims is not None
    sizes = iter(tile.dims[lead:])
    dims = (*tile.dims[:lead], *(next(sizes) if letter in own else 1 for letter in order))
    return reshaped(tile, dims)
