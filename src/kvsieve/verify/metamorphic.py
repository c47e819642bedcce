"""Changes that must not matter: bit for bit where the same arithmetic runs on the same numbers, else within rounding.

Bit-identical: where blocks lie, what other requests hold, what unselected pages hold, padding requests. Within
rounding: alone or in a batch, the order of the batch, whole or chunked prefill: kernels sum in another order then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kvsieve.runtime import RequestId
from kvsieve.verify.checks import Numbers, compare, expect
from kvsieve.verify.data import BulkData, Data, Draw, IidData, LayerShape
from kvsieve.verify.poison import NAN, poisoned_pools
from kvsieve.verify.rounding import unit_roundoff
from kvsieve.verify.subject import Subject
from kvsieve.verify.twin import Twin
from kvsieve.verify.unselected import UnselectedNaN

SHAPES = (LayerShape(2, 3, 12, 8),)
STEPS = 6
LARGE = 1e4  # within the range of float16


@dataclass(frozen=True)
class StepTrace:
    """Outputs and page lists of a request's steps."""

    outs: list[torch.Tensor]
    pages: list[list[list[int]]]


def follow(
    twin: Twin, requests: Sequence[RequestId], chunks: Sequence[Sequence[int]], steps: int = STEPS
) -> list[StepTrace]:
    """Prefill in chunks (one list of counts a call), decode, and keep what each request got."""
    for counts in chunks:
        if sum(counts):
            twin.extend(requests, counts)
    traces = [StepTrace([], []) for _ in requests]
    for _ in range(steps):
        (result,) = twin.step(requests)
        assert result.selection is not None
        for i, trace in enumerate(traces):
            trace.outs.append(result.out[i].cpu())
            count = int(result.selection.count[i])
            trace.pages.append(result.selection.pages[i, :, :count].tolist())
    return traces


def same(numbers: Numbers, what: str, first: StepTrace, second: StepTrace, exact: bool, dtype: torch.dtype) -> None:
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


def _three(subject: Subject, data: Data | None = None) -> tuple[Twin, list[RequestId]]:
    """A twin with three empty requests."""
    twin = subject.twin(SHAPES, data or IidData(subject.seed))
    return twin, [twin.admit() for _ in range(3)]


def _plain(subject: Subject) -> list[StepTrace]:
    """The run that all others are held against."""
    twin, requests = _three(subject)
    return follow(twin, requests, [_lengths(subject)])


def _agree(
    subject: Subject, twin: Twin, what: str, traces: Sequence[StepTrace], plain: Sequence[StepTrace], *, exact: bool
) -> Numbers:
    """The requests of a twin went as in the plain run."""
    for i, (trace, expected) in enumerate(zip(traces, plain, strict=True)):
        same(twin.numbers, f"{what}, request {i}", trace, expected, exact, subject.dtype)
    return twin.numbers


@poisoned_pools()
def _permuted_blocks(subject: Subject) -> Numbers:
    twin, requests = _three(subject)
    scatter(twin)
    traces = follow(twin, requests, [_lengths(subject)])
    blocks = twin.runtime.tables[requests[0]].blocks
    expect(blocks != sorted(blocks), "storage", "permuted blocks", "blocks were not scattered")
    return _agree(subject, twin, "permuted blocks", traces, _plain(subject), exact=True)


def scatter(twin: Twin) -> None:
    """Make an untouched pool hand out its blocks and rows in a scattered order."""
    for allocator in (twin.runtime.tables.block_allocator, twin.runtime.tables.row_allocator):
        allocator._grow(40 * twin.options.page_size + 97)
        random.Random(0).shuffle(allocator._free)


@poisoned_pools()
def _batch_order(subject: Subject) -> Numbers:
    twin, requests = _three(subject)
    lengths, order = _lengths(subject), (2, 0, 1)
    traces = follow(twin, [requests[i] for i in order], [[lengths[i] for i in order]])
    turned = [traces[order.index(i)] for i in range(3)]
    return _agree(subject, twin, "batch order", turned, _plain(subject), exact=False)


@poisoned_pools()
def _alone(subject: Subject) -> Numbers:
    twin, requests = _three(subject)
    pairs = zip(requests, _lengths(subject), strict=True)
    traces = [trace for request, length in pairs for trace in follow(twin, [request], [[length]])]
    return _agree(subject, twin, "alone", traces, _plain(subject), exact=False)


