"""Generated programs: the kernels of ``score`` and ``summarize``, by what they depend on beside the flow."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvsieve.backends.base import Tuning
from kvsieve.backends.triton.generate import dots
from kvsieve.backends.triton.generate.arguments import Scratch
from kvsieve.backends.triton.generate.autotune import Clock, kept_tilings, tune
from kvsieve.backends.triton.generate.errors import Refused
from kvsieve.backends.triton.generate.ir import Op
from kvsieve.backends.triton.generate.kernel import HEAD, Form, Kernel, print_gathering, print_hoisted, print_stage
from kvsieve.backends.triton.generate.names import Names
from kvsieve.backends.triton.generate.patterns import Bounds, bounds_of, rewrite
from kvsieve.backends.triton.generate.run import Built, Launch
from kvsieve.backends.triton.generate.stages import HOISTED, StagePlan
from kvsieve.backends.triton.generate.translate import translate
from kvsieve.backends.triton.generate.tuning import GATHERED, for_window, is_wide, longest_window, tiling
from kvsieve.backends.triton.launch import AT_END, AT_ONCE, ONCE_WAITED
from kvsieve.flow import flow_name
from kvsieve.graph import FlowGraphs
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import Writes
from kvsieve.window import Window

SHOWN_HEADS = 8
"""KV heads of the source that is shown."""


@dataclass(frozen=True)
class Variant:
    """What the kernels depend on beside the flow: KV heads, the 16 bits in which queries and pages are both stored, if
    they are (then tensor cores multiply them), whether the heads of a page lie side by side, and whether the tokens of
    a page lie apart, as in the cache of an engine that stores token by token."""

    heads: int = SHOWN_HEADS
    narrow: torch.dtype | None = torch.bfloat16
    rows: bool = True
    apart: bool = False


class Generated:
    """A program: stages, scratch between them, and kernels by variant."""

    def __init__(
        self,
        title: str,
        outputs: Mapping[str, Op],
        states: Collection[str],
        summaries: bool = False,
        own_dtypes: frozenset[str] = frozenset(),
        whole: bool = False,
    ) -> None:
        self.title, self.states, self.summaries = title, frozenset(states), summaries
        self.plan = StagePlan(outputs, self.states & set(outputs), whole)
        self.scratch = _scratch(self.plan)
        narrow = (torch.bfloat16, torch.float16)
        self._dots = {dtype: dots.found(list(outputs.values()), own_dtypes, dtype) for dtype in narrow}
        self._built: dict[Variant, Built] = {}
        for dtype in (*narrow, None):  # refuses now, not at the first step
            self.built(Variant(narrow=dtype))
        self.longest = longest_window(self.built(Variant()).kernels[-1]) if whole else 0
        """Pages of the longest window that one program holds, in the form that does so."""
        self.whole: Generated | None = None
        """The form for windows that one program holds; None if there is none."""
        if not whole and self.plan.near and len(self.plan.stages) > 1:
            form = type(self)(f"{title} whole windows", outputs, states, summaries, own_dtypes, True)
            if form.longest and form.plan.stages[0].stored:
                self.whole = form

    @property
    def source(self) -> str:
        """The source for 8 KV heads side by side, stored in 16 bits."""
        source = self.built(Variant()).source
        if self.whole is None:
            return source
        return f"# Windows of up to {self.whole.longest} pages\n{self.whole.source}\n\n# Longer windows\n{source}"

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
            hoisted = [print_hoisted(self._name("queries"), self.plan, self.scratch)] if self.plan.hoisted else []
            ahead = [(one, tiling(one, 1, self.title)) for one in hoisted]
            printed = (*hoisted, *kernels, *gatherings.values())
            source = head + "".join(f"\n\n{kernel.source}" for kernel in printed)
            self._built[variant] = Built(kernels, tilings, gatherings, source, ahead)
        return self._built[variant]

    def _name(self, part: int | str) -> str:
        return f"{re.sub(r'[^0-9a-zA-Z]+', '_', self.title).strip('_').lower()}_{part}"

    def _kernel(self, number: int, variant: Variant) -> Kernel:
        name = self._name(number)

        def print_as(form: Form) -> Kernel:
            return print_stage(name, self.plan, number, self.scratch, self.states, form, self.summaries)

        if self.plan.whole and number:
            return print_as(Form(apart=variant.apart))
        if variant.narrow and self._dots[variant.narrow]:
            kernel = print_as(Form(dot=frozenset(map(id, self._dots[variant.narrow])), apart=variant.apart))
            if kernel.dots:
                return kernel
        kernel = print_as(Form(apart=variant.apart))
        if variant.rows and kernel.exact and is_wide(kernel, variant.heads):
            return print_as(Form(wide=True))
        return kernel

    def launch(
        self,
        variant: Variant,
        requests: int,
        width: int,
        call: Mapping[str, Any],
        pool: LayerPool,
        when: int = AT_END,
    ) -> None:
        """Run all stages. ``call``: inputs by argument name; ``when`` the last stage lets the next kernel start."""
        if self.whole is not None and width <= self.whole.longest:
            self.whole.launch(variant, requests, width, call, pool, when)
            return
        built = self.built(variant)
        tilings = kept_tilings(built, variant.heads, pool.k.device, requests * width) or built.tilings
        if self.plan.whole:
            tilings = [*tilings[:-1], for_window(tilings[-1], width)]
        chunks = [-(-width // one.pages) for one in tilings]
        running = Launch(built, tilings, variant.heads, requests, call, pool, chunks)
        for one in self.scratch.values():
            running.reserve(one, 1 if one.stage == HOISTED else chunks[one.stage] if one.per_chunk else width)
        for kernel, tile in built.ahead:
            running.start(kernel, tile, 1)
        for number, (kernel, tile) in enumerate(zip(built.kernels, tilings, strict=True)):
            last = number + 1 == len(built.kernels)
            running.start(kernel, tile, chunks[number], when if last else AT_END)
            if number in built.gatherings and chunks[number] > GATHERED:
                running.gather(number, [one for one in self.scratch.values() if one.per_chunk and one.stage == number])


def _scratch(plan: StagePlan) -> dict[object, Scratch]:
    names = Names()
    scratch: dict[object, Scratch] = {}
    for op in plan.hoisted:
        scratch[id(op)] = Scratch(names.new(op.name or op.kind), op.dtype, op.statics, False, HOISTED)
    for number, stage in enumerate(plan.stages):
        for op in stage.stored:
            scratch[id(op)] = Scratch(names.new(op.name or op.kind), op.dtype, op.statics, False, number)
        for partial in stage.partials:
            x = partial.operand
            for component in partial.components:
                name = names.new(f"{x.name or x.kind}_{component}")
                scratch[partial, component] = Scratch(name, x.dtype, x.statics, True, number)
    return scratch


class ScoreProgram(Generated):
    """``score`` of a flow."""

    whole: ScoreProgram | None

    def run(self, q: torch.Tensor, pool: LayerPool, window: Window) -> torch.Tensor:
        """Score window pages and write new state in place.

        q [Bs, H, G, D] -> float32 [Bs, H, W], W = ``window.width``; beyond a request's own pages undefined.
        Nothing waits for the device.
        """
        requests, heads = q.shape[:2]
        scores = torch.empty(requests, heads, window.width, dtype=torch.float32, device=q.device)
        if not requests or not window.width:
            return scores
        # Queries that were copied, here or to leave requests out, are what the kernel just before has written.
        settled = window.settled and q.stride(3) == 1 and requests == len(window.lengths)
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
            "most_pages": window.total_pages if window.most_pages is None else window.most_pages,
            "settled": settled,
            "sink": window.sink,
            "page_size": window.page_size,
        }
        # What follows is a small program per segment.
        self.launch(self._variant(q, pool), requests, window.width, call, pool, ONCE_WAITED)
        return scores

    def tune(self, q: torch.Tensor, pool: LayerPool, window: Window, clock: Clock) -> Tuning:
        """Try other tilings for launches like :meth:`run` with these arguments, which ``clock`` times."""
        if self.whole is not None and window.width <= self.whole.longest:
            return self.whole.tune(q, pool, window, clock)
        built, pages = self.built(self._variant(q, pool)), len(q) * window.width
        return tune("score", built, pool.num_kv_heads, pool.device, pages, bool(self.plan.scans), clock)

    @staticmethod
    def _variant(q: torch.Tensor, pool: LayerPool) -> Variant:
        narrow = q.dtype == pool.k.dtype and q.dtype in (torch.bfloat16, torch.float16)
        return Variant(pool.num_kv_heads, q.dtype if narrow else None, _side_by_side(pool), _apart(pool))


class SummarizeProgram(Generated):
    """``summarize`` of a flow."""

    def run(self, pool: LayerPool, blocks: torch.Tensor) -> None:
        """Compute and store the summary fields of full pages, given their blocks [C]; the null block is left alone."""
        if len(blocks):
            call = {"blocks_ptr": blocks, "tokens": None, "count": len(blocks)}
            self.launch(self._variant(pool), 1, len(blocks), call, pool, AT_ONCE)

    def store(self, pool: LayerPool, writes: Writes, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the tokens k [B, H, D], v [B, H, Dv] of a step, one of each request, and summarize the pages that they
        fill: one kernel in place of two."""
        strides = (*k.stride(), *v.stride(), *pool.k.stride()[:3], *pool.v.stride()[:3])
        tokens = (writes.offsets, k, v, pool.k, pool.v, *strides)
        call = {"blocks_ptr": writes.blocks, "tokens": tokens, "count": len(writes.blocks)}
        self.launch(self._variant(pool), 1, len(writes.blocks), call, pool, ONCE_WAITED)

    def tune(self, pool: LayerPool, blocks: torch.Tensor, clock: Clock) -> Tuning:
        """Try other tilings for launches like :meth:`run` with these arguments, which ``clock`` times."""
        built, scans = self.built(self._variant(pool)), bool(self.plan.scans)
        return tune("summarize", built, pool.num_kv_heads, pool.device, len(blocks), scans, clock)

    @staticmethod
    def _variant(pool: LayerPool) -> Variant:
        return Variant(pool.num_kv_heads, None, _side_by_side(pool), _apart(pool))


def _side_by_side(pool: LayerPool) -> bool:
    """Whether all heads of a page are one contiguous row, in every field."""
    fields = (pool.k, pool.v, *pool.summaries.values(), *pool.state.values())
    return all(field.stride(0) == math.prod(field.shape[2:]) for field in fields)


def _apart(pool: LayerPool) -> bool:
    """Whether the tokens of a page of K or V do not follow each other in memory."""
    return any(field.shape[2] > 1 and field.stride(2) != field.shape[3] for field in (pool.k, pool.v))


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
    return SummarizeProgram(f"{flow_name(graphs.flow)} summarize", outputs, (), True)
