"""Life-cycle fuzzing: random programmes over requests, checked event by event, shrunk to a minimal one on a fault."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from kvsieve.backends import Backend
from kvsieve.budget import Budget
from kvsieve.dtypes import DTYPES
from kvsieve.errors import NotCroppable, OutOfPages
from kvsieve.flow import Flow, list_flows, load_flow
from kvsieve.retention import Evict
from kvsieve.runtime import CROP_ROWS, RequestId
from kvsieve.verify.checks import Fault, Numbers, expect
from kvsieve.verify.data import KINDS, LayerShape
from kvsieve.verify.evicting import EvictingTwin
from kvsieve.verify.poison import poisoned_pools
from kvsieve.verify.twin import Twin, TwinOptions

Event = tuple[str | int, ...]
"""A verb and small integers. Integers pick among what is alive, so that every subset of a programme is a programme."""

VERBS = ("admit", "extend", "step", "fork", "crop", "reorder", "preempt", "resume", "finish", "abandon")
WEIGHTS = (5, 6, 10, 2, 3, 2, 2, 2, 2, 1)
MAX_REQUESTS = 5


@dataclass(frozen=True)
class Program:
    """A flow, a budget or a retention, a geometry, data, and events; ``repr`` is a snippet that replays it."""

    flow: str
    page_size: int
    shapes: tuple[LayerShape, ...]
    budget: Budget
    data: str
    seed: int
    num_blocks: int
    dense_layers: tuple[int, ...]
    events: tuple[Event, ...]
    dtype: str = "fp32"
    device: str = "cpu"
    retention: Evict | None = None

    def snippet(self) -> str:
        """Python that replays the programme."""
        return (
            "from kvsieve.budget import Budget\n"
            "from kvsieve.retention import Evict\n"
            "from kvsieve.verify.data import LayerShape\n"
            "from kvsieve.verify.programs import Program, run_program\n\n"
            f"run_program({self!r})\n"
        )


def random_program(
    seed: int,
    flow: str | None = None,
    events: int = 50,
    built: Flow | None = None,
    *,
    dtype: str = "fp32",
    device: str = "cpu",
    evicting: bool | None = None,
) -> Program:
    """A programme drawn from a seed; a pool so small that blocks are recycled all the time.

    ``built`` is the flow that ``flow`` names, where its arguments are not the default ones. ``evicting``: whether
    tokens are evicted; None: chance decides, where the flow allows it.
    """
    draw = random.Random(seed)
    name = flow or draw.choice(sorted(list_flows()))
    built = built or load_flow(name)
    page_size = built.page_size or draw.choice((1, 2, 3, 5))
    shapes = tuple(_random_shape(draw) for _ in range(draw.choice((1, 1, 2))))
    topk = draw.randint(0, 3) if built.score else 0
    budget = Budget(topk, draw.randint(0, 2), draw.randint(1, 2), draw.choice((0.0, 0.0, 0.3)) if built.score else 0.0)
    blocks = draw.choice((8, 14, 24, 40)) * (3 if page_size == 1 else 1)
    dense = (1,) if len(shapes) == 2 and draw.random() < 0.3 else ()
    kind = draw.choice(("iid", "iid", "planted", "ties", "extreme"))
    chosen = tuple(_random_events(draw, events))
    retention = None
    if built.evictable and (draw.random() < 0.3 if evicting is None else evicting):
        retention, dense = _random_eviction(draw, built), ()
    return Program(name, page_size, shapes, budget, kind, seed, blocks, dense, chosen, dtype, device, retention)


def _random_eviction(draw: random.Random, flow: Flow) -> Evict:
    sink, recent = draw.randint(0, 2), draw.randint(1, 4)
    return Evict(sink + recent + (draw.randint(0, 6) if flow.mass else 0), sink, recent)


def _random_shape(draw: random.Random) -> LayerShape:
    width = draw.choice((4, 6, 9))
    return LayerShape(draw.choice((1, 2, 3)), draw.choice((1, 2, 3, 7)), width, draw.choice((width, 5)))


def _random_events(draw: random.Random, count: int) -> Iterator[Event]:
    for _ in range(count):
        verb = draw.choices(VERBS, WEIGHTS)[0]
        yield (verb, *(draw.randrange(1 << 16) for _ in range(3)))


def run_program(program: Program, backend: str | Backend = "eager", built: Flow | None = None) -> Numbers:
    """Run a programme on the real stack beside the reference, checking everything after every event.

    ``built`` is the flow that the programme names, where its arguments are not the default ones.

    Raises:
        Fault: the runtime is wrong beyond rounding.
    """
    options = TwinOptions(
        program.page_size,
        program.shapes,
        dtype=DTYPES[program.dtype],
        device=program.device,
        num_blocks=program.num_blocks,
        dense_layers=program.dense_layers,
    )
    with poisoned_pools():
        flow = built or load_flow(program.flow)
        arguments = options, KINDS[program.data](program.seed), backend
        if program.retention is not None:
            twin: Twin = EvictingTwin(flow, program.retention, *arguments)
        else:
            twin = Twin(flow, program.budget, *arguments)
        for event in program.events:
            run_event(twin, program, event)
        twin.finish(list(twin.requests))
        tables = twin.runtime.tables
        tables.prefixes.clear()
        expect(tables.block_allocator.used_blocks == 0, "life cycle", "pool", "blocks are held by nobody")
        expect(tables.row_allocator.used_blocks == 0, "life cycle", "pool", "state rows are held by nobody")
    return twin.numbers


def run_event(twin: Twin, program: Program, event: Event) -> None:
    """Apply one event; what a full pool or a flow's state refuses must leave everything as it was."""
    verb, *numbers = event
    a, b, c = (int(number) for number in numbers)
    alive = [request for request in twin.requests if request not in twin.out]
    try:
        _EVENTS[str(verb)](twin, program, alive, a, b, c)
    except OutOfPages as error:
        free = twin.runtime.tables.block_allocator.idle_blocks + twin.runtime.tables.prefixes.evictable
        expect(error.needed > free == error.free, "life cycle", "pool", f"refused {error.needed} of {free} free blocks")
        twin.check_storage()


