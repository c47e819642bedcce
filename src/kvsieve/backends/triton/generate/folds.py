"""Page-wide reductions: what a chunk of pages finds, and how the next stages put the chunks together, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvsieve.backends.triton.generate.arguments import Scratch
from kvsieve.backends.triton.generate.ir import TRITON_TYPES, Op
from kvsieve.backends.triton.generate.stages import Partial
from kvsieve.backends.triton.generate.tile import Dim, Tile, identity, shape_text, times
from kvsieve.backends.triton.launch import largest_power

if TYPE_CHECKING:
    from kvsieve.backends.triton.generate.printer import Printer

COMBINED = 2048
"""Elements of chunks' results that are loaded at once."""


def found(printer: Printer, partial: Partial) -> list[Tile]:
    """What this chunk of pages, or the window, contributes: tiles of one page; of a softmax over a window that a
    program holds also the terms."""
    if partial not in printer.found:
        printer.found[partial] = _found(printer, partial)
    return printer.found[partial]


def _found(printer: Printer, partial: Partial) -> list[Tile]:
    x = partial.operand
    tile, rank = printer.solid(x, paged=True), printer.lead + len(x.statics)
    valid = printer.valid(0, rank)
    assert tile.dims is not None
    dims = (1, *tile.dims[1:])
    whose = "window" if printer.holds_window else "chunk"
    if partial.kind != "softmax":
        cut = f"tl.where({valid}, {tile.text}, {identity(partial.kind, x.dtype)})"
        return [printer.named(x, Tile(_over_pages(partial.kind, x.dtype, cut), dims), f"{whose}_{partial.kind}", True)]
    if printer.holds_window:
        return _window_softmax(printer, x, printer.named(x, tile), dims, valid)
    tile = printer.named(x, tile)
    text = f'tl.max(tl.where({valid}, {tile.text}, float("-inf")), 0, keep_dims=True)'
    high = printer.named(x, Tile(text, dims), f"{whose}_max", True)
    base = printer.named(
        x, Tile(f'tl.where({high.text} == float("-inf"), 0.0, {high.text})', dims), f"{whose}_base", True
    )
    text = f"tl.sum(tl.where({valid}, f.exp({tile.text} - {base.text}), 0.0), 0, keep_dims=True)"
    return [high, printer.named(x, Tile(text, dims), f"{whose}_sum", True)]


def _window_softmax(printer: Printer, x: Op, tile: Tile, dims: tuple[Dim, ...], valid: str) -> list[Tile]:
    """Maximum, sum and terms of a softmax over the window that a program holds: exponentials are taken once."""
    cut = printer.named(x, Tile(f'tl.where({valid}, {tile.text}, float("-inf"))', tile.dims), "window")
    high = printer.named(x, Tile(f"tl.max({cut.text}, 0, keep_dims=True)", dims), "window_max", True)
    text = f'tl.where(tl.abs({high.text}) == float("inf"), 0.0, {high.text})'
    base = printer.named(x, Tile(text, dims), "window_base", True)
    weights = printer.named(x, Tile(f"f.exp({cut.text} - {base.text})", tile.dims), "window_weights")
    text = f'tl.where({high.text} == float("inf"), float("nan"), tl.sum({weights.text}, 0, keep_dims=True))'
    return [high, printer.named(x, Tile(text, dims), "window_sum", True), weights]


def _over_pages(kind: str, dtype: torch.dtype, text: str) -> str:
    if kind == "prod" or (kind != "sum" and dtype.is_floating_point):
        return f"f.{kind}({text}, 0, True)"
    return f"tl.{kind}({text}, 0, keep_dims=True)"


def place(printer: Printer, scratch: Scratch, chunk: str, rank: int) -> str:
    """Offset of a chunk's results; ``chunk`` has the axes of a tile."""
    bound = printer.arguments.add(f"chunks_{scratch.stage}", "chunks", str(scratch.stage))
    return f"({printer.segment(rank)} * {bound} + {chunk}){times(scratch.elements)}"


