"""Changes that must not matter: bit for bit where the same arithmetic runs on the same numbers, else within rounding.

Bit-identical: where blocks lie, what other requests hold, what unselected pages hold, padding requests. Within
rounding: alone or in a batch, the order of the batch, whole or chunked prefill: kernels sum in another order then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvsieve.backends import Backend, get_backend
from kvsieve.backends.base import AttentionOptions, Selection
from kvsieve.graph import FlowGraphs
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import Quota, Rows, Window
from kvsieve.runtime import RequestId
from kvsieve.verify.checks import Numbers, compare, expect
from kvsieve.verify.data import BulkData, IidData, LayerShape
from kvsieve.verify.poison import poisoned_pools
from kvsieve.verify.rounding import unit_roundoff
from kvsieve.verify.subject import Subject
from kvsieve.verify.twin import Twin

SHAPES = (LayerShape(2, 3, 12, 8),)
STEPS = 6


@dataclass(frozen=True)
class Trace:
    """Outputs and page lists of a request's steps."""

    outs: list[torch.Tensor]
    pages: list[list[list[int]]]


def follow(
    twin: Twin, requests: Sequence[RequestId], chunks: Sequence[Sequence[int]], steps: int = STEPS
) -> list[Trace]:
    """Prefill in chunks (one list of counts a call), decode, and keep what each request got."""
    for counts in chunks:
        if sum(counts):
            twin.extend(requests, counts)
    traces = [Trace([], []) for _ in requests]
    for _ in range(steps):
        (result,) = twin.step(requests)
        assert result.selection is not None
        for i, trace in enumerate(traces):
            trace.outs.append(result.out[i].cpu())
            count = int(result.selection.count[i])
            trace.pages.append(result.selection.pages[i, :, :count].tolist())
    return traces


def same(numbers: Numbers, what: str, first: Trace, second: Trace, exact: bool, dtype: torch.dtype) -> None:
    """Two traces of a request agree: bit for bit, or pages alike and outputs within rounding."""
    for step, (a, b) in enumerate(zip(first.outs, second.outs, strict=True)):
        expect(first.pages[step] == second.pages[step], "selection", what, f"step {step} attends other pages")
        if exact:
            expect(torch.equal(a, b), "output", what, f"step {step} is not bit-identical")
        else:
            bound = torch.full(a.shape, 64 * unit_roundoff(dtype) * float(b.abs().max()), dtype=torch.float64)
            compare(numbers, "output", f"{what} step {step}", a, b.double(), bound)
    numbers.note("output", 0.0)


def _lengths(subject: Subject) -> list[int]:
    return [8 * subject.page_size + 1, 3, 6 * subject.page_size]


def _plain(subject: Subject, order: Sequence[int] = (0, 1, 2)) -> tuple[Twin, list[Trace]]:
    """The run that all others are held against; ``order`` is how requests stand in the batch."""
    twin = subject.twin(SHAPES, IidData(subject.seed))
    requests = [twin.admit() for _ in range(3)]
    lengths = _lengths(subject)
    traces = follow(twin, [requests[i] for i in order], [[lengths[i] for i in order]])
    return twin, [traces[list(order).index(i)] for i in range(3)]


def _permuted_blocks(subject: Subject) -> Numbers:
    with poisoned_pools():
        _, plain = _plain(subject)
        twin = subject.twin(SHAPES, IidData(subject.seed))
        requests = [twin.admit() for _ in range(3)]
        scatter(twin)
        traces = follow(twin, requests, [_lengths(subject)])
        blocks = twin.runtime.tables[requests[0]].blocks
        expect(blocks != sorted(blocks), "storage", "permuted blocks", "blocks were not scattered")
        for i in range(3):
            same(twin.numbers, f"permuted blocks, request {i}", traces[i], plain[i], True, subject.dtype)
    return twin.numbers


def scatter(twin: Twin) -> None:
    """Make an untouched pool hand out its blocks and rows in a scattered order."""
    for allocator in (twin.runtime.tables.block_allocator, twin.runtime.tables.row_allocator):
        allocator._grow(40 * twin.options.page_size + 97)
        random.Random(0).shuffle(allocator._free)


def _batch_order(subject: Subject) -> Numbers:
    with poisoned_pools():
        _, plain = _plain(subject)
        twin, turned = _plain(subject, (2, 0, 1))
        for i in range(3):
            same(twin.numbers, f"batch order, request {i}", turned[i], plain[i], False, subject.dtype)
    return twin.numbers


def _alone(subject: Subject) -> Numbers:
    with poisoned_pools():
        _, plain = _plain(subject)
        twin = subject.twin(SHAPES, IidData(subject.seed))
        requests = [twin.admit() for _ in range(3)]
        for i, length in enumerate(_lengths(subject)):
            (trace,) = follow(twin, [requests[i]], [[length]])
            same(twin.numbers, f"alone, request {i}", trace, plain[i], False, subject.dtype)
    return twin.numbers


