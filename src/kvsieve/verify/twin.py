"""The real stack and the reference side by side, through the whole life of requests."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from kvsieve.backends import Backend
from kvsieve.budget import Budget, BudgetLike, budget_for_layer
from kvsieve.call import Attended, Call
from kvsieve.flow import Flow, extra_parameters
from kvsieve.graph import FlowGraphs, Geometry
from kvsieve.reference import ReferenceSegment
from kvsieve.runtime import CROP_ROWS, RequestId, Runtime
from kvsieve.verify.checks import Numbers, expect
from kvsieve.verify.data import Data, Draw, IidData, LayerShape
from kvsieve.verify.poison import spoil_free_memory
from kvsieve.verify.segment import SegmentTwin, StepResult
from kvsieve.verify.stored import check_tables, flow_state, page_by_page, stored_mass

MANY_PAGES = 400
"""Of a call that fills more pages, so many are drawn for the comparison of summaries."""


@dataclass(frozen=True)
class TwinOptions:
    """What a twin is built of; ``dense_layers`` attend everything. ``sinks`` turns sink logits on."""

    page_size: int
    shapes: tuple[LayerShape, ...]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    num_blocks: int | None = None
    dense_layers: tuple[int, ...] = ()
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False


class Twin:
    """A runtime whose every result is checked against float64.

    Args:
        flow, budget: what runs.
        options: geometry and storage.
        data: where q, k and v come from.
        backend: a backend or its name.
        spoil: poison free memory after every event.
        judged: share of the segment steps whose bound is derived from the data; the others must keep to 1e-5 of the
            largest value, which costs a tenth.

    Every method raises :class:`Fault` when the runtime is wrong beyond rounding; ``numbers`` says what was seen.
    """

    def __init__(
        self,
        flow: Flow,
        budget: BudgetLike,
        options: TwinOptions,
        data: Data | None = None,
        backend: str | Backend = "eager",
        spoil: bool = True,
        judged: float = 1.0,
    ) -> None:
        if flow.equal_widths:
            options = replace(options, shapes=tuple(replace(one, v_head_dim=one.head_dim) for one in options.shapes))
        self.flow, self.budget, self.options, self.spoil = flow, budget, options, spoil
        self.data = data or IidData(0)
        self.runtime = self._build(backend)
        self.numbers = Numbers()
        self._judge, self._judged = random.Random(0), judged
        self.requests: dict[RequestId, int] = {}  # tokens that each must have
        self.out: set[RequestId] = set()  # preempted
        self._floors: dict[RequestId, int] = {}
        self._segments: dict[tuple[int, RequestId, int], SegmentTwin] = {}
        self._families: dict[RequestId, tuple[int, int]] = {}  # family and how many tokens of it are the request's own
        self._graphs = [self._trace(layer) for layer in range(len(options.shapes))]

    # The life of a request, on both sides

    def admit(self, family: int | None = None, family_pages: int = 0) -> RequestId:
        """A new request; those of one family share the K and V of their first pages, and say so by their keys."""
        keys: list[Hashable] = [(family, page) for page in range(family_pages)]
        request = self.runtime.admit(keys if family is not None else ())
        length = self.runtime.length(request)
        p = self.options.page_size
        expect(
            length % p == 0 and length <= family_pages * p, "life cycle", f"request {request}", f"starts at {length}"
        )
        self.requests[request] = self._floors[request] = length
        self._families[request] = (family or 0, family_pages * p if family is not None else 0)
        for layer, shape in enumerate(self.options.shapes):
            _, k, v = self._tokens(layer, [request], [0], [length])
            for head in range(shape.heads):
                twin = self._new_segment(layer, request, head)
                twin.write(k[:, head], v[:, head])
                self._segments[layer, request, head] = twin
        if length:
            self._check_new_summaries([request], [0])
        self._after()
        return request

    def extend(self, requests: Sequence[RequestId], counts: Sequence[int], compare: bool = True) -> list[torch.Tensor]:
        """Prefill; returns the outputs of the layers. ``compare=False`` stores the tokens and judges no output."""
        starts = [self.requests[request] for request in requests]
        call = self.runtime.extend(requests, counts)
        outs = []
        for layer, shape in enumerate(self.options.shapes):
            q, k, v = self._tokens(layer, requests, starts, counts)
            out = self._attend(call, layer, (q, k, v)).out.cpu()
            first = 0
            for request, start, count in zip(requests, starts, counts, strict=True):
                rows = slice(first, first + count)
                first += count
                for head in range(shape.heads if count else 0):
                    mine = slice(head * shape.group, (head + 1) * shape.group)
                    segment = self._segments[layer, request, head]
                    segment.sharp = self._judge.random() < self._judged
                    self._prepare_write(layer, request, head, start)
                    segment.write(k[rows, head], v[rows, head], q[rows, mine])
                    self._check_mass(layer, request, head)
                    if compare:
                        segment.check_prefill(self.numbers, q[rows, mine], out[rows, mine])
            outs.append(out)
        for request, start, count in zip(requests, starts, counts, strict=True):
            if count:
                self._floors[request] = start if count <= CROP_ROWS else start + count
        self._grow(requests, counts)
        return outs

    def step(self, requests: Sequence[RequestId]) -> list[Attended]:
        """A decode step; returns the results of the layers."""
        starts = [self.requests[request] for request in requests]
        call = self.runtime.step(requests)
        results = []
        for layer in range(len(self.options.shapes)):
            q, k, v = self._tokens(layer, requests, starts, [1] * len(requests))
            result = self._attend(call, layer, (q, k, v))
            self._check_step(layer, requests, (q, k, v), result)
            results.append(result)
        self._floors.update({request: self.requests[request] + 1 for request in requests})
        self._grow(requests, [1] * len(requests))
        return results

    def fork(self, request: RequestId) -> RequestId:
        """A second request with the same past."""
        twin = self.runtime.fork(request)
        self._copy(request, twin)
        self._after()
        return twin

    def crop(self, requests: Sequence[RequestId], lengths: Sequence[int]) -> None:
        """Forget the tokens of each request from a length on."""
        self.runtime.crop(requests, lengths)
        for request, length in zip(requests, lengths, strict=True):
            self.requests[request] = length
            self._floors[request] = min(self._floors[request], length)
            family, own = self._families[request]
            # Only whole pages stay the family's: what follows is the request's own.
            self._families[request] = family, min(own, length // self.options.page_size * self.options.page_size)
            for _, segment in self._segments_of(request):
                segment.crop(length)
        self._after()

    def reorder(self, requests: Sequence[RequestId], order: Sequence[int]) -> list[RequestId]:
        """Place ``i`` of the result continues ``requests[order[i]]``."""
        result = self.runtime.reorder(requests, order)
        expect(len(set(result)) == len(order), "life cycle", f"requests {list(requests)}", f"reordered to {result}")
        for place, source in zip(result, order, strict=True):
            if place != requests[source]:
                self._copy(requests[source], place)
        for request in set(requests) - set(result):
            self._forget(request)
        self._after()
        return result

    def preempt(self, request: RequestId) -> None:
        """Out of the pool, until :meth:`resume`."""
        self.runtime.preempt(request)
        self.out.add(request)
        self._after()

    def resume(self, request: RequestId) -> None:
        """Back into the pool."""
        self.runtime.resume(request)
        self.out.discard(request)
        self._after()

    def finish(self, requests: Sequence[RequestId]) -> None:
        """End requests."""
        self.runtime.finish(requests)
        for request in requests:
            self._forget(request)
        self._after()

    def abandon(self, request: RequestId, count: int) -> None:
        """A call that the last layer never attends, because its request is ended: nobody may see its pages."""
        start = self.requests[request]
        call = self.runtime.extend([request], [count])
        for layer in range(len(self.options.shapes) - 1):
            self._attend(call, layer, self._tokens(layer, [request], [start], [count]))
        self.finish([request])

    def crop_floor(self, request: RequestId) -> int:
        """The length down to which a crop must be exact: the last multi-token call, if it was short and the newest."""
        return self._floors[request]

    # Checks

    def check_storage(self) -> None:
        """Tables, K, V, summaries of full pages and state of every request that is in the pool.

        Raises:
            Fault: one of them is not what it must be.
        """
        check_tables(self.runtime.tables, self.requests, self.out, self.options.page_size)
        for (layer, request, head), segment in self._segments.items():
            if request not in self.out:
                self._check_segment(layer, request, head, segment)

    def _check_segment(self, layer: int, request: RequestId, head: int, segment: SegmentTwin) -> None:
        if layer not in self.runtime.layers:
            return
        entry, pool = self.runtime.tables[request], self.runtime.layers[layer].pool
        for name, field, wanted in (("k", pool.k, segment.reference.k), ("v", pool.v, segment.reference.v)):
            if wanted:
                stored = field[head, entry.blocks].flatten(0, 1)[: entry.length].to("cpu", torch.float64)
                same = torch.equal(torch.nan_to_num(stored, nan=7.0), torch.nan_to_num(torch.stack(wanted), nan=7.0))
                expect(same, "storage", segment.place, f"{name} is not what was written")
        segment.check_state(self.numbers, page_by_page(flow_state(pool), head, entry.rows))
        if segment.mass:
            segment.mass.unchanged(segment.place, stored_mass(pool, head, entry.rows))
        segment.check_summaries(page_by_page(pool.summaries, head, entry.blocks))

    def _check_step(self, layer: int, requests: Sequence[RequestId], draw: Draw, result: Attended) -> None:
        shape, pool = self.options.shapes[layer], self.runtime.layers[layer].pool
        q, k, v = draw
        assert result.selection is not None and result.lse is not None
        pages, counts = result.selection.pages.cpu(), result.selection.count.tolist()
        out, lse = result.out.cpu(), result.lse.cpu()
        scores = None if result.scores is None else result.scores.cpu()
        scored = self._scored(layer, requests)
        rows = 0 if scores is None else len(scores)
        expect(rows == len(scored), "score", f"layer {layer}", f"{rows} requests scored, expected {len(scored)}")
        for i, request in enumerate(requests):
            entry = self.runtime.tables[request]
            budget = self.runtime.layers[layer].budget
            width = budget.window(len(entry.blocks)) if budget else 0
            for head in range(shape.heads):
                mine = slice(head * shape.group, (head + 1) * shape.group)
                row = None
                if request in scored and scores is not None:
                    row = scores[scored.index(request), head, :width]
                received = StepResult(out[i, mine], lse[i, head], pages[i, head, : counts[i]].tolist(), row)
                summaries = page_by_page(pool.summaries, head, entry.blocks)
                state = page_by_page(flow_state(pool), head, entry.rows)
                segment = self._segments[layer, request, head]
                segment.sharp = self._judge.random() < self._judged
                full = (len(segment.reference.k) + 1) // self.options.page_size
                segment.step(self.numbers, q[i, mine], k[i, head], v[i, head], summaries[:full], state, received)
                self._check_mass(layer, request, head)

    def _check_mass(self, layer: int, request: RequestId, head: int) -> None:
        segment, entry = self._segments[layer, request, head], self.runtime.tables[request]
        if segment.mass:
            stored = stored_mass(self.runtime.layers[layer].pool, head, entry.rows)
            segment.mass.check(self.numbers, segment.place, stored, segment.mass.mass.factor**entry.mass.age)

    def _check_new_summaries(self, requests: Sequence[RequestId], starts: Sequence[int]) -> None:
        p = self.options.page_size
        for request, start in zip(requests, starts, strict=True):
            entry = self.runtime.tables[request]
            for (layer, _, head), segment in self._segments_of(request):
                if layer in self.runtime.layers:
                    pool = self.runtime.layers[layer].pool
                    stored = page_by_page(pool.summaries, head, entry.blocks)
                    segment.sharp = self._judge.random() < self._judged
                    pages: Sequence[int] = range(start // p, entry.length // p)
                    if len(pages) > MANY_PAGES:
                        pages = [pages[0], pages[-1], *self._judge.sample(pages, MANY_PAGES)]
                    for page in pages:
                        segment.check_summary(self.numbers, page, stored[page])

    def _scored(self, layer: int, requests: Sequence[RequestId]) -> list[RequestId]:
        """Requests that are scored in this step, in batch order."""
        graphs, budget = self._graphs[layer], self.runtime.layers[layer].budget
        if graphs is None or graphs.score is None or budget is None:
            return []
        pages = {request: len(self.runtime.tables[request].blocks) for request in requests}
        return [
            request
            for request, count in pages.items()
            if budget.window(count) and (count > budget.kept(count) or graphs.state_writes)
        ]

    # Bookkeeping

    def _grow(self, requests: Sequence[RequestId], counts: Sequence[int]) -> None:
        starts = [self.requests[request] for request in requests]
        for request, count in zip(requests, counts, strict=True):
            self.requests[request] += count
        self._check_new_summaries(requests, starts)
        self._after()

    def _after(self) -> None:
        if self.spoil:
            spoil_free_memory(self.runtime)
        self.check_storage()

    def _tokens(self, layer: int, requests: Sequence[RequestId], starts: Sequence[int], counts: Sequence[int]) -> Draw:
        parts = [
            self.data.tokens(self.options.shapes[layer], layer, request, start, count, self._families[request])
            for request, start, count in zip(requests, starts, counts, strict=True)
        ]
        q, k, v = (torch.cat(part).to(self.options.dtype) for part in zip(*parts, strict=True))
        return q, k, v

    def _attend(self, call: Call, layer: int, draw: Draw) -> Attended:
        q, k, v = (x.to(self.options.device, self.options.dtype) for x in draw)
        sinks = self._sinks(layer)
        sinks = None if sinks is None else sinks.to(self.options.device)
        return call.attend(layer, q, k, v, scale=self.options.scale, softcap=self.options.softcap, sinks=sinks)

    def _sinks(self, layer: int) -> torch.Tensor | None:
        if not self.options.sinks:
            return None
        shape = self.options.shapes[layer]
        return torch.linspace(-1, 2, shape.heads * shape.group, dtype=torch.float32)

    def _build(self, backend: str | Backend) -> Runtime:
        options = self.options
        return Runtime(
            self.flow,
            self.budget,
            page_size=options.page_size,
            num_blocks=options.num_blocks,
            dense_layers=options.dense_layers,
            backend=backend,
        )

    def _prepare_write(self, layer: int, request: RequestId, head: int, start: int) -> None:
        """Called before the twin writes the prompt tokens from ``start`` on that the runtime has attended."""

    def _trace(self, layer: int) -> FlowGraphs | None:
        if layer in self.options.dense_layers:
            return None
        shape, wanted = self.options.shapes[layer], extra_parameters(self.flow)
        geometry = Geometry(
            self.options.page_size,
            shape.head_dim,
            shape.v_head_dim,
            shape.group,
            self.options.scale if "scale" in wanted else None,
            layer if "layer" in wanted else 0,
        )
        # The geometry is worked out here; if the runtime's is the same, the two share what tracing takes long to make.
        return self.runtime.layers.prepared(geometry, torch.device(self.options.device))[0]

    def _new_segment(self, layer: int, request: RequestId, head: int) -> SegmentTwin:
        dense = layer in self.options.dense_layers
        shape, sinks = self.options.shapes[layer], self._sinks(layer)
        reference = ReferenceSegment(
            Flow() if dense else self.flow,
            Budget(0, 0, 10**9) if dense else budget_for_layer(self.budget, layer),
            self.options.page_size,
            scale=self.options.scale,
            softcap=self.options.softcap,
            sinks=None if sinks is None else sinks[head * shape.group : (head + 1) * shape.group],
            layer=layer,
        )
        dtype = self.options.dtype
        tensor_cores = self.options.device != "cpu" and dtype.itemsize == 2
        return SegmentTwin(reference, self._graphs[layer], dtype, _place(layer, request, head), tensor_cores)

    def _copy(self, source: RequestId, twin: RequestId) -> None:
        self.requests[twin], p = self.requests[source], self.options.page_size
        self._floors[twin] = self._floors[source]
        family, own = self._families[source]
        self._families[twin] = family, min(own, self.requests[source] // p * p)
        for (layer, _, head), segment in self._segments_of(source):
            self._segments[layer, twin, head] = segment.fork(_place(layer, twin, head))

    def _forget(self, request: RequestId) -> None:
        del self.requests[request], self._families[request], self._floors[request]
        self.out.discard(request)
        for key, _ in self._segments_of(request):
            del self._segments[key]

    def _segments_of(self, request: RequestId) -> list[tuple[tuple[int, RequestId, int], SegmentTwin]]:
        """The segments of a request, with their (layer, request, KV head)."""
        return [(key, segment) for key, segment in self._segments.items() if key[1] == request]


def _place(layer: int, request: RequestId, head: int) -> str:
    return f"layer {layer} request {request} KV head {head}"
