"""One stage as the source of one kernel."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvsieve.backends.triton.generate import folds
from kvsieve.backends.triton.generate.arguments import Argument, Scratch
from kvsieve.backends.triton.generate.ir import Op, walk
from kvsieve.backends.triton.generate.layout import broken
from kvsieve.backends.triton.generate.printer import Printer
from kvsieve.backends.triton.generate.stages import HOISTED, StagePlan
from kvsieve.backends.triton.generate.tile import Tile, times

HEAD = '''"""{title}

Written by kvsieve; tiles are [pages, {heads}static axes], comments give the shape for one request and KV head.
"""

import triton
import triton.language as tl

from kvsieve.backends.triton.generate import functions as f
from kvsieve.backends.triton.launch import let_next_start, wait_for_inputs
'''

VARYING = ("width_bound", "sink", "count", "table_stride", "row_table_stride")
"""Sizes that change from step to step: no kernel is compiled anew for them."""

_PROLOGUE = """\
request, chunk = f.place_of(widths_ptr, {groups}, PAGES, REQUESTS)  # of the batch, of its window
start = chunk * PAGES
width = tl.load(widths_ptr + request)  # window pages of this request
if start >= width:
    let_next_start(PDL, {late})
    return
place = tl.load(requests_ptr + request)
page = start + tl.arange(0, PAGES)
valid = page < width"""

_GATHERING_PROLOGUE = """\
wait_for_inputs(PDL)
request = tl.program_id(1).to(tl.int64)
head = tl.program_id(0).to(tl.int64)
width = tl.load(widths_ptr + request)  # window pages of this request
if width == 0:
    return"""

_HOISTED_PROLOGUE = """\
wait_for_inputs(PDL)
request = tl.program_id(1).to(tl.int64)
head = tl.program_id(0).to(tl.int64)"""

_SUMMARY_PROLOGUE = """\
chunk = tl.program_id(0) // {groups}
page = chunk * PAGES + tl.arange(0, PAGES)
valid = page < count
block = tl.load(blocks_ptr + page, mask=valid, other=0)  # from the host
valid = valid & (block != 0)  # the null block is nobody's
wait_for_inputs(PDL)
head = {head}
if tokens is not None:  # a step's: they may fill their pages
    valid = f.store_tokens(tokens, page, block, valid, {row}, P, D, DV)
if tl.max(valid.to(tl.int32), 0) == 0:
    return"""


@dataclass(frozen=True)
class Kernel:
    """A stage's source, what it is launched with, and the sizes that its tile is chosen by."""

    name: str
    source: str
    arguments: tuple[Argument, ...]
    constants: Mapping[str, torch.Tensor]
    wide: bool
    largest: int
    fixed: int
    dots: int
    fewest_rows: int
    most_rows: int
    """Rows that a page has in the tensor-core products that have the fewest and the most."""
    loaded: int
    """Elements per page of the fields that it reads."""
    held: int
    """Elements per page that it loads, of fields and of what earlier stages have stored."""
    exact: bool
    """Whether every field that it reads is read whole, and none is padded in a tile."""
    partials: bool
    """Whether it stores what its chunk of pages has found of a fold."""
    whole: bool
    """Whether its programs hold whole windows."""
    first: bool
    """Whether it is a score's first, which may run beside the kernels that store what the call brings."""

    @property
    def chosen(self) -> list[str]:
        """Constants that each launch chooses, by name: those of :func:`~functions.place_of` and of waiting."""
        placed = any(one.name == "requests_ptr" for one in self.arguments)
        return ["REQUESTS"] * placed + ["LATE"] * self.first + ["PDL"]

    @property
    def loops(self) -> bool:
        """Whether a program goes over several heads, one after another."""
        return self.dots > 0


@dataclass(frozen=True)
class Form:
    """How values are laid out: ``wide``, all heads of a page in one tile; ``dot``, contractions on tensor cores;
    ``apart``, tokens of a page with a stride of their own."""

    wide: bool = False
    apart: bool = False
    dot: frozenset[int] = frozenset()