def _admit(twin: Twin, program: Program, alive: list[RequestId], a: int, b: int, c: int) -> None:
    if len(twin.requests) < MAX_REQUESTS:
        twin.admit(a % 2 if b % 4 else None, 1 + c % 4)


def _extend(twin: Twin, program: Program, alive: list[RequestId], a: int, b: int, c: int) -> None:
    chosen = _some(alive, a)
    # Lengths around page boundaries, and now and then a call too long to be cropped into.
    sizes = (1, program.page_size, program.page_size + 1, 2, 7, 3 * program.page_size, 0, CROP_ROWS + 1)
    counts = [sizes[(b >> (3 * i)) % (8 if c % 11 == 0 else 7)] for i in range(len(chosen))]
    if sum(counts):
        twin.extend(chosen, counts)


def _step(twin: Twin, program: Program, alive: list[RequestId], a: int, b: int, c: int) -> None:
    chosen = _some([request for request in alive if twin.requests[request]], a)
    if chosen:
        twin.step(chosen)


def _fork(twin: Twin, program: Program, alive: list[RequestId], a: int, b: int, c: int) -> None:
    if alive and len(twin.requests) < MAX_REQUESTS:
        twin.fork(alive[a % len(alive)])


def _crop(twin: Twin, program: Program, alive: list[RequestId], a: int, b: int, c: int) -> None:
    if not alive:
        return
    request = alive[a % len(alive)]
    length = twin.requests[request]
    target = max(0, length - b % (1 + min(length, 2 * program.page_size + 2)))
    inexact, place = twin.runtime.tables.stateful and target < twin.crop_floor(request), f"request {request}"
    try:
        twin.crop([request], [target])
        expect(not inexact, "life cycle", place, f"a crop to {target} was granted, but its state cannot be exact")
    except NotCroppable:
        expect(inexact, "life cycle", place, f"an exact crop to {target} was refused")
        twin.check_storage()


def _reorder(twin: Twin, program: Program, alive: list[RequestId], a: int, b: int, c: int) -> None:
    chosen = _some(alive, a)
    if chosen:
        room = MAX_REQUESTS - len(twin.requests) + len(chosen)
        order = [(b >> (2 * i)) % len(chosen) for i in range(1 + c % min(4, room))]
        twin.reorder(chosen, order)


def _preempt(twin: Twin, program: Program, alive: list[RequestId], a: int, b: int, c: int) -> None:
    if alive:
        twin.preempt(alive[a % len(alive)])


def _resume(twin: Twin, program: Program, alive: list[RequestId], a: int, b: int, c: int) -> None:
    out = sorted(twin.out)
    if out:
        twin.resume(out[a % len(out)])


