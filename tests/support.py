"""Shared by the tests: a poisoned runtime beside its reference, end to end, with bounds derived on paper.

``kvsieve.verify`` judges stage by stage with bounds it measures; this judges the whole step with bounds from analysis.
The two find each other's mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from kvsieve.backends.base import Backend
from kvsieve.budget import Budget, BudgetLike, budget_for_layer
from kvsieve.flow import Flow, build_flow
from kvsieve.paging.allocator import NULL_BLOCK
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.table import RequestId
from kvsieve.reference import ReferenceSegment, ReferenceStep
from kvsieve.runtime import Attended, Runtime
from kvsieve.verify.data import Draw, LayerShape
from kvsieve.verify.poison import spoil_free_memory
from kvsieve.verify.rounding import F64, unit_roundoff
from kvsieve.window import Window

U32 = 2.0**-24
"""Unit roundoff of float32."""
RELATIVE = 1e-5
"""What float32 outputs may differ from the reference, relative to the largest value of their row."""


class PoisonedRuntime(Runtime):
    """What a finished request leaves behind is poisoned at once, and all other memory that nobody holds."""

    def finish(self, requests: Sequence[RequestId]) -> None:
        super().finish(requests)
        spoil_free_memory(self)


@dataclass
class Tally:
    """How sharp a comparison was: pages compared, selections that rounding excused, worst relative error."""

    selections: int = 0
    excused: int = 0
    worst: float = 0.0


class Twin:
    """A poisoned runtime and, for every (layer, request, KV head), a reference segment that gets the same tokens.

    Every method checks what the runtime returns against the reference: output, lse, selection, scores.

    Args:
        flow: a flow or its registered name. budget: for all layers or per layer.
        shapes: one per layer.
        dtype: of q, k and v; the reference gets the rounded values.
        options: scale, softcap, sinks ([Hq]) for all layers.
    """

    def __init__(
        self,
        flow: Flow | str,
        budget: BudgetLike,
        page_size: int,
        shapes: Sequence[LayerShape],
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        num_blocks: int | None = None,
        dense_layers: Collection[int] = (),
        backend: str | Backend = "eager",
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.flow = build_flow(flow) if isinstance(flow, str) else flow
        self.budget, self.page_size, self.shapes, self.dtype = budget, page_size, list(shapes), dtype
        self.dense_layers = frozenset(dense_layers)
        self.scale, self.softcap, self.sinks = scale, softcap, sinks
        self.runtime = PoisonedRuntime(
            self.flow, budget, page_size=page_size, num_blocks=num_blocks, dense_layers=dense_layers, backend=backend
        )
        self._scatter(num_blocks)
        self.random = torch.Generator().manual_seed(seed)
        self.segments: dict[tuple[int, RequestId, int], ReferenceSegment] = {}
        self.state_error: dict[tuple[int, RequestId, int], list[float]] = {}
        self.tally = Tally()

    def _scatter(self, num_blocks: int | None) -> None:
        """Holes in the pool, and rows that are not numbered as blocks are: no table is the identity."""
        self.runtime.tables.row_allocator.allocate(3)
        if num_blocks is None:
            allocator = self.runtime.tables.block_allocator
            allocator.release(allocator.allocate(11)[1::3])

    # What a request goes through

    def admit(self, count: int = 1) -> list[RequestId]:
        """New requests on both sides."""
        requests = [self.runtime.admit() for _ in range(count)]
        for request in requests:
            for layer, shape in enumerate(self.shapes):
                for head in range(shape.heads):
                    self.segments[layer, request, head] = self._segment(layer, shape, head)
                    self.state_error[layer, request, head] = []
        return requests

    def extend(
        self,
        requests: Sequence[RequestId],
        counts: Sequence[int],
        *,
        compare: bool = True,
        draws: Sequence[Draw] | None = None,
    ) -> list[torch.Tensor]:
        """Prefill; with ``compare=False`` the reference only stores the tokens. Returns the outputs per layer."""
        call = self.runtime.extend(requests, counts)
        outs = []
        for layer in range(len(self.shapes)):
            q, k, v = draws[layer] if draws else self.draw(layer, sum(counts))
            result = call.attend(layer, q, k, v, **self._options())
            self._extend_references(layer, requests, counts, (q, k, v), result.out if compare else None)
            outs.append(result.out)
        return outs

    def step(self, requests: Sequence[RequestId], *, draws: Sequence[Draw] | None = None) -> list[Attended]:
        """A decode step, compared. Returns the results per layer."""
        call = self.runtime.step(requests)
        results = []
        for layer in range(len(self.shapes)):
            q, k, v = draws[layer] if draws else self.draw(layer, len(requests))
            result = call.attend(layer, q, k, v, **self._options())
            self._step_references(layer, requests, (q, k, v), result)
            results.append(result)
        return results

    def finish(self, requests: Sequence[RequestId], *, poisoned: bool = True) -> None:
        """End requests; ``poisoned=False`` leaves their plausible values in the memory."""
        self.runtime.finish(requests) if poisoned else Runtime.finish(self.runtime, requests)
        for key in [key for key in self.segments if key[1] in set(requests)]:
            del self.segments[key], self.state_error[key]

    def draw(self, layer: int, tokens: int) -> Draw:
        """Random q [T, Hq, D], k [T, H, D], v [T, H, Dv] of a layer."""
        sizes = self.shapes[layer].sizes(tokens)
        q, k, v = (torch.randn(size, generator=self.random).to(self.dtype) for size in sizes)
        return q, k, v

    def pool(self, layer: int) -> LayerPool:
        return self.runtime.layers[layer].pool

    # Comparisons

    def check_storage(self) -> None:
        """K, V, summaries and state of every live request, and its table with a null tail."""
        tables = self.runtime.tables
        for (layer, request, head), segment in self.segments.items():
            entry, pool = tables[request], self.pool(layer)
            assert entry.length == len(segment.k)
            assert tables.blocks[entry.slot].tolist() == _padded(entry.blocks, tables.blocks.shape[1])
            assert tables.rows[entry.slot].tolist() == _padded(entry.rows, tables.rows.shape[1])
            for field, expected in ((pool.k, segment.k), (pool.v, segment.v)):
                stored = field[head, entry.blocks].flatten(0, 1)[: entry.length].to(F64)
                assert torch.equal(stored, torch.stack(expected) if expected else stored)
            self._check_fields(layer, request, head, segment)

    def _check_fields(self, layer: int, request: RequestId, head: int, segment: ReferenceSegment) -> None:
        entry, pool = self.runtime.tables[request], self.pool(layer)
        for page, summary in enumerate(segment.summaries):
            tokens = slice(page * self.page_size, (page + 1) * self.page_size)
            inputs = max(torch.stack(x[tokens]).abs().max() for x in (segment.k, segment.v))
            for name, value in summary.items():
                expected = value.to(F64)
                stored = pool.summaries[name][head, entry.blocks[page]]
                error = (stored.to(F64) - expected).abs()
                rounding = unit_roundoff(stored.dtype) * expected.abs() if stored.is_floating_point() else 0.0
                assert (error <= rounding + (self.page_size + 2) * U32 * (inputs + expected.abs())).all(), name
        if layer in self.dense_layers:
            return
        for page, state in enumerate(segment.state):
            allowed = self.state_error[layer, request, head]
            for name, expected in state.items():
                stored = pool.state[name][head, entry.rows[page]].to(F64)
                slack = (allowed[page] if page < len(allowed) else 0.0) + 4 * U32 * expected.abs()
                assert ((stored - expected).abs() <= slack).all(), (name, page, stored, expected)

    def _extend_references(
        self, layer: int, requests: Sequence[RequestId], counts: Sequence[int], draw: Draw, out: torch.Tensor | None
    ) -> None:
        q, k, v = draw
        shape, first = self.shapes[layer], 0
        for request, count in zip(requests, counts, strict=True):
            rows = slice(first, first + count)
            first += count
            for head in range(shape.heads if count else 0):
                segment = self.segments[layer, request, head]
                queries = q[rows].unflatten(1, (shape.heads, shape.group))[:, head]
                if out is None:
                    for key, value in zip(k[rows, head], v[rows, head], strict=True):
                        segment.write(key, value)
                    if segment.flow.mass is not None:
                        segment.mass = prompt_mass(segment, queries)
                    continue
                expected, _ = segment.extend(queries, k[rows, head], v[rows, head])
                received = out[rows].unflatten(1, (shape.heads, shape.group))[:, head]
                for i in range(count):
                    self._check_out(segment, queries[i], received[i], expected[i], prefill=True)

    def _step_references(self, layer: int, requests: Sequence[RequestId], draw: Draw, result: Attended) -> None:
        assert result.selection is not None and result.lse is not None
        shape, scored = self.shapes[layer], 0
        q, k, v = draw
        q, out = (x.unflatten(1, (shape.heads, shape.group)) for x in (q, result.out))
        for i, request in enumerate(requests):
            count = int(result.selection.count[i])
            seen = False
            for head in range(shape.heads):
                segment = self.segments[layer, request, head]
                expected = segment.step(q[i, head], k[i, head], v[i, head])
                errors = self._score_errors(layer, request, head, q[i, head], expected)
                if expected.scores is not None:
                    assert result.scores is not None
                    received = result.scores[scored, head, : len(expected.scores)]
                    assert ((received.to(F64) - expected.scores).abs() <= errors).all(), (received, expected.scores)
                    seen = True
                selection = result.selection.pages[i, head, :count].tolist()
                expected = self._check_selection(segment, q[i, head], selection, expected, errors)
                self._check_out(segment, q[i, head], out[i, head], expected.out)
                lse = result.lse[i, head].to(F64)
                assert ((lse - expected.lse).abs() <= RELATIVE * expected.lse.abs().clamp(min=1)).all()
            scored += seen

    def _check_selection(
        self,
        segment: ReferenceSegment,
        q: torch.Tensor,
        selection: list[int],
        expected: ReferenceStep,
        errors: torch.Tensor,
    ) -> ReferenceStep:
        """Selections are equal, or every swapped pair of pages lies closer than the rounding of its two scores."""
        self.tally.selections += 1
        if selection == expected.selection:
            return expected
        assert expected.scores is not None, (selection, expected.selection)
        assert selection == sorted(set(selection)) and len(selection) == len(expected.selection)
        sink = segment.budget.sink
        lost = [page - sink for page in set(expected.selection) - set(selection)]
        won = [page - sink for page in set(selection) - set(expected.selection)]
        assert min(lost + won) >= 0 and max(lost + won) < len(expected.scores), (selection, expected.selection)
        for a in lost:
            for b in won:
                gap = float(expected.scores[a] - expected.scores[b])
                assert gap <= float(errors[a] + errors[b]), (selection, expected.selection, gap)
        self.tally.excused += 1
        return ReferenceStep(*segment.attend(q, segment.tokens(selection)), selection, expected.scores)

    def _check_out(
        self,
        segment: ReferenceSegment,
        q: torch.Tensor,
        received: torch.Tensor,
        expected: torch.Tensor,
        prefill: bool = False,
    ) -> None:
        error = (received.to(F64) - expected).abs()
        allowed: torch.Tensor | float = RELATIVE * expected.abs().amax(-1, keepdim=True)
        if received.dtype is not torch.float32:
            allowed = low_precision_bound(segment, q, expected, received.dtype, prefill)
        assert received.shape == expected.shape and (error <= allowed).all(), float((error / allowed).max())
        self.tally.worst = max(self.tally.worst, float((error / expected.abs().amax()).max()))

    def _score_errors(
        self, layer: int, request: RequestId, head: int, q: torch.Tensor, step: ReferenceStep
    ) -> torch.Tensor:
        """How far float32 scores [W] may lie from the reference's; keeps the error of the state beside it."""
        segment = self.segments[layer, request, head]
        if step.scores is None:
            return torch.zeros(0, dtype=F64)
        carried = self.state_error[layer, request, head]
        carried += [0.0] * (len(segment.state) - len(carried))
        window = slice(segment.budget.sink, segment.budget.sink + len(step.scores))
        pool = self.pool(layer)
        floating = [field.dtype for field in pool.summaries.values() if field.is_floating_point()]
        stored = max((unit_roundoff(dtype) for dtype in floating if dtype.itemsize < 4), default=0.0)
        errors = score_error(segment, q, step.scores, window, stored, carried[window])
        if segment.flow.init_state:
            carried[window] = errors.tolist()
        return errors

    def _segment(self, layer: int, shape: LayerShape, head: int) -> ReferenceSegment:
        dense = layer in self.dense_layers
        sinks = None if self.sinks is None else self.sinks.unflatten(0, (shape.heads, shape.group))[head]
        return ReferenceSegment(
            Flow() if dense else self.flow,
            Budget(0, 0, 10**9) if dense else budget_for_layer(self.budget, layer),
            self.page_size,
            scale=self.scale,
            softcap=self.softcap,
            sinks=sinks,
            layer=layer,
        )

    def _options(self) -> dict[str, object]:
        return {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}