def print_stage(
    name: str,
    plan: StagePlan,
    number: int,
    scratch: Mapping[object, Scratch],
    states: Collection[str],
    form: Form,
    summaries: bool = False,
) -> Kernel:
    """The kernel of stage ``number``."""
    printer = Printer(
        plan,
        number,
        form.wide,
        frozenset(states),
        dict(scratch),
        summaries=summaries,
        dot=form.dot,
        apart=form.apart,
    )
    for one in ("blocks_ptr",) if summaries else ("widths_ptr", "requests_ptr"):
        printer.arguments.add(one, "input")
    stage = plan.stages[number]
    if printer.holds_window:
        _load_first(printer, list(stage.outputs.values()), set())
    if _crosses(stage.outputs, plan.written):
        for op in stage.outputs.values():  # all is read before anything is written, by whichever threads
            printer.solid(op, paged=True)
        printer.page_lines.append("tl.debug_barrier()")
    for partial in stage.partials:
        for component, tile in zip(partial.components, folds.found(printer, partial), strict=True):
            _store_partial(printer, scratch[partial, component], tile)
    for op in stage.stored:
        base = f"{printer.segment(_rank(printer, op))} * width_bound"
        _store(printer, op, scratch[id(op)].name, "scratch", base)
    for output, op in stage.outputs.items():
        _store_output(printer, output, op, summaries)
    kernel = _kernel(name, printer, first=number == 0 and not summaries and not plan.hoisted)
    return replace(kernel, source=_function(kernel, _body(kernel, printer, summaries)))


def _load_first(printer: Printer, ops: Sequence[Op], seen: set[int]) -> None:
    """Load per-page values ahead of all else: they are on their way before the first fold waits for its own."""
    for op in ops:
        if id(op) in seen:
            continue
        seen.add(id(op))
        if printer.plan.loads(op, printer.stage) or op.kind == "field":
            printer.value(op)
        else:
            _load_first(printer, op.operands, seen)


def _crosses(outputs: Mapping[str, Op], written: Collection[str]) -> bool:
    """Whether a state field is written of which another one is made."""
    return any(
        one.kind == "field" and one.data in written and one.data in outputs and one.data != name
        for name, op in outputs.items()
        if name in written
        for one in walk([op])
    )


def print_gathering(name: str, plan: StagePlan, number: int, scratch: Mapping[object, Scratch]) -> Kernel:
    """The kernel that puts the chunks of stage ``number`` together, once for each segment, where they are many."""
    printer = Printer(plan, number, False, frozenset(), dict(scratch))
    printer.arguments.add("widths_ptr", "input")
    for partial in plan.stages[number].partials:
        for component, tile in zip(partial.components, folds.combined(printer, partial, "chunks"), strict=True):
            one, rank = scratch[partial, component], len(tile.dims or ())
            pointer = printer.arguments.add(f"{one.name}_all_ptr", "whole", one.name)
            page = f"tl.arange(0, 1){printer.page_index(rank)}"
            place = f"({printer.segment(rank)} + {page}){times(one.elements)}"
            _put(printer, pointer, (place,), tile.text, one.shape, rank)
    kernel = _kernel(name, printer)
    body = [*_GATHERING_PROLOGUE.splitlines(), *printer.fixed_lines, *printer.page_lines, "let_next_start(PDL)"]
    return replace(kernel, source=_function(kernel, body))


def print_hoisted(name: str, plan: StagePlan, scratch: Mapping[object, Scratch]) -> Kernel:
    """The kernel that computes what the stages need of the queries alone, once for each segment."""
    printer = Printer(plan, HOISTED, False, frozenset(), dict(scratch))
    for op in plan.hoisted:
        one, rank, tile = scratch[id(op)], _rank(printer, op), printer.solid(op)
        pointer = printer.arguments.add(f"{one.name}_ptr", "scratch", one.name)
        _put(printer, pointer, (f"{printer.segment_row(rank)}{times(op.elements)}",), tile.text, op.statics, rank)
    kernel = _kernel(name, printer)
    body = [*_HOISTED_PROLOGUE.splitlines(), *printer.fixed_lines, *printer.page_lines, "let_next_start(PDL)"]
    return replace(kernel, source=_function(kernel, body))


def _kernel(name: str, printer: Printer, first: bool = False) -> Kernel:
    return Kernel(
        name,
        "",
        tuple(printer.arguments.listed.values()),
        printer.arguments.constants,
        printer.wide,
        printer.largest,
        printer.fixed,
        printer.dots,
        printer.fewest_rows,
        printer.most_rows,
        printer.loaded,
        printer.held,
        printer.exact,
        bool(printer.found) and not printer.holds_window,
        printer.holds_window,
        first,
    )


