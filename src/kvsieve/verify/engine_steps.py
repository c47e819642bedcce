"""Decode steps recorded from a serving engine, held against the float64 reference as they happen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from kvsieve.backends.base import Selection
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import Quota
from kvsieve.reference import ReferenceSegment
from kvsieve.verify.checks import Numbers, unchanged
from kvsieve.verify.segment import SegmentTwin, StepResult
from kvsieve.verify.stored import flow_state, page_by_page, stored_mass


class KnownRequest:
    """A request of one layer: what its pages held after its newest step, and its twin per KV head."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, twins: Sequence[SegmentTwin]) -> None:
        self.k, self.v, self.twins = k, v, twins


class StepOracle:
    """Checks every decode step of some layers: scores, state, selection, lse, output, summaries and what is stored.

    An engine's metadata names no requests; here one is known by the keys and values that it has stored, so that the
    check knows nothing of blocks. Requests that run concurrently must differ in their tokens. Where an engine computes
    a preempted request anew, its keys of generated tokens change, and it counts as a new one, as it should.

    Args:
        layers: whose steps are checked.
        summary_pages: so many full pages of a new request, the last ones, have their summaries checked.
    """

    def __init__(self, layers: Collection[int], summary_pages: int = 3) -> None:
        self.layers, self.summary_pages = frozenset(layers), summary_pages
        self.numbers = Numbers()
        self.steps = self.requests = 0
        self._known: dict[int, list[KnownRequest]] = {layer: [] for layer in layers}

    def step(
        self,
        impl: Any,
        pool: LayerPool,
        rows: Any,
        quota: Quota,
        q: torch.Tensor,
        scores: torch.Tensor | None,
        selection: Selection,
        out: torch.Tensor,
        lse: torch.Tensor,
        mass_scales: Sequence[float] | None,
    ) -> None:
        """A layer's decode step: q, out [R, H, G, D], lse [R, H, G], scores [Rs, H, W].

        ``mass_scales`` [R]: what stored mass is multiplied by after it, if there is mass.

        Raises:
            Fault: something is wrong beyond rounding.
        """
        if impl.index not in self.layers:
            return
        scored = {}
        if quota.window is not None:  # a window of fixed size lists rows that are not scored, of no pages
            listed = zip(quota.window.requests.tolist(), quota.window.widths.tolist(), strict=True)
            scored = {row: place for place, (row, width) in enumerate(listed) if width}
        known, after = self._known[impl.index], []
        for row, length in enumerate(rows.lengths.tolist()):
            if not length:  # padding
                continue
            pages = rows.table[row, : -(-length // pool.page_size)]
            k, v = (field[:, pages].flatten(1, 2)[:, :length].clone() for field in (pool.k, pool.v))
            request = self._find(known, k) or self._new(impl, pool, pages, k, v)
            unchanged("storage", f"layer {impl.index} row {row}", "v", v[:, :-1], request.v)
            request.k, request.v = k, v
            states = None if rows.state is None else rows.state[row] + torch.arange(len(pages))
            width = len(pages) - quota.sink - quota.recent
            for head, twin in enumerate(request.twins):
                found = None if scores is None or row not in scored else scores[scored[row], head, :width]
                chosen = selection.pages[row, head, : int(selection.count[row])].tolist()
                twin.step(
                    self.numbers,
                    q[row, head],
                    k[head, -1],
                    v[head, -1],
                    page_by_page(pool.summaries, head, pages[: length // pool.page_size]),
                    _state(pool, head, states),
                    StepResult(out[row, head], lse[row, head], chosen, found),
                )
                self._check_storage(pool, twin, head, pages, states)
                if twin.mass and mass_scales is not None and states is not None:
                    stored = stored_mass(pool, head, states)
                    twin.mass.check(self.numbers, twin.place, stored, mass_scales[row])
            after.append(request)
            self.steps += 1
        self._known[impl.index] = known + after

    def prompt(self, impl: Any, pool: LayerPool, pages: torch.Tensor, length: int, q: torch.Tensor) -> None:
        """Prompt queries [n, H, G, D] of one request, the last of its ``length`` tokens, which lie in ``pages``."""
        if impl.index not in self.layers:
            return
        known = self._known[impl.index]
        k, v = (field[:, pages].flatten(1, 2)[:, :length].clone() for field in (pool.k, pool.v))
        past = length - len(q)
        request = None if not past else self._find(known, k, len(q))
        if request is None:
            request = self._new(impl, pool, pages, k[:, : past + 1], v[:, : past + 1])
        for head, twin in enumerate(request.twins):
            twin.write(k[head, past:], v[head, past:], q[:, head])
        request.k, request.v = k, v
        known.append(request)

    def _find(self, known: list[KnownRequest], k: torch.Tensor, new: int = 1) -> KnownRequest | None:
        """The request that holds all tokens but the newest ones; it is taken from the list."""
        for place, request in enumerate(known):
            if request.k.shape[1] == k.shape[1] - new and torch.equal(request.k, k[:, :-new]):
                return known.pop(place)
        return None

    def _new(self, impl: Any, pool: LayerPool, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> KnownRequest:
        self.requests += 1
        twins = []
        for head in range(pool.num_kv_heads):
            sinks = None if impl.sinks is None else impl.sinks.reshape(pool.num_kv_heads, -1)[head]
            reference = ReferenceSegment(
                impl.graphs.flow,
                impl.budget,
                pool.page_size,
                scale=impl.scale,
                softcap=impl.logits_soft_cap or None,
                sinks=sinks,
                layer=impl.index,
            )
            place = f"layer {impl.index} request {self.requests} KV head {head}"
            twin = SegmentTwin(reference, impl.graphs, pool.dtype, place)
            twin.write(k[head, :-1], v[head, :-1])
            full = (k.shape[1] - 1) // pool.page_size
            stored = page_by_page(pool.summaries, head, pages[:full])
            for page in range(max(0, full - self.summary_pages), full):
                twin.check_summary(self.numbers, page, stored[page])
            twins.append(twin)
        return KnownRequest(k[:, :-1], v[:, :-1], twins)

    def _check_storage(
        self, pool: LayerPool, twin: SegmentTwin, head: int, pages: torch.Tensor, states: torch.Tensor | None
    ) -> None:
        """The summary of a page that this step filled, the earlier ones, and the state of all pages."""
        length = len(twin.reference.k)
        stored = page_by_page(pool.summaries, head, pages[: length // pool.page_size])
        if length % pool.page_size == 0:
            twin.check_summary(self.numbers, length // pool.page_size - 1, stored[-1])
        twin.check_summaries(stored)
        twin.check_state(self.numbers, _state(pool, head, states))


def _state(pool: LayerPool, head: int, rows: torch.Tensor | None) -> list[Mapping[str, torch.Tensor]]:
    return [] if rows is None else page_by_page(flow_state(pool), head, rows)