def score_error(
    segment: ReferenceSegment,
    q: torch.Tensor,
    scores: torch.Tensor,
    window: slice,
    stored: float,
    carried: Sequence[float],
) -> torch.Tensor:
    """Bound of ``|float32 score - float64 score|`` [W] of a shipped flow; 1e-5 relative to the largest for others.

    A dot product of n terms errs by at most ``n * u * sum |q_d k_d|``; a summary stored with unit roundoff ``stored``
    adds ``stored * sum |q_d k_d|``. Over a page that sum is at most ``A = max_h sum_d |q_hd| max_t |k_td|``.
    A softmax of logits that err by e has a relative error of ``exp(2 e) - 1``, plus its own rounding.
    """
    flow, p = segment.flow, segment.page_size
    keys = torch.stack(segment.k[window.start * p : window.stop * p]).abs().unflatten(0, (-1, p)).amax(1)
    magnitude = (q.to(F64).abs() @ keys.T).amax(0)
    terms = q.shape[-1] + p + q.shape[0] + 8
    logits = (terms * U32 + stored) * magnitude
    if flow.name in ("block_sparse_attention", "gqa_quest_sparse_attention"):
        return logits
    if flow.name in ("h2o_sparse_attention", "gqa_h2o_sparse_attention"):
        return (abs(flow.w_avg) + abs(flow.w_peak)) * logits
    if flow.name in ("gqa_block_sparse_attention", "h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention"):
        scale = flow.scale or (segment.scale if flow.name == "gqa_block_sparse_attention" else None)
        scale = scale or q.shape[-1] ** -0.5
        relative = math.expm1(2 * scale * float(logits.max())) + (len(scores) + 8) * U32
        decay = getattr(flow, "decay", 0.0)
        return relative * scores + decay * torch.tensor(carried, dtype=F64)
    largest = (
        scores.abs().max().clamp(min=1.0 if flow.mass else 0.0)
    )  # mass is made of probabilities, good to 1e-5 of 1
    return (RELATIVE + stored) * largest.expand(len(scores)) + torch.tensor(carried, dtype=F64)


