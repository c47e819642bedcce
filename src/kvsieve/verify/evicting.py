"""The real stack and the reference side by side where tokens are evicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvsieve.backends import Backend
from kvsieve.budget import Budget
from kvsieve.call import Attended
from kvsieve.flow import Flow
from kvsieve.graph import FlowGraphs
from kvsieve.paging.slots import POSITION
from kvsieve.reference import EvictingSegment
from kvsieve.retention import Evict
from kvsieve.runtime import RequestId, Runtime
from kvsieve.verify.checks import Numbers, expect
from kvsieve.verify.data import Draw
from kvsieve.verify.mass import MassTwin
from kvsieve.verify.rounding import F64
from kvsieve.verify.segment import SegmentTwin, StepResult
from kvsieve.verify.twin import Twin


class EvictingTwin(Twin):
    """A runtime that evicts tokens, each of whose results is checked against float64.

    Args:
        flow: says which attention mass decides. retention: how many tokens stay.
        arguments: those of :class:`Twin`.
    """

    def __init__(self, flow: Flow, retention: Evict, *arguments: Any, **options: Any) -> None:
        self.retention = retention
        super().__init__(flow, Budget(0), *arguments, **options)

    def _build(self, backend: str | Backend) -> Runtime:
        options = self.options
        return Runtime(
            self.flow,
            page_size=options.page_size,
            num_blocks=options.num_blocks,
            backend=backend,
            retention=self.retention,
        )

    def _trace(self, layer: int) -> FlowGraphs | None:
        return None

    def _new_segment(self, layer: int, request: RequestId, head: int) -> SegmentTwin:
        shape, sinks = self.options.shapes[layer], self._sinks(layer)
        reference = EvictingSegment(
            self.flow,
            self.retention,
            scale=self.options.scale,
            softcap=self.options.softcap,
            sinks=None if sinks is None else sinks[head * shape.group : (head + 1) * shape.group],
        )
        return EvictingSegmentTwin(reference, self.options.dtype, f"layer {layer} request {request} KV head {head}")

    def _prepare_write(self, layer: int, request: RequestId, head: int, start: int) -> None:
        segment = self._segment(layer, request, head)
        stored = sorted(self._positions(layer, request, head).tolist())
        segment.prompt(self.numbers, [token for token in stored if token < start])

    def _check_segment(self, layer: int, request: RequestId, head: int, segment: SegmentTwin) -> None:
        assert isinstance(segment, EvictingSegmentTwin)
        reference = segment.reference
        if layer not in self.runtime.layers or not reference.k:
            return
        entry, pool = self.runtime.tables[request], self.runtime.layers[layer].pool
        positions = self._positions(layer, request, head)
        expect(sorted(positions.tolist()) == reference.alive, "storage", segment.place, "other tokens are stored")
        for name, field, wanted in (("k", pool.k, reference.k), ("v", pool.v, reference.v)):
            stored = field[head, entry.blocks].flatten(0, 1)[: entry.stored].to("cpu", F64)
            exact = torch.stack(wanted)[positions]
            same = torch.equal(torch.nan_to_num(stored, nan=7.0), torch.nan_to_num(exact, nan=7.0))
            expect(same, "storage", segment.place, f"{name} is not what was written")
        if segment.mass:
            segment.mass.unchanged(segment.place, self._mass_by_position(layer, request, head))

    def _check_step(self, layer: int, requests: Sequence[RequestId], draw: Draw, result: Attended) -> None:
        q, k, v = draw
        assert result.selection is not None and result.lse is not None
        expect(result.scores is None, "score", f"layer {layer}", "scored, where mass alone decides")
        group = self.options.shapes[layer].group
        for i, request in enumerate(requests):
            pages = list(range(len(self.runtime.tables[request].blocks)))
            for head in range(k.shape[1]):
                segment = self._segment(layer, request, head)
                listed = result.selection.pages[i, head, : int(result.selection.count[i])].tolist()
                expect(listed == pages, "selection", segment.place, f"pages {listed}, expected {pages}")
                mine = slice(head * group, (head + 1) * group)
                tokens = sorted(self._positions(layer, request, head).tolist())
                received = StepResult(result.out[i, mine].cpu(), result.lse[i, head].cpu(), tokens, None)
                segment.sharp = self._judge.random() < self._judged
                segment.decode(self.numbers, q[i, mine], k[i, head], v[i, head], received)
                self._check_mass(layer, request, head)

    def _check_mass(self, layer: int, request: RequestId, head: int) -> None:
        segment, entry = self._segment(layer, request, head), self.runtime.tables[request]
        if segment.mass:
            stored = self._mass_by_position(layer, request, head)
            segment.mass.check(self.numbers, segment.place, stored, segment.mass.mass.factor**entry.mass.age)

    def _check_new_summaries(self, requests: Sequence[RequestId], starts: Sequence[int]) -> None:
        """There are none."""

    def _segment(self, layer: int, request: RequestId, head: int) -> EvictingSegmentTwin:
        segment = self._segments[layer, request, head]
        assert isinstance(segment, EvictingSegmentTwin)
        return segment

    def _positions(self, layer: int, request: RequestId, head: int) -> torch.Tensor:
        entry = self.runtime.tables[request]
        field = self.runtime.layers[layer].pool.state[POSITION]
        return field[head, entry.rows].flatten()[: entry.stored].cpu()

    def _mass_by_position(self, layer: int, request: RequestId, head: int) -> dict[str, torch.Tensor]:
        """The stored mass, as if every token of the request lay in its place; 0 for those that are gone."""
        entry, p = self.runtime.tables[request], self._segment(layer, request, head).reference.page_size
        stored = self.runtime.layers[layer].pool.state["mass"][head, entry.rows].flatten()[: entry.stored].cpu()
        mass = torch.zeros(-(-entry.length // p) * p, dtype=torch.float32)
        mass[self._positions(layer, request, head)] = stored
        pages = mass.unflatten(0, (-1, p))
        return {"mass": pages, "mass_sum": pages.sum(1)}


class EvictingSegmentTwin(SegmentTwin):
    """Checks one segment stage by stage, the choice of what is evicted included.

    ``reference.alive`` is what the runtime holds: what it evicts is judged by the mass that it had stored.
    """

    reference: EvictingSegment

    def __init__(self, reference: EvictingSegment, dtype: torch.dtype, place: str) -> None:
        super().__init__(reference, None, dtype, place)
        self.mass = None if reference.accumulates is None else MassTwin(reference.accumulates, reference)

    def _anew(self, reference: EvictingSegment, place: str) -> SegmentTwin:
        return EvictingSegmentTwin(reference, self.dtype, place)

    def fork(self, place: str) -> SegmentTwin:
        twin = super().fork(place)
        assert isinstance(twin, EvictingSegmentTwin)
        twin.reference.alive = list(self.reference.alive)
        return twin

    def prompt(self, numbers: Numbers, kept: list[int]) -> None:
        """A call of several tokens comes, which found the tokens ``kept``."""
        if self.reference.stepped:
            self._check_choice(numbers, kept)
        self.reference.stepped = False
        expect(kept == self.reference.alive, "storage", self.place, f"tokens {kept}, expected {self.reference.alive}")

    def decode(self, numbers: Numbers, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, result: StepResult) -> None:
        """A decode step: q [G, D], k [D], v [Dv]; ``result.selection`` lists the tokens that were attended."""
        reference = self.reference
        if self.mass:
            self.mass.sharp = self.sharp
            self.mass.begin(decode=True)
            reference.mass = self.mass.own.tolist()
        before = list(reference.alive)
        reference.evict()
        wanted = reference.alive
        reference.alive = before
        self._check_choice(numbers, result.selection[:-1])
        agreed = wanted == reference.alive
        numbers.selections, numbers.agreed = numbers.selections + 1, numbers.agreed + agreed
        if self.mass:
            reference.mass = self.mass.own.tolist()
            self.mass.write(1)
        reference.step(q, k, v)
        self._enter()
        expect(result.selection == reference.alive, "selection", self.place, "the newest token is not attended")
        self._check_attention(numbers, q, result, result.selection)
        if self.mass:
            self.mass.step(q, result.selection, agreed)

    def _check_choice(self, numbers: Numbers, kept: list[int]) -> None:
        """Of the tokens that are there, those of least mass have gone that are neither sink nor recent."""
        reference, retention = self.reference, self.reference.retention
        length, alive = len(reference.k), reference.alive
        gone = sorted(set(alive) - set(kept))
        count = max(0, len(alive) - retention.capacity)
        expect(
            len(gone) == count and len(kept) == len(alive) - count and set(kept) <= set(alive),
            "selection",
            self.place,
            f"{len(gone)} of {len(alive)} tokens are evicted, expected {count}",
        )
        free = [token for token in kept if retention.sink <= token < length - retention.recent]
        guarded = [token for token in gone if not retention.sink <= token < length - retention.recent]
        expect(not guarded, "selection", self.place, f"tokens {guarded} are evicted: sinks, or recent")
        if self.mass:
            self._check_order(gone, free)
            self.mass.lose(gone)
        else:
            expect(not free, "selection", self.place, f"tokens {free} stay: neither sink nor recent")
        reference.alive = list(kept)
        numbers.note("selection", 0.0)

    def _check_order(self, gone: list[int], free: list[int]) -> None:
        assert self.mass is not None
        if not gone or not free:
            return
        values, bound = self.mass.values.nan_to_num(nan=-1.0), self.mass.bound  # NaN is less than any mass
        exact = float(bound[gone].max() + bound[free].max()) == 0.0  # the stored masses themselves
        if not exact and not self._finite():
            return
        heaviest = max(gone, key=lambda t: (float(values[t] - bound[t]), -t))
        lightest = min(free, key=lambda t: (float(values[t] + bound[t]), -t))
        right = float(values[heaviest] - values[lightest]) <= float(bound[heaviest] + bound[lightest])
        if exact:  # ties count
            right = (float(values[heaviest]), -heaviest) < (float(values[lightest]), -lightest)
        expect(
            right,
            "selection",
            self.place,
            f"token {heaviest} of mass {float(self.mass.values[heaviest]):.9g} is evicted, token {lightest} of mass "
            f"{float(self.mass.values[lightest]):.9g} stays",
        )