def _finish(twin: Twin, program: Program, alive: list[RequestId], a: int, b: int, c: int) -> None:
    everyone = list(twin.requests)
    if everyone:
        twin.finish([everyone[a % len(everyone)]])


def _abandon(twin: Twin, program: Program, alive: list[RequestId], a: int, b: int, c: int) -> None:
    if alive:
        twin.abandon(alive[a % len(alive)], 1 + b % (3 * program.page_size))


_EVENTS: dict[str, Callable[[Twin, Program, list[RequestId], int, int, int], None]] = {
    "admit": _admit,
    "extend": _extend,
    "step": _step,
    "fork": _fork,
    "crop": _crop,
    "reorder": _reorder,
    "preempt": _preempt,
    "resume": _resume,
    "finish": _finish,
    "abandon": _abandon,
}


def _some(requests: list[RequestId], mask: int) -> list[RequestId]:
    """A subset in an order that the number decides; all for a mask that names none."""
    chosen = [request for i, request in enumerate(requests) if mask >> i & 1] or list(requests)
    return chosen[::-1] if mask >> 15 & 1 else chosen


def fault_of(program: Program, backend: str | Backend = "eager") -> Exception | None:
    """What goes wrong in a programme: a fault, or any exception that a valid programme must not raise."""
    try:
        run_program(program, backend)
    except Exception as error:
        return error
    return None


def shrink(program: Program, fails: Callable[[Program], Exception | None]) -> Program:
    """A programme that fails in the same way, of which no event and no two events can go, with small numbers.

    Delta debugging (Zeller 2002). A number picks among what is alive, so an event may be needed only because another
    one picks a late place: smaller numbers let more events go.
    """
    wanted = _signature(fails(program))

    def same(candidate: Program) -> bool:
        return _signature(fails(candidate)) == wanted

    count = len(program.events) + 1
    while len(program.events) < count:
        count = len(program.events)
        program = _with_small_numbers(_with_fewer_events(program, same), same)
    return program


def _with_fewer_events(program: Program, same: Callable[[Program], bool]) -> Program:
    chunk = max(1, len(program.events) // 2)
    while chunk:
        start, smaller = 0, False
        while start < len(program.events):
            candidate = _without(program, range(start, start + chunk))
            if same(candidate):
                program, smaller = candidate, True
            else:
                start += chunk
        if not smaller or chunk > len(program.events):
            chunk //= 2
    for pair in combinations(range(len(program.events)), 2):
        if same(_without(program, pair)):
            return _with_fewer_events(_without(program, pair), same)
    return program


def _without(program: Program, places: Collection[int]) -> Program:
    return replace(program, events=tuple(event for i, event in enumerate(program.events) if i not in places))


def _with_small_numbers(program: Program, same: Callable[[Program], bool]) -> Program:
    for place, event in enumerate(program.events):
        for part in range(1, len(event)):
            for number in range(4):
                current = program.events[place]
                smaller = (*current[:part], number, *current[part + 1 :])
                events = (*program.events[:place], smaller, *program.events[place + 1 :])
                if smaller != current and same(replace(program, events=events)):
                    program = replace(program, events=events)
                    break
    return program


def _signature(error: Exception | None) -> tuple[str, str] | None:
    if error is None:
        return None
    return type(error).__name__, error.stage if isinstance(error, Fault) else ""


@dataclass(frozen=True)
class FuzzResult:
    """Programmes and events that ran, what was seen, and the minimal failing programme with its error."""

    programs: int
    events: int
    numbers: Numbers
    failing: Program | None = None
    error: Exception | None = None


def fuzz(
    programs: int,
    events: int = 50,
    seed: int = 0,
    flow: str | None = None,
    backend: str | Backend = "eager",
    progress: Callable[[], None] = lambda: None,
    *,
    dtype: str = "fp32",
    device: str = "cpu",
) -> FuzzResult:
    """Run random programmes; stop at the first fault and shrink it."""
    numbers, done = Numbers(), 0
    for index in range(programs):
        program = random_program(seed + index, flow, events, dtype=dtype, device=device)
        try:
            numbers.merge(run_program(program, backend))
        except Exception as error:
            minimal = shrink(program, lambda candidate: fault_of(candidate, backend))
            return FuzzResult(
                index + 1, done + len(program.events), numbers, minimal, fault_of(minimal, backend) or error
            )
        done += len(program.events)
        progress()
    return FuzzResult(programs, done, numbers)
