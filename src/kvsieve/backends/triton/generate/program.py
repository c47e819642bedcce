"""Generated programs: the kernels of ``score`` and ``summarize``, and how they are launched."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
import triton.language as tl

from kvsieve.backends.triton.generate import dots
from kvsieve.backends.triton.generate.arguments import Argument, Scratch
from kvsieve.backends.triton.generate.errors import Refused
from kvsieve.backends.triton.generate.ir import Op, walk
from kvsieve.backends.triton.generate.kernel import HEAD, Form, Kernel, print_gathering, print_stage
from kvsieve.backends.triton.generate.loader import load_source
from kvsieve.backends.triton.generate.names import Names
from kvsieve.backends.triton.generate.patterns import Bounds, bounds_of, rewrite
from kvsieve.backends.triton.generate.stages import Plan
from kvsieve.backends.triton.generate.translate import translate
from kvsieve.backends.triton.generate.tuning import GATHERED, GATHERING, Tiling, is_wide, tiling
from kvsieve.backends.triton.launch import INTERPRETED, dependent_launch
from kvsieve.flow import flow_name
from kvsieve.graph import FlowGraphs
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import Window

SHOWN_HEADS = 8
"""KV heads of the source that is shown."""


@dataclass
class Built:
    """Kernels for a number of KV heads, with their tiles; one module holds them all."""

    kernels: list[Kernel]
    tilings: list[Tiling]
    gatherings: dict[int, Kernel]
    source: str
    _constants: dict[tuple[str, torch.device], torch.Tensor] = field(default_factory=dict)

    @cached_property
    def module(self) -> ModuleType:
        """The kernels, imported."""
        return load_source(self.kernels[0].name.rpartition("_")[0], self.source)

    def constant(self, kernel: Kernel, name: str, device: torch.device) -> torch.Tensor:
        key = f"{kernel.name}.{name}", device
        if key not in self._constants:
            self._constants[key] = kernel.constants[name].to(device).contiguous()
        return self._constants[key]


@dataclass
class Launch:
    """One run of a program: its inputs, and the memory between its stages."""

    built: Built
    heads: int
    requests: int
    call: Mapping[str, Any]
    pool: LayerPool
    chunks: list[int]
    """Per stage, as many as the next stages combine."""
    memory: dict[str, torch.Tensor] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)

    def reserve(self, one: Scratch, pages: int) -> None:
        """Memory for a value of so many pages, or chunks of pages, of each segment."""
        self.memory[one.name] = self._empty(one, pages)

    def _empty(self, one: Scratch, pages: int) -> torch.Tensor:
        dtype = torch.int8 if one.dtype is torch.bool else one.dtype
        count = self.requests * self.heads * pages * one.elements
        return torch.empty(count, dtype=dtype, device=self.pool.k.device)

    def start(self, kernel: Kernel, tile: Tiling, programs: int) -> None:
        """Launch a kernel with so many programs for each request."""
        values = [self._find(one, kernel) for one in kernel.arguments if one.source != "pages"]
        shared = [self.call[name] for name in ("count", "width_bound", "sink", "page_size") if name in self.call]
        tilings = self.built.tilings
        constants = [tilings[int(one.key)].pages for one in kernel.arguments if one.source == "pages"]
        constants += [tile.pages, self.heads]
        constants += [tile.each, dot_type(self.pool.k.dtype)] if kernel.loops else []
        getattr(self.built.module, kernel.name)[programs, self.requests](
            *values,
            *shared,
            self.heads,
            *constants,
            **dependent_launch(self.pool.k.device, programs * self.requests),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def gather(self, stage: int, parts: Sequence[Scratch]) -> None:
        """Put the chunks of a stage together: the next ones find a single one."""
        self.whole = {one.name: self._empty(one, 1) for one in parts}
        self.start(self.built.gatherings[stage], GATHERING, self.heads)
        self.memory |= self.whole
        self.chunks[stage] = 1

    def _find(self, one: Argument, kernel: Kernel) -> Any:
        if one.source == "input":
            return self.call[one.name]
        if one.source in ("scratch", "whole"):
            return (self.memory if one.source == "scratch" else self.whole)[one.key]
        if one.source == "chunks":
            return self.chunks[int(one.key)]
        if one.source == "constant":
            return self.built.constant(kernel, one.key, self.pool.k.device)
        stored = {"k": self.pool.k, "v": self.pool.v, **self.pool.summaries, **self.pool.state}[one.key]
        return {"field": stored, "field_head": stored.stride(0), "field_page": stored.stride(1)}[one.source]


@dataclass(frozen=True)
class Variant:
    """What the kernels depend on beside the flow: KV heads, whether queries and pages are stored alike in 16 bits (then
    tensor cores multiply them), and whether the heads of a page lie side by side."""

    heads: int = SHOWN_HEADS
    narrow: bool = True
    rows: bool = True


class Generated:
    """A program: stages, scratch between them, and kernels by variant."""

    def __init__(
        self,
        title: str,
        outputs: Mapping[str, Op],
        states: Mapping[str, Any],
        summaries: bool = False,
        own_dtypes: frozenset[str] = frozenset(),
    ) -> None:
        self.title, self.states, self.summaries = title, frozenset(states), summaries
        self.plan = Plan(outputs, self.states & set(outputs))
        self.scratch = _scratch(self.plan)
        self._dots = [op for op in walk(list(outputs.values())) if dots.suits(op, own_dtypes)]
        self._built: dict[Variant, Built] = {}
        for narrow in (True, False):  # refuses now, not at the first step
            self.built(Variant(narrow=narrow))

    @property
    def source(self) -> str:
        """The source for 8 KV heads side by side, stored in 16 bits."""
        return self.built(Variant()).source

    def built(self, variant: Variant) -> Built:
        """The kernels of a variant."""
        if variant not in self._built:
            kernels = [self._kernel(number, variant) for number in range(len(self.plan.stages))]
            tilings = [tiling(kernel, variant.heads, self.title, self.summaries) for kernel in kernels]
            if self.plan.scans:
                pages = min(one.pages for one in tilings)
                tilings = [replace(one, pages=pages) for one in tilings]
            wide = any(kernel.wide for kernel in kernels)
            head = HEAD.format(title=self.title, heads="heads, " if wide else "")
            gatherings = {
                number: print_gathering(f"{kernels[number].name}_all", self.plan, number, self.scratch)
                for number, stage in enumerate(self.plan.stages)
                if stage.partials and not self.plan.scans  # a scan goes on from the chunks themselves
            }
            source = head + "".join(f"\n\n{kernel.source}" for kernel in (*kernels, *gatherings.values()))
            self._built[variant] = Built(kernels, tilings, gatherings, source)
        return self._built[variant]

    def _kernel(self, number: int, variant: Variant) -> Kernel:
        name = f"{re.sub(r'[^0-9a-zA-Z]+', '_', self.title).strip('_').lower()}_{number}"

        def print_as(form: Form) -> Kernel:
            return print_stage(name, self.plan, number, self.scratch, self.states, form, self.summaries)

        if variant.narrow and self._dots:
            pads = {rows: dots.ROWS for op in self._dots for rows in (dots.rows(op),) if rows < dots.ROWS}
            kernel = print_as(Form(dot=frozenset(map(id, self._dots)), pads=pads))
            if kernel.dots:
                return kernel
        kernel = print_as(Form())
        if variant.rows and kernel.exact and is_wide(kernel, variant.heads):
            return print_as(Form(wide=True))
        return kernel

    def launch(self, variant: Variant, requests: int, width: int, call: Mapping[str, Any], pool: LayerPool) -> None:
        """Run all stages. ``call``: inputs by argument name."""
        built = self.built(variant)
        chunks = [-(-width // one.pages) for one in built.tilings]
        running = Launch(built, variant.heads, requests, call, pool, chunks)
        for one in self.scratch.values():
            running.reserve(one, chunks[one.stage] if one.per_chunk else width)
        for number, (kernel, tile) in enumerate(zip(built.kernels, built.tilings, strict=True)):
            programs = chunks[number] * (1 if kernel.wide else variant.heads // tile.each)
            running.start(kernel, tile, programs)
            if number in built.gatherings and chunks[number] > GATHERED:
                running.gather(number, [one for one in self.scratch.values() if one.per_chunk and one.stage == number])


def dot_type(stored: torch.dtype) -> Any:
    """What tensor cores multiply. Triton's interpreter knows no bfloat16."""
    return tl.float32 if INTERPRETED else {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[stored]


def _scratch(plan: Plan) -> dict[object, Scratch]:
    names, scratch = Names(), {}
    for number, stage in enumerate(plan.stages):
        for op in stage.stored:
            scratch[id(op)] = Scratch(names.new(op.name or op.kind), op.dtype, op.statics, False, number)
        for partial in stage.partials:
            for component in partial.components:
                name = names.new(f"{partial.operand.name or partial.operand.kind}_{component}")
                key = partial, component
                scratch[key] = Scratch(name, partial.operand.dtype, partial.operand.statics, True, number)  # type: ignore[index]
    return scratch  # type: ignore[return-value]


class ScoreProgram(Generated):
    """``score`` of a flow."""

    def run(self, q: torch.Tensor, pool: LayerPool, window: Window) -> torch.Tensor:
        """Score window pages and write new state in place.

        q [Bs, H, G, D] -> float32 [Bs, H, W], W = ``window.width``; beyond a request's own pages undefined.
        Nothing waits for the device.
        """
        requests, heads = q.shape[:2]
        scores = torch.empty(requests, heads, window.width, dtype=torch.float32, device=q.device)
        if not requests or not window.width:
            return scores
        q = q if q.stride(3) == 1 else q.contiguous()
        call = {
            "q_ptr": q,
            "q_request": q.stride(0),
            "q_head": q.stride(1),
            "q_group": q.stride(2),
            "requests_ptr": window.requests,
            "table_ptr": window.table,
            "table_stride": window.table.stride(0),
            "row_table_ptr": window.row_table,
            "row_table_stride": window.row_table.stride(0),
            "widths_ptr": window.widths,
            "lengths_ptr": window.lengths,
            "mass_scale_ptr": window.mass_scale,
            "scores_ptr": scores,
            "width_bound": window.width,
            "sink": window.sink,
            "page_size": window.page_size,
        }
        narrow = q.dtype == pool.k.dtype and q.dtype in (torch.bfloat16, torch.float16)
        self.launch(Variant(heads, narrow, _side_by_side(pool)), requests, window.width, call, pool)
        return scores


class SummarizeProgram(Generated):
    """``summarize`` of a flow."""

    def run(self, pool: LayerPool, blocks: torch.Tensor) -> None:
        """Compute and store the summary fields of full pages, given their blocks [C]; the null block is left alone."""
        if len(blocks):
            call = {"blocks_ptr": blocks, "count": len(blocks)}
            self.launch(Variant(pool.num_kv_heads, False, _side_by_side(pool)), 1, len(blocks), call, pool)


def _side_by_side(pool: LayerPool) -> bool:
    """Whether all heads of a page are one contiguous row, in every field."""
    fields = (pool.k, pool.v, *pool.summaries.values(), *pool.state.values())
    return all(field.stride(0) == math.prod(field.shape[2:]) for field in fields)


def generate_score(graphs: FlowGraphs) -> ScoreProgram:
    """The kernels of a flow's ``score``.

    Raises:
        Refused: an op, or a size, that no kernel is generated for.
    """
    assert graphs.score is not None
    translated = translate(graphs.flow, "score", graphs.score)
    outputs = rewrite(translated.outputs, translated.builder, _bounds(graphs))
    own = frozenset(name for name, spec in graphs.summary_fields.items() if spec.dtype is not None)
    return ScoreProgram(
        f"{flow_name(graphs.flow)} score", outputs, graphs.state_fields, False, own | frozenset(graphs.state_fields)
    )


def _bounds(graphs: FlowGraphs) -> Bounds:
    """Summary fields of which one is never less than another."""
    if graphs.summarize is None:
        return frozenset()
    try:
        return bounds_of(translate(graphs.flow, "summarize", graphs.summarize).outputs)
    except Refused:
        return frozenset()


def generate_summarize(graphs: FlowGraphs) -> SummarizeProgram:
    """The kernel of a flow's ``summarize``.

    Raises:
        Refused: an op, or a size, that no kernel is generated for.
    """
    assert graphs.summarize is not None
    outputs = translate(graphs.flow, "summarize", graphs.summarize).outputs
    return SummarizeProgram(f"{flow_name(graphs.flow)} summarize", outputs, {}, True)