@poisoned_pools()
def _chunks(subject: Subject) -> Numbers:
    numbers, plain, lengths, p = Numbers(), _plain(subject), _lengths(subject), subject.page_size
    for size in (1, p, p + 1, 2 * p - 1):
        twin, requests = _three(subject)
        calls = -(-max(lengths) // size)
        chunks = [[max(0, min(size, length - i * size)) for length in lengths] for i in range(calls)]
        traces = follow(twin, requests, chunks)
        numbers.merge(_agree(subject, twin, f"chunks of {size}", traces, plain, exact=False))
    return numbers


@poisoned_pools()
def _padding_requests(subject: Subject) -> Numbers:
    """Requests that get no token stand in the batch of a prefill call and leave everything as it was."""
    twin, requests = _three(subject)
    idle = [twin.admit() for _ in range(2)]
    twin.extend([idle[0], *requests, idle[1]], [0, *_lengths(subject), 0])
    return _agree(subject, twin, "padding requests", follow(twin, requests, []), _plain(subject), exact=True)


class _OthersBroken(IidData):
    """Request 0 as ever; all others hold NaN."""

    def shape_draw(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, owner: int, token: int) -> Draw:
        return (q, k, v) if owner == 0 else (q * float("nan"), k * float("nan"), v * float("nan"))


@poisoned_pools()
def _others_nan(subject: Subject) -> Numbers:
    twin, requests = _three(subject, _OthersBroken(subject.seed))
    traces = follow(twin, requests, [_lengths(subject)])
    return _agree(subject, twin, "beside NaN requests", traces[:1], _plain(subject)[:1], exact=True)


@poisoned_pools()
def _unselected_nan(subject: Subject) -> Numbers:
    backend = UnselectedNaN(subject.backend)
    twin, requests = _three(replace(subject, backend=backend))
    traces = follow(twin, requests, [_lengths(subject)])
    expect(backend.overwritten > 0, "output", "unselected NaN", "every page was selected: nothing was shown")
    return _agree(subject, twin, "unselected NaN", traces, _plain(subject), exact=True)


def _free_memory(subject: Subject) -> Numbers:
    """NaN hides where it ranks last; a large number does not."""
    plain, numbers = _plain_in(subject, NAN), Numbers()
    for filling in (LARGE, -LARGE):
        with poisoned_pools(filling):
            twin, requests = _three(subject)
            traces = follow(twin, requests, [_lengths(subject)])
            numbers.merge(_agree(subject, twin, f"free memory holds {filling:g}", traces, plain, exact=True))
    return numbers


def _plain_in(subject: Subject, filling: float) -> list[StepTrace]:
    with poisoned_pools(filling):
        return _plain(subject)


@poisoned_pools()
def _no_op(subject: Subject) -> Numbers:
    """Under budget a step is dense attention: bit for bit, or within rounding where it also yields attention mass."""
    mass, runs = subject.flow.mass, []
    for dense in ((), (0,)):
        twin = subject.twin(SHAPES, BulkData(subject.seed), dense_layers=dense)
        requests = [twin.admit() for _ in range(2)]
        room = subject.budget.kept(0) * subject.page_size
        runs.append(follow(twin, requests, [[max(1, room - 5), 1]], steps=min(4, room - 1)))
    return _agree(subject, twin, "under budget", *runs, exact=mass is None or mass.update == "none")


METAMORPHIC: tuple[tuple[str, str, Callable[[Subject], Numbers]], ...] = (
    ("permuted blocks", "where blocks lie does not matter: bit-identical", _permuted_blocks),
    ("batch order", "the order of requests does not matter: within rounding", _batch_order),
    ("alone or in a batch", "other requests do not matter: within rounding", _alone),
    ("chunked prefill", "chunks do not matter: within rounding", _chunks),
    ("padding requests", "requests without a token do not matter: bit-identical", _padding_requests),
    ("others NaN", "what other requests hold does not matter: bit-identical", _others_nan),
    ("unselected NaN", "pages that are not selected are not read: bit-identical", _unselected_nan),
    ("free memory", "what free memory holds does not matter: bit-identical", _free_memory),
    ("under budget", "a step under budget is dense attention: bit-identical, with mass within rounding", _no_op),
)