def _chunks(subject: Subject) -> Numbers:
    with poisoned_pools():
        _, plain = _plain(subject)
        lengths, p = _lengths(subject), subject.page_size
        for size in (1, p, p + 1, 2 * p - 1):
            twin = subject.twin(SHAPES, IidData(subject.seed))
            requests = [twin.admit() for _ in range(3)]
            calls = -(-max(lengths) // size)
            chunks = [[max(0, min(size, length - i * size)) for length in lengths] for i in range(calls)]
            traces = follow(twin, requests, chunks)
            for i in range(3):
                same(twin.numbers, f"chunks of {size}, request {i}", traces[i], plain[i], False, subject.dtype)
    return twin.numbers


def _padding_requests(subject: Subject) -> Numbers:
    """Requests that get no token stand in the batch of a prefill call and leave everything as it was."""
    with poisoned_pools():
        _, plain = _plain(subject)
        twin = subject.twin(SHAPES, IidData(subject.seed))
        requests = [twin.admit() for _ in range(3)]
        idle = [twin.admit() for _ in range(2)]
        twin.extend([idle[0], *requests, idle[1]], [0, *_lengths(subject), 0])
        traces = follow(twin, requests, [])
        for i in range(3):
            same(twin.numbers, f"padding requests, request {i}", traces[i], plain[i], True, subject.dtype)
    return twin.numbers


class _OthersBroken(IidData):
    """Request 0 as ever; all others hold NaN."""

    def tokens(
        self, shape: LayerShape, layer: int, request: int, start: int, count: int, family: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().tokens(shape, layer, request, start, count, family)
        return (q, k, v) if request == 0 else (q * float("nan"), k * float("nan"), v * float("nan"))


def _others_nan(subject: Subject) -> Numbers:
    with poisoned_pools():
        _, plain = _plain(subject)
        twin = subject.twin(SHAPES, _OthersBroken(subject.seed))
        requests = [twin.admit() for _ in range(3)]
        traces = follow(twin, requests, [_lengths(subject)])
        same(twin.numbers, "beside NaN requests", traces[0], plain[0], True, subject.dtype)
    return twin.numbers


class UnselectedNaN(Backend):
    """A backend with K and V of every block that no list names overwritten by NaN while attention runs."""

    name = "unselected NaN"

    def __init__(self, inner: str | Backend) -> None:
        self._inner = get_backend(inner)
        self.overwritten = 0

    def refusal(self, graphs: FlowGraphs) -> str | None:
        return self._inner.refusal(graphs)

    def prepare(self, graphs: FlowGraphs, device: torch.device) -> Any:
        return self._inner.prepare(graphs, device)

    def summarize(self, flow: Any, pool: LayerPool, blocks: torch.Tensor) -> None:
        self._inner.summarize(flow, pool, blocks)

    def score(self, flow: Any, q: torch.Tensor, pool: LayerPool, window: Window) -> torch.Tensor:
        return self._inner.score(flow, q, pool, window)

    def select(self, scores: torch.Tensor | None, quota: Quota, heads: int) -> Selection:
        return self._inner.select(scores, quota, heads)

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: LayerPool, rows: Rows, options: AttentionOptions
    ) -> torch.Tensor:
        return self._inner.prefill(q, k, v, pool, rows, options)

    def attend(
        self, q: torch.Tensor, pool: LayerPool, rows: Rows, selection: Selection, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        listed = selection.listed().expand(selection.pages.shape)
        pages = torch.where(listed, selection.pages, 0)
        blocks = torch.gather(rows.table[:, None].expand(-1, q.shape[1], -1), 2, pages)
        named = torch.zeros(pool.k.shape[:2], dtype=torch.bool, device=pool.k.device)
        for head in range(q.shape[1]):
            named[head, blocks[:, head][listed[:, head]]] = True
        kept = pool.k.clone(), pool.v.clone()
        pool.k[~named] = float("nan")
        pool.v[~named] = float("nan")
        self.overwritten += int((~named).sum())
        result = self._inner.attend(q, pool, rows, selection, options)
        pool.k.copy_(kept[0])
        pool.v.copy_(kept[1])
        return result


def _unselected_nan(subject: Subject) -> Numbers:
    with poisoned_pools():
        _, plain = _plain(subject)
        backend = UnselectedNaN(subject.backend)
        twin = replace(subject, backend=backend).twin(SHAPES, IidData(subject.seed))
        requests = [twin.admit() for _ in range(3)]
        traces = follow(twin, requests, [_lengths(subject)])
        expect(backend.overwritten > 0, "output", "unselected NaN", "every page was selected: nothing was shown")
        for i in range(3):
            same(twin.numbers, f"unselected NaN, request {i}", traces[i], plain[i], True, subject.dtype)
    return twin.numbers


def _no_op(subject: Subject) -> Numbers:
    """Under budget a step is dense attention, bit for bit, whatever the flow."""
    with poisoned_pools():
        outs = []
        for dense in ((), (0,)):
            twin = subject.twin(SHAPES, BulkData(subject.seed), dense_layers=dense)
            requests = [twin.admit() for _ in range(2)]
            room = subject.budget.kept(0) * subject.page_size
            outs.append(follow(twin, requests, [[max(1, room - 5), 1]], steps=min(4, room - 1)))
        for i in range(2):
            same(twin.numbers, f"under budget, request {i}", outs[0][i], outs[1][i], True, subject.dtype)
    return twin.numbers


METAMORPHIC: tuple[tuple[str, str, Callable[[Subject], Numbers]], ...] = (
    ("permuted blocks", "where blocks lie does not matter: bit-identical", _permuted_blocks),
    ("batch order", "the order of requests does not matter: within rounding", _batch_order),
    ("alone or in a batch", "other requests do not matter: within rounding", _alone),
    ("chunked prefill", "chunks do not matter: within rounding", _chunks),
    ("padding requests", "requests without a token do not matter: bit-identical", _padding_requests),
    ("others NaN", "what other requests hold does not matter: bit-identical", _others_nan),
    ("unselected NaN", "pages that are not selected are not read: bit-identical", _unselected_nan),
    ("under budget", "a step under budget is dense attention: bit-identical", _no_op),
)
