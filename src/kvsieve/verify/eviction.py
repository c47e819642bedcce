"""Checks of eviction: stage by stage, against Algorithm 1 token for token, and against what stays when all is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvsieve.flow import Flow
from kvsieve.flows.mass_alone import MassAlone, twin_budget
from kvsieve.paging.slots import POSITION
from kvsieve.reference import EvictingSegment
from kvsieve.retention import Evict
from kvsieve.runtime import RequestId, Runtime
from kvsieve.verify.checks import Fault, Numbers, expect
from kvsieve.verify.data import BrokenRequestData, Data, ExtremeData, IidData, LayerShape, PlantedData, TiedData
from kvsieve.verify.evicting import EvictingTwin
from kvsieve.verify.life_cycle import random_lives
from kvsieve.verify.poison import poisoned_pools
from kvsieve.verify.subject import Subject
from kvsieve.verify.trimming import check_order
from kvsieve.verify.twin import TwinOptions

STEPS = 2000
GROUPS = tuple(LayerShape(1, group, 8, 8) for group in (1, 3, 8))
NEAR = 2.0**-17
"""Masses that are closer than this, relatively, may be ranked either way: float32 and float64 differ by as much."""


def small(flow: Flow, spare: int = 14) -> Evict:
    """A retention in which much is evicted."""
    return Evict(2 + 4 + spare, 2, 4) if flow.mass else Evict(20, 2, 18)


def _stages(subject: Subject) -> Numbers:
    """Every stage on hard data: what goes, what is attended, the mass, K and V in their slots."""
    numbers, flow = Numbers(), subject.flow
    if not flow.evictable:
        return numbers
    kinds: Sequence[tuple[Data, dict[str, Any]]] = (
        (PlantedData(subject.seed), {}),
        (TiedData(subject.seed), {"softcap": 2.5}),
        (ExtremeData(subject.seed), {"sinks": True}),
        (BrokenRequestData(subject.seed, broken=1), {"scale": 0.4}),
    )
    for data, settings in kinds:
        options = TwinOptions(
            subject.page_size,
            (LayerShape(2, 3, 12, 8), LayerShape(1, 7, 20, 20)),
            dtype=subject.dtype,
            device=subject.device,
            **settings,
        )
        with poisoned_pools():
            twin = EvictingTwin(flow, small(flow), options, data, subject.backend)
            requests = [twin.admit() for _ in range(4)]
            twin.extend(requests, [1, 70, 20, 21])
            for _ in range(12):
                twin.step(requests)
            twin.extend(requests[1:], [5, 1, 30])
            for _ in range(4):
                twin.step(requests)
            twin.finish(requests)
        numbers.merge(twin.numbers)
    return numbers


def _lives(subject: Subject) -> Numbers:
    """Random programmes in a tiny pool."""
    return random_lives(subject, 3, evicting=True) if subject.flow.evictable else Numbers()


def _second_turns(subject: Subject) -> Numbers:
    """A second turn in chunks after preemption, and forks that need blocks while a prompt beside them is trimmed."""
    flow, shape = subject.flow, LayerShape(2, 3, 12, 8)
    if not flow.evictable:
        return Numbers()
    options = TwinOptions(subject.page_size, (shape, shape), dtype=subject.dtype, device=subject.device)
    with poisoned_pools():
        twin = EvictingTwin(flow, small(flow), options, IidData(subject.seed), subject.backend)
        long, short = twin.admit(), twin.admit()
        twin.extend([long, short], [30 + 5 * subject.page_size, 19])
        for _ in range(8):  # a page more than it stores, when it is preempted
            twin.step([short])
        fork = twin.fork(short)
        twin.step([long, fork, short])
        twin.preempt(short)
        twin.step([long])
        twin.resume(short)
        twin.extend([short, long], [3, 70])
        twin.crop([short], [28])
        twin.extend([long, short], [2, 4])
        twin.step([short, long, fork])
        twin.finish([long, short, fork])
    return twin.numbers


def _algorithm(subject: Subject) -> Numbers:
    """The tokens that are left, over 2,000 steps: those of Algorithm 1 in float64."""
    numbers = Numbers()
    if subject.flow.evictable:
        mass = subject.flow.mass
        for flow in [subject.flow, *([with_decay(subject.flow, 1.0)] if mass and mass.decay is None else [])]:
            Simulation(subject, flow, GROUPS).run(numbers, STEPS)
    return numbers


def with_decay(flow: Flow, decay: float) -> Flow:
    """The flow with another decay of its attention mass."""
    assert flow.mass is not None
    twin = copy.copy(flow)
    twin.mass = replace(flow.mass, decay=decay)
    return twin


class Simulation:
    """A runtime that evicts and, beside it, Algorithm 1: each goes its own way, from the first token to the last."""

    def __init__(self, subject: Subject, flow: Flow, shapes: Sequence[LayerShape]) -> None:
        self.subject, self.shapes, self.retention = subject, shapes, small(flow)
        self.flow, self.data = flow, PlantedData(subject.seed)
        self.runtime = Runtime(flow, page_size=5, backend=subject.backend, retention=self.retention)
        self.segments: dict[tuple[RequestId, int, int], EvictingSegment] = {}
        self.lengths: dict[RequestId, int] = {}

    def run(self, numbers: Numbers, steps: int) -> None:
        """Ragged prompts in chunks, a fork, a second turn that is cropped, and many steps."""
        first, second = self._admit(), self._admit()
        self.extend([first, second], [20, 9])
        self.extend([first], [31])
        for step in range(steps):
            if step == steps // 10:
                third = self._fork(first)
            if step == steps // 5:
                self.extend([second], [12])
                self._crop(second, 5)
                self._finish(third)
            requests = [first, second, third] if steps // 10 <= step < steps // 5 else [first, second]
            self.step(numbers, requests)
        for request in [first, second]:
            self._finish(request)

    def extend(self, requests: Sequence[RequestId], counts: Sequence[int]) -> None:
        """Prompt tokens on both sides."""
        self._call(requests, counts, decode=False)

    def step(self, numbers: Numbers, requests: Sequence[RequestId]) -> None:
        """A decode step on both sides; the same tokens are left."""
        self._call(requests, [1] * len(requests), decode=True)
        for (request, layer, head), segment in self.segments.items():
            if request in requests:
                self._agree(numbers, request, layer, head, segment)

    def stored(self, request: RequestId, layer: int, head: int) -> list[int]:
        """Positions of the tokens that the runtime holds."""
        entry = self.runtime.tables[request]
        field = self.runtime.layers[layer].pool.state[POSITION]
        return sorted(field[head, entry.rows].flatten()[: entry.stored].tolist())

    def _agree(self, numbers: Numbers, request: RequestId, layer: int, head: int, segment: EvictingSegment) -> None:
        stored, alive = self.stored(request, layer, head), segment.alive
        numbers.selections, numbers.agreed = numbers.selections + 1, numbers.agreed + (stored == alive)
        numbers.note("selection", 0.0)
        if stored == alive:
            return
        ours, theirs = sorted(set(stored) - set(alive)), sorted(set(alive) - set(stored))
        masses = [[segment.mass[token] for token in tokens] for tokens in (ours, theirs)]
        place = f"layer {layer} request {request} KV head {head}"
        if len(ours) != 1 or len(theirs) != 1 or abs(masses[0][0] - masses[1][0]) > NEAR * masses[1][0]:
            raise Fault(
                "selection",
                place,
                f"at length {len(segment.k)} tokens {ours} of mass {masses[0]} are left, by Algorithm 1 {theirs} of "
                f"mass {masses[1]}",
            )
        segment.alive = stored

    def _call(self, requests: Sequence[RequestId], counts: Sequence[int], decode: bool) -> None:
        call = self.runtime.step(requests) if decode else self.runtime.extend(requests, counts)
        for layer, shape in enumerate(self.shapes):
            draws = [
                self.data.tokens(shape, layer, one, self.lengths[one], count, (0, 0))
                for one, count in zip(requests, counts, strict=True)
            ]
            q, k, v = (torch.cat(part) for part in zip(*draws, strict=True))
            call.attend(layer, *(x.to(self.subject.device) for x in (q, k, v)))
            for one, draw in zip(requests, draws, strict=True):
                self._follow(one, layer, shape, *draw, decode=decode)
        for one, count in zip(requests, counts, strict=True):
            self.lengths[one] += count

    def _follow(
        self,
        request: RequestId,
        layer: int,
        shape: LayerShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decode: bool,
    ) -> None:
        for head in range(shape.heads):
            segment, mine = self.segments[request, layer, head], slice(head * shape.group, (head + 1) * shape.group)
            if decode:
                segment.step(q[0, mine], k[0, head], v[0, head])
            else:
                segment.extend(q[:, mine], k[:, head], v[:, head])

    def _admit(self) -> RequestId:
        request = self.runtime.admit()
        self.lengths[request] = 0
        for layer, shape in enumerate(self.shapes):
            for head in range(shape.heads):
                self.segments[request, layer, head] = EvictingSegment(self.flow, self.retention)
        return request

    def _fork(self, source: RequestId) -> RequestId:
        twin = self.runtime.fork(source)
        self.lengths[twin] = self.lengths[source]
        for (request, layer, head), segment in list(self.segments.items()):
            if request == source:
                self.segments[twin, layer, head] = copy.deepcopy(segment)
        return twin

    def _crop(self, request: RequestId, count: int) -> None:
        self.lengths[request] -= count
        self.runtime.crop([request], [self.lengths[request]])
        for (one, _, _), segment in self.segments.items():
            if one == request:
                segment.crop(self.lengths[request])

    def _finish(self, request: RequestId) -> None:
        self.runtime.finish([request])
        self.segments = {key: segment for key, segment in self.segments.items() if key[0] != request}


def _kept_twin(subject: Subject) -> Numbers:
    """With everything kept, ranking tokens by mass alone attends what eviction leaves: the same, step by step."""
    numbers, flow, shape = Numbers(), subject.flow, LayerShape(2, 3, 12, 8)
    if not flow.evictable or flow.mass is None:
        return numbers
    some = small(flow)
    kept = Runtime(MassAlone(flow.mass), twin_budget(some), backend=subject.backend)
    evicting = Runtime(flow, page_size=3, backend=subject.backend, retention=some)
    pairs = [(kept.admit(), evicting.admit()) for _ in range(2)]
    data = IidData(subject.seed, q_scale=1.5)
    lengths = [33, 8]
    for step in range(151):
        counts = lengths if step == 0 else [1, 1]
        starts = [0, 0] if step == 0 else [length + step - 1 for length in lengths]
        draws = [data.tokens(shape, 0, i, starts[i], counts[i], (0, 0)) for i in range(2)]
        q, k, v = (torch.cat(part).to(subject.device, subject.dtype) for part in zip(*draws, strict=True))
        results = []
        for runtime, requests in zip((kept, evicting), zip(*pairs, strict=True), strict=True):
            call = runtime.extend(list(requests), counts) if step == 0 else runtime.step(list(requests))
            results.append(call.attend(0, q, k, v))
        if step:
            _same_tokens(numbers, results[0].selection, evicting, [pair[1] for pair in pairs], step)
    return numbers


def _same_tokens(numbers: Numbers, selection: Any, evicting: Runtime, requests: Sequence[RequestId], step: int) -> None:
    pool = evicting.layers[0].pool
    for i, request in enumerate(requests):
        entry = evicting.tables[request]
        for head in range(pool.num_kv_heads):
            attended = selection.pages[i, head, : int(selection.count[i])].tolist()
            left = sorted(pool.state[POSITION][head, entry.rows].flatten()[: entry.stored].tolist())
            place = f"request {request} KV head {head}"
            expect(attended == left, "selection", place, f"step {step}: {left} are left, {attended} would be attended")
            numbers.note("selection", 0.0)


EVICTION: tuple[tuple[str, str, Callable[[Subject], Numbers]], ...] = (
    ("eviction order", "eviction alone: NaN, infinities, ties, masses of neighbouring bits, every slot", check_order),
    ("eviction", "which tokens go, what is attended, the mass, K and V in their slots", _stages),
    ("evicting lives", "random programmes in a tiny pool, tokens evicted", _lives),
    ("second turns", "turns after preemption, forks beside a prompt that is trimmed", _second_turns),
    ("kept twin", "eviction leaves what mass alone would attend if everything stayed", _kept_twin),
    ("algorithm 1", f"the tokens left over {STEPS:,} steps, against a simulation in float64", _algorithm),
)