def prompt_mass(segment: ReferenceSegment, q: torch.Tensor) -> list[float]:
    """The mass after a whole prompt with queries [n, G, D], all at once instead of query by query."""
    mass = segment.flow.mass
    assert mass is not None and segment.softcap is None and segment.sinks is None
    assert len(q) == len(segment.k), "a first prompt"
    logits = torch.einsum("ngd,td->gnt", q.to(F64), torch.stack(segment.k)) * segment.attention_scale(q.shape[-1])
    logits += torch.full(logits.shape[1:], -math.inf, dtype=F64).triu(1)
    received = torch.softmax(logits, -1)
    reduced = {"sum": received.sum(0), "mean": received.mean(0), "max": received.amax(0)}[mass.group]
    rows = min(len(q), mass.window or len(q))
    weights = torch.tensor([0.0] * (len(q) - rows) + [mass.factor ** (rows - 1 - i) for i in range(rows)], dtype=F64)
    return (weights @ reduced).tolist()  # type: ignore[no-any-return]


def low_precision_bound(
    segment: ReferenceSegment, q: torch.Tensor, out: torch.Tensor, dtype: torch.dtype, prefill: bool
) -> torch.Tensor:
    """Bound of an output error [G, Dv] for 16-bit q, K and V, whose rounded values the reference gets.

    A step computes in float32 and rounds the output once: ``u |out|``. A dense kernel may also round q and K by their
    scale, the logits, and the probabilities: logits then err by ``e <= 4 u scale sum_d |q_d k_td|``, the output by
    ``(exp(2 e) - 1 + 2 u) sum_t p_t |v_t|``.
    """
    u = unit_roundoff(dtype)
    k, v = torch.stack(segment.k), torch.stack(segment.v)
    q = q.to(F64)
    scale = segment.attention_scale(q.shape[-1])
    reach = scale * (q.abs() @ k.abs().T).amax(-1, keepdim=True)
    kernel = u if prefill else U32 * q.shape[-1]
    weight = v.abs().amax(0)
    return u * out.abs() + (torch.expm1(2 * 4 * kernel * reach) + 2 * kernel) * weight


def _padded(blocks: Sequence[int], width: int) -> list[int]:
    return [*blocks, *[int(NULL_BLOCK)] * (width - len(blocks))]


def bare_window(widths: Sequence[int], topk: torch.Tensor, requests: Sequence[int] | None = None) -> Window:
    """A window that only ``select`` looks at: so many pages each, of which ``topk`` [Bs] are chosen."""
    places, width = torch.zeros(1, 1, dtype=torch.int64), max(widths)
    return Window(
        torch.tensor(range(len(widths)) if requests is None else requests),
        places,
        places,
        torch.zeros(1, dtype=torch.int64),
        torch.tensor(widths),
        width,
        0,
        1,
        topk,
        int(topk.max()),
        sum(widths),
    )
