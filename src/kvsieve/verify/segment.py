"""One (layer, request, KV head) under test: the reference's trajectory, and what the runtime must hold."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvsieve.graph import FlowGraphs
from kvsieve.reference import ReferenceSegment, ReferenceStep, select
from kvsieve.verify.checks import (
    Numbers,
    boundary_ulp,
    compare,
    expect,
    gather_fields,
    storage_bound,
    unchanged,
)
from kvsieve.verify.mass import MassTwin
from kvsieve.verify.rounding import F64, attention_spread, graph_spread, unit_roundoff


@dataclass(frozen=True)
class StepResult:
    """What the runtime returned for this segment: out [G, Dv], lse [G], its page list, scores [W] or None."""

    out: torch.Tensor
    lse: torch.Tensor
    selection: list[int]
    scores: torch.Tensor | None


class SegmentTwin:
    """Checks one segment stage by stage.

    Each stage is judged on what the runtime itself put into it (stored K, V, summaries, the state before the step), so
    that its bound is its own rounding only; ``reference`` goes its own way in float64, for drift and agreement.
    ``state`` is what the pool must hold, page by page, bit for bit: the initial value, or what a checked step wrote;
    ``summaries`` likewise, for the full pages whose summary was checked. ``tensor_cores``: products of scores may run
    there.
    """

    def __init__(
        self,
        reference: ReferenceSegment,
        graphs: FlowGraphs | None,
        dtype: torch.dtype,
        place: str,
        tensor_cores: bool = False,
    ) -> None:
        self.reference, self.graphs, self.dtype, self.place = reference, graphs, dtype, place
        self.tensor_cores = tensor_cores
        self.state: list[dict[str, torch.Tensor]] = []
        self.summaries: dict[int, dict[str, torch.Tensor]] = {}
        mass = graphs.flow.mass if graphs else None
        self.mass = None if mass is None else MassTwin(mass, reference)
        self.sharp = True  # derive bounds from the data, or keep to a flat relative one

    def fork(self, place: str) -> SegmentTwin:
        """A copy with a future of its own."""
        twin = self._anew(copy.copy(self.reference), place)
        for name in ("k", "v", "summaries", "mass"):
            setattr(twin.reference, name, list(getattr(self.reference, name)))
        twin.reference.state = [dict(row) for row in self.reference.state]
        twin.state = [dict(row) for row in self.state]
        twin.summaries = dict(self.summaries)
        twin.mass = self.mass and self.mass.fork(twin.reference)
        return twin

    def _anew(self, reference: Any, place: str) -> SegmentTwin:
        return SegmentTwin(reference, self.graphs, self.dtype, place, self.tensor_cores)

    def crop(self, length: int) -> None:
        self.reference.crop(length)
        if self.mass:
            self.mass.crop(length)
        del self.state[-(-length // self.reference.page_size) :]
        full = length // self.reference.page_size
        self.summaries = {page: row for page, row in self.summaries.items() if page < full}

    def write(self, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor | None = None) -> None:
        """Tokens k [n, D], v [n, Dv] that are stored; as a prompt, with queries q [n, G, D], or as a known prefix."""
        if self.mass:
            if q is not None:
                self.mass.sharp = self.sharp
                self.mass.begin(decode=False)
            self.mass.write(len(k))
        for key, value in zip(k.to(F64), v.to(F64), strict=True):
            self.reference.write(key, value)
            self._enter()
        if self.mass and q is not None:
            self.mass.prompt(q)

    def check_prefill(self, numbers: Numbers, q: torch.Tensor, out: torch.Tensor) -> None:
        """The newest n tokens' outputs: q [n, G, D], received out [n, G, Dv]."""
        if not self._finite():
            return
        length, tokens = len(self.reference.k), self.reference.visible(len(self.reference.k) - 1)
        keys, values = torch.stack(self.reference.k)[tokens], torch.stack(self.reference.v)[tokens]
        rows = torch.arange(length - len(q), length)
        # A dense library kernel of a 16-bit dtype rounds probabilities and partial results to it.
        u = unit_roundoff(self.dtype) * (1.0 if self.dtype is torch.float32 else 1.5)
        exact, bound = self._attention(q, keys, values, torch.tensor(tokens) <= rows[:, None], u)
        # Such a kernel rounds probabilities to the dtype's grid, whose spacing near 0 is absolute.
        grid = torch.finfo(self.dtype).smallest_normal * torch.finfo(self.dtype).eps
        limit = bound["out"] + unit_roundoff(self.dtype) * exact["out"].abs() + grid * (1 + values.abs().sum(0))
        place = f"{self.place} prefill from {length - len(q)}"
        compare(numbers, "output", place, out, exact["out"], limit)

    def step(
        self,
        numbers: Numbers,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        summaries: list[Mapping[str, torch.Tensor]],
        state: list[Mapping[str, torch.Tensor]],
        result: StepResult,
    ) -> None:
        """A decode step: q [G, D], k [D], v [Dv]; stored ``summaries`` and ``state`` per page after it."""
        reference = self.reference
        if self.mass:
            self.mass.sharp = self.sharp
            self.mass.begin(decode=True)
            self.mass.write(1)
            reference.mass = self.mass.own[:-1].tolist()
        expected = reference.step(q, k, v)
        self._enter()
        pages = len(reference.state)
        budget = reference.budget
        kept, sink = budget.kept(pages), budget.sink
        window = range(sink, pages - budget.recent)
        graphs = self.graphs
        scored = bool(graphs and graphs.score and len(window) and (pages > kept or graphs.state_writes))
        expect((result.scores is not None) == scored, "score", self.place, f"scored: {not scored}, expected {scored}")
        if scored:
            assert result.scores is not None
            self._check_scores(numbers, q, window, summaries, state, result.scores)
        wanted = select(result.scores, pages, budget)
        expect(
            result.selection == wanted,
            "selection",
            self.place,
            f"pages {result.selection}, expected {wanted} by the scores that were computed",
        )
        numbers.note("selection", 0.0)
        self._note_agreement(numbers, result, expected, kept - sink - budget.recent if pages > kept else 0)
        tokens = reference.tokens(result.selection)
        self._check_attention(numbers, q, result, tokens)
        if self.mass:
            self.mass.step(q, tokens, result.selection == expected.selection)

    def check_state(self, numbers: Numbers, state: list[Mapping[str, torch.Tensor]]) -> None:
        """The pool holds the state that it must, bit for bit."""
        if self.graphs is None or not self.graphs.user_state_fields:
            return
        expect(len(state) == len(self.state), "state", self.place, f"{len(state)} pages, expected {len(self.state)}")
        for page, (stored, wanted) in enumerate(zip(state, self.state, strict=True)):
            for name, value in wanted.items():
                unchanged("state", f"{self.place} page {page}", name, stored[name], value)
        numbers.note("storage", 0.0)

    def check_summary(self, numbers: Numbers, page: int, stored: Mapping[str, torch.Tensor]) -> None:
        """A full page's summary against float64."""
        if self.graphs is None or self.graphs.summarize is None:
            return
        tokens = slice(page * self.reference.page_size, (page + 1) * self.reference.page_size)
        inputs = {"k": torch.stack(self.reference.k[tokens]), "v": torch.stack(self.reference.v[tokens])}
        exact, bound = graph_spread(self.graphs.summarize, inputs, sharp=self.sharp)
        for name, value in exact.items():
            limit = storage_bound(bound[name], value, stored[name].dtype)
            compare(numbers, "summary", f"{self.place} page {page} {name}", stored[name], value, limit)
        self.summaries[page] = {name: value.clone() for name, value in stored.items()}

    def check_summaries(self, stored: list[Mapping[str, torch.Tensor]]) -> None:
        """The summaries of full pages stay as they were when they were checked, bit for bit."""
        for page, fields in self.summaries.items():
            for name, value in fields.items():
                unchanged("summary", f"{self.place} page {page}", name, stored[page][name], value)

    def _check_scores(
        self,
        numbers: Numbers,
        q: torch.Tensor,
        window: range,
        summaries: list[Mapping[str, torch.Tensor]],
        state: list[Mapping[str, torch.Tensor]],
        scores: torch.Tensor,
    ) -> None:
        reference, p = self.reference, self.reference.page_size
        assert self.graphs is not None and self.graphs.score is not None
        tokens = slice(window.start * p, window.stop * p)
        inputs = {
            "q": q.to(F64),
            "k": torch.stack(reference.k[tokens]).unflatten(0, (-1, p)),
            "v": torch.stack(reference.v[tokens]).unflatten(0, (-1, p)),
            "position": torch.tensor([page * p for page in window], dtype=F64),
            "age": torch.tensor([len(reference.k) - (page + 1) * p for page in window], dtype=F64),
            **gather_fields([summaries[page] for page in window]),
            **gather_fields([self.state[page] for page in window]),
        }
        deviations: dict[str, torch.Tensor] = {}
        if self.mass:
            masses, deviations = self.mass.inputs(window)
            inputs |= masses
            if not self._finite():
                return  # of such a request the mass, too, means nothing
        exact, bound = graph_spread(
            self.graphs.score, inputs, sharp=self.sharp, deviations=deviations, tensor_cores=self.tensor_cores
        )
        compare(numbers, "score", self.place, scores, exact["scores"], bound["scores"])
        for name in self.graphs.state_writes:
            for place, page in enumerate(window):
                stored, value = state[page][name], exact[name][place]
                limit = storage_bound(bound[name][place], value, stored.dtype)
                compare(numbers, "state", f"{self.place} page {page} {name}", stored, value, limit)
                self.state[page][name] = stored.clone()
            numbers.drift = max(numbers.drift, self._drift(state, reference, name, window))

    @staticmethod
    def _drift(
        state: Sequence[Mapping[str, torch.Tensor]], reference: ReferenceSegment, name: str, window: range
    ) -> float:
        """Largest distance of a stored field from the reference's own, of the field's largest value in the window.

        A page's own value is no measure: where terms cancel it is zero but for rounding.
        """
        if not window:
            return 0.0
        stored, own = (torch.stack([one[page][name].to(F64) for page in window]) for one in (state, reference.state))
        distance = float((stored - own).abs().max() / own.abs().max().clamp(min=1e-30))
        return distance if distance == distance else 0.0

    def _note_agreement(self, numbers: Numbers, result: StepResult, expected: ReferenceStep, topk: int) -> None:
        numbers.selections += 1
        numbers.agreed += result.selection == expected.selection
        if expected.scores is not None:
            numbers.boundary = min(numbers.boundary, boundary_ulp(expected.scores, topk))

    def _check_attention(self, numbers: Numbers, q: torch.Tensor, result: StepResult, tokens: list[int]) -> None:
        if not self._finite():
            return
        k = torch.stack([self.reference.k[t] for t in tokens])
        v = torch.stack([self.reference.v[t] for t in tokens])
        exact, bound = self._attention(q[None], k, v, torch.ones(1, len(tokens), dtype=torch.bool), 2.0**-24)
        compare(numbers, "lse", self.place, result.lse, exact["lse"][0], bound["lse"][0])
        limit = storage_bound(bound["out"], exact["out"], result.out.dtype)
        compare(numbers, "output", self.place, result.out, exact["out"][0], limit[0])

    def _finite(self) -> bool:
        """NaN and infinities in K make any attention meaningless: only other requests are judged then."""
        return bool(torch.isfinite(torch.stack(self.reference.k)).all())

    def _attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, u: float
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        reference = self.reference
        scale = reference.attention_scale(q.shape[-1])
        return attention_spread(q.to(F64), k, v, mask, scale, reference.softcap, reference.sinks, u, self.sharp)

    def _enter(self) -> None:
        """The state of a page that entered with the newest token."""
        while len(self.state) < len(self.reference.state):
            fields = self.graphs.user_state_fields if self.graphs else {}
            self.state.append({name: spec.initial.clone() for name, spec in fields.items() if spec.initial is not None})