def _body(kernel: Kernel, printer: Printer, summaries: bool) -> list[str]:
    """All lines: places, then for each head what does not vary over pages, and what does."""
    groups = "1" if kernel.wide else "(heads // EACH)" if kernel.loops else "heads"
    head = "tl.arange(0, HEADS).to(tl.int64)" if kernel.wide else "(tl.program_id(0) % heads).to(tl.int64)"
    per_head = [*printer.fixed_lines, *printer.page_lines]
    if summaries:
        row = "head" if kernel.wide else "head + tl.arange(0, 1)"
        lines = _SUMMARY_PROLOGUE.format(groups=groups, head=head, row=row).splitlines()
        return [*lines, *printer.vector_lines, *per_head, "let_next_start(PDL)"]
    # Sizes and tables come from the host: later stages look places up before the stage ahead of them has ended.
    wait = "wait_for_inputs(PDL, LATE)" if kernel.first else "wait_for_inputs(PDL)"
    lines = _PROLOGUE.format(groups=groups, late="LATE" if kernel.first else "True").splitlines()
    lines = [wait, *lines, *printer.vector_lines] if kernel.first else [*lines, *printer.vector_lines, wait]
    end = "let_next_start(PDL, LATE)" if kernel.first else "let_next_start(PDL)"
    if not kernel.loops:
        return [*lines, f"head = {head}", *per_head, end]
    first = f"(tl.program_id(0) % {groups}) * EACH + number"
    body = [f"head = ({first}).to(tl.int64)", *per_head]
    return [*lines, "for number in tl.range(0, EACH, num_stages=STAGES):", *(f"    {line}" for line in body), end]


def _function(kernel: Kernel, body: list[str]) -> str:
    arguments = kernel.arguments
    plain = [one.name for one in arguments if one.source != "pages"]
    summaries = "blocks_ptr" in plain
    plain += ["tokens", "count"] if summaries else ["width_bound", "sink", "page_size"]
    constants = [f"{one.name}: tl.constexpr" for one in arguments if one.source == "pages"]
    constants += ["PAGES: tl.constexpr", "HEADS: tl.constexpr"]
    constants += ["P: tl.constexpr", "D: tl.constexpr", "DV: tl.constexpr"] if summaries else []
    constants += ["EACH: tl.constexpr", "STAGES: tl.constexpr", "DOT: tl.constexpr"] if kernel.loops else []
    constants += [f"{one}: tl.constexpr" for one in kernel.chosen]
    parameters = "".join(f"    {one},\n" for one in [*plain, "heads", *constants])
    lines = "\n".join(one for line in body for one in broken(f"    {line}"))
    varying = [name for name in plain if name in VARYING or name.startswith("chunks_")]
    return f"@triton.jit(do_not_specialize={varying})\ndef {kernel.name}(\n{parameters}):\n{lines}\n"


def _rank(printer: Printer, op: Op) -> int:
    return printer.lead + len(op.statics)


def _put(
    printer: Printer,
    pointer: str,
    places: Sequence[str],
    text: str,
    statics: Sequence[int],
    rank: int,
    valid: str = "",
    eviction: str = "",
) -> None:
    """Store contiguous static axes at places that have the axes of a tile."""
    offsets, mask = printer.inner(statics, rank)
    where = " + ".join(part for part in (pointer, *places, offsets) if part)
    cut = " & ".join(part for part in (valid, mask) if part)
    printer.page_lines.append(f"tl.store({where}, {text}{f', mask={cut}' if cut else ''}{eviction})")


def _store_partial(printer: Printer, scratch: Scratch, tile: Tile) -> None:
    rank = len(tile.dims or ())
    pointer = printer.arguments.add(f"{scratch.name}_ptr", "scratch", scratch.name)
    chunk = f"chunk + tl.arange(0, 1){printer.page_index(rank)}"
    _put(printer, pointer, (folds.place(printer, scratch, chunk, rank),), tile.text, scratch.shape, rank)


def _store(printer: Printer, op: Op, name: str, source: str, base: str) -> None:
    """Per page: rows of the op's elements. What the next stage reads stays in the cache: written back to memory, it
    would cost as much as reading a part of the fields."""
    rank = _rank(printer, op)
    tile = printer.solid(op, paged=True)
    pointer = printer.arguments.add(f"{name}_ptr", source, name)
    row = f"({base} + {printer.page(rank)}){times(op.elements)}"
    text = f"{tile.text}.to(tl.int8)" if op.dtype is torch.bool and source == "scratch" else tile.text
    eviction = ', eviction_policy="evict_last"' if source == "scratch" else ""
    _put(printer, pointer, (row,), text, op.statics, rank, printer.valid(0, rank), eviction)


def _store_output(printer: Printer, name: str, op: Op, summaries: bool) -> None:
    rank = _rank(printer, op)
    if name == "scores" and not summaries:
        _store(printer, op, "scores", "input", f"{printer.segment(rank)} * width_bound")
        return
    tile = printer.solid(op, paged=True)
    page = "block" if summaries else printer.row()
    pointer = printer.arguments.add(f"{name}_ptr", "field", name)
    places = (
        f"{printer.head(rank)} * {printer.arguments.add(f'{name}_head', 'field_head', name)}",
        f"{printer.page(rank, page)} * {printer.arguments.add(f'{name}_page', 'field_page', name)}",
    )
    text = f"{tile.text}.to({pointer}.dtype.element_ty)"
    _put(printer, pointer, places, text, op.statics, rank, printer.valid(0, rank))