def combined(printer: Printer, partial: Partial, until: str) -> list[Tile]:
    """The results of chunks ``0 .. until`` put together: ``chunks``, all of them, or ``chunk``, those before this one.

    Tiles of one page.
    """
    key = (partial, until)
    if key in printer.combined:
        return printer.combined[key]
    x, names = partial.operand, printer.names
    parts = [printer.scratch[partial, component] for component in partial.components]
    stage, rank = parts[0].stage, printer.lead + len(x.statics)
    dims = printer.full(x.statics, 1)
    count = largest_power(min(256, COMBINED // max(x.elements, 1)))
    end = f"tl.minimum((width + PAGES_{stage} - 1) // PAGES_{stage}, chunks_{stage})" if until == "chunks" else "chunk"
    printer.arguments.add(f"PAGES_{stage}", "pages", str(stage))
    results = []
    for part, component in zip(parts, partial.components, strict=True):
        name = names.new(part.name if until == "chunks" else f"{part.name}_before")
        start = identity(component, x.dtype)
        printer.fixed_lines.append(f"{name} = tl.full({shape_text(dims)}, {start}, {TRITON_TYPES[x.dtype]})")
        results.append(Tile(name, dims))
    end_name = names.new("end")
    printer.fixed_lines.append(f"{end_name} = {end}")
    printer.fixed_lines.append(f"for first in range(0, {end_name}, {count}):  # in the order of the chunks")
    loaded = []
    offsets, mask = printer.inner(x.statics, rank)
    for part, component in zip(parts, partial.components, strict=True):
        pointer = printer.arguments.add(f"{part.name}_ptr", "scratch", part.name)
        chunk = f"(first + tl.arange(0, {count}){printer.page_index(rank)})"
        where = " + ".join(piece for piece in (pointer, place(printer, part, chunk, rank), offsets) if piece)
        cut = " & ".join(piece for piece in (f"({chunk} < {end_name})", mask) if piece)
        other = identity(component, x.dtype)
        loaded.append(names.new(f"{part.name}_found"))
        printer.fixed_lines.append(f"    {loaded[-1]} = tl.load({where}, mask={cut}, other={other})")
    printer.count((count, *dims[1:]))
    _combine(printer, partial, [tile.text for tile in results], loaded)
    printer.combined[key] = results
    return results


def _combine(printer: Printer, partial: Partial, results: list[str], loaded: list[str]) -> None:
    lines, dtype = printer.fixed_lines, partial.operand.dtype
    if partial.kind == "softmax":
        (high, total), (highs, totals) = results, loaded
        top, base = printer.names.new("top"), printer.names.new("base")
        lines.append(f"    {top} = tl.maximum({high}, tl.max({highs}, 0, keep_dims=True))")
        lines.append(f'    {base} = tl.where({top} == float("-inf"), 0.0, {top})')
        moved = f"tl.sum({totals} * f.exp({highs} - {base}), 0, keep_dims=True)"
        lines.append(f"    {total} = {total} * f.exp({high} - {base}) + {moved}")
        lines.append(f"    {high} = {top}")
        return
    reduced = _over_pages(partial.kind, dtype, loaded[0])
    (result,) = results
    prefix = "f" if dtype.is_floating_point else "tl"
    text = {"sum": f"{result} + {reduced}", "prod": f"{result} * {reduced}"}
    lines.append(f"    {result} = {text.get(partial.kind) or f'{prefix}.{partial.kind}imum({result}, {reduced})'}")


def continued(printer: Printer, op: Op, before: list[Tile]) -> Tile:
    """A running reduction: that of the chunks before, then along the pages of this one."""
    (x,) = op.operands
    tile, rank = printer.solid(x, paged=True), printer.lead + len(x.statics)
    start = {"sum": "0", "prod": "1", "log_sum": 'float("-inf")'}[op.data]
    start = f"{start}.0" if x.dtype.is_floating_point and op.data != "log_sum" else start
    cut = f"tl.where({printer.valid(0, rank)}, {tile.text}, {start})"
    if op.data == "sum":
        return Tile(f"{before[0].text} + tl.cumsum({cut}, 0)", tile.dims)
    if op.data == "prod":
        return Tile(f"{before[0].text} * tl.cumprod({cut}, 0)", tile.dims)
    own = printer.named(op, Tile(f"f.running_log_sum({cut}, 0)", tile.dims), "log_sum_here")
    return Tile(f"f.log_add({before[0].text} + tl.log({before[1].text}), {own.text})", tile.dims)
