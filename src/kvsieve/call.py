"""One forward pass over the layers: write, summarize, score, select, attend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from kvsieve.backends.base import AttentionOptions, Backend, Increment, Selection
from kvsieve.backends.seeding import seed_mass
from kvsieve.budget import Budget
from kvsieve.errors import ConfigError
from kvsieve.layers import Layer, Layers
from kvsieve.mass import MassUpdate, RequestMass
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.table import Growth, RequestId, RequestTables
from kvsieve.plan import Pages, Plan, Quota
from kvsieve.retention import Evict
from kvsieve.stepplan import StepMemory, StepPlan


@dataclass
class ReadStats:
    """What decode steps read, over all layers, counted from the lengths of the index lists.

    ``steps``: decode calls. ``kv_bytes``: K and V of the selected tokens. ``field_bytes``: what ``score`` read and
    wrote. ``dense_bytes``: K and V that dense attention would have read.
    """

    steps: int = 0
    kv_bytes: int = 0
    field_bytes: int = 0
    dense_bytes: int = 0


@dataclass(frozen=True)
class Attended:
    """A layer's result: ``out [T, Hq, Dv]``; for decode steps also ``lse [B, H, G]``, the selection and the scores."""

    out: torch.Tensor
    lse: torch.Tensor | None = None
    selection: Selection | None = None
    scores: torch.Tensor | None = None


@dataclass
class CallRecord:
    """What a runtime remembers of its newest call: who grew by how much, and which layers have attended it."""

    requests: tuple[RequestId, ...]
    counts: tuple[int, ...]
    attended: set[int] = field(default_factory=set)

    @property
    def grown(self) -> list[RequestId]:
        """Requests that got tokens."""
        return [request for request, count in zip(self.requests, self.counts, strict=True) if count]


class CallHost(Protocol):
    """What a call needs of its runtime."""

    backend: Backend
    tables: RequestTables
    counted: ReadStats
    eviction: Evict | None
    layers: Layers

    def is_newest(self, record: CallRecord) -> bool:
        """Whether layers may still attend this call."""

    def layer(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Layer:
        """A layer with room for all tokens of the tables."""


DENSE = Budget(0, 0, 1, 1.0)
"""Keeps every page: the budget of a layer that has none."""


class Call:
    """One forward pass: every layer attends it once. It owns its plan, so a later call cannot change it.

    It knows its runtime; the runtime knows only its ``record``, so that nothing waits for the garbage collector.
    """

    def __init__(
        self,
        host: CallHost,
        record: CallRecord,
        growth: Growth,
        decode: bool,
        masses: Sequence[RequestMass],
    ) -> None:
        self.host, self.record, self.decode, self.masses = host, record, decode, masses
        self.requests, self.counts = record.requests, record.counts
        self._growth = growth
        self._plans: dict[torch.device, Plan] = {}

    @torch.inference_mode(False)  # pools outlive a caller's inference mode
    @torch.no_grad()
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Attended:
        """Store the new tokens of a layer and attend them. Inference only: nothing here has a gradient.

        Args:
            layer: layer index; once per call.
            q: [T, Hq, D], the requests' new tokens one after the other.
            k: [T, H, D]. v: [T, H, Dv].
            scale: attention scale; None: ``D ** -0.5``.
            softcap: logits become ``softcap * tanh(logits / softcap)``.
            sinks: sink logits [Hq], added to the softmax's denominator.
        """
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        state, plan = self._begin(layer, q, k, v, scale, softcap, sinks)
        backend, pool = self.host.backend, state.pool
        options = self._options(state, scale, softcap, sinks)
        grouped = q.unflatten(1, (-1, state.group))
        self._enter(layer, state, plan, grouped, k, v, options)
        if not self.decode:
            return Attended(backend.prefill(grouped, k, v, pool, plan.rows, options).flatten(1, 2))
        return self._step(state, grouped, plan, options)

    @torch.inference_mode(False)
    @torch.no_grad()
    def store(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        query_heads: int,
        scale: float,
        q: torch.Tensor | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Store the new tokens of a layer and attend nothing: their outputs are known, or nobody asks for them.

        Args:
            layer: layer index; once per call, in place of :meth:`attend`.
            k: [T, H, D], the requests' new tokens one after the other. v: [T, H, Dv].
            query_heads: Hq of the layer. scale: its attention scale.
            q: [T, Hq, D]: queries that seed the flow's attention mass, with ``softcap`` and ``sinks`` as in
                :meth:`attend`; other flows need none.

        Raises:
            ConfigError: the call is a decode step, queries are missing, or what :meth:`attend` refuses.
        """
        if self.decode:
            raise ConfigError(f"layer {layer}: expected a prefill call, received a decode step; use attend there")
        if q is None and any(mass.committed or mass.counted or mass.kept for mass in self.masses):
            raise ConfigError(f"layer {layer}: expected q, which seeds the flow's attention mass, received None")
        shown = k.new_empty(1).expand(k.shape[0], query_heads, k.shape[-1]) if q is None else q  # else only a shape
        state, plan = self._begin(layer, shown, k, v, scale, softcap, sinks)
        grouped = None if q is None else q.unflatten(1, (-1, state.group))
        self._enter(layer, state, plan, grouped, k, v, self._options(state, scale, softcap, sinks))

    def _begin(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> tuple[Layer, Plan]:
        """Check a layer's tensors; the layer has room for them then."""
        if not self.host.is_newest(self.record) or layer in self.record.attended:
            raise ConfigError(
                f"layer {layer}: expected one attend per layer and call, in the newest call, before any of its "
                "requests is finished"
            )
        _check_tensors(layer, sum(self.counts), q, k, v)
        _check_options(layer, q.shape[1], scale, softcap, sinks)
        return self.host.layer(layer, q, k, v, scale), self._plan(k.device)

    def _enter(
        self,
        layer: int,
        state: Layer,
        plan: Plan,
        q: torch.Tensor | None,
        k: torch.Tensor,
        v: torch.Tensor,
        options: AttentionOptions,
    ) -> None:
        """Count the queries that were kept, store the new tokens, count or keep theirs: q [T, H, G, D] or None."""
        options = replace(options, mass=state.mass)
        if state.mass is not None:
            self._count_kept(state, plan, options)
        self._write(layer, state, plan, k, v)
        if state.mass is not None and q is not None:
            self._count_new(state, q, plan, options)

    def _write(self, layer: int, state: Layer, plan: Plan, k: torch.Tensor, v: torch.Tensor) -> None:
        """Evict what must go, write the layer's tokens and summarize the pages they fill."""
        writes, pool = plan.writes, state.pool
        for one in plan.trims:
            self.host.backend.trim(pool, one)
        self.host.backend.enter(pool, writes.entered)
        self.host.backend.store(None if state.graphs is None else state.flow, pool, writes, k, v)
        self.record.attended.add(layer)

    @staticmethod
    def _options(layer: Layer, scale: float, softcap: float | None, sinks: torch.Tensor | None) -> AttentionOptions:
        return AttentionOptions(scale, softcap, None if sinks is None else sinks.reshape(-1, layer.group))

    def _step(self, layer: Layer, q: torch.Tensor, plan: Plan, options: AttentionOptions) -> Attended:
        backend, pool = self.host.backend, layer.pool
        quota = self._quota(layer, plan)
        scores = None
        if quota.window is not None:
            places = quota.window.requests
            asked = q if len(places) == len(q) else q[places]
            scores = backend.score(layer.flow, asked, pool, quota.window)
        selection = backend.select(scores, quota, pool.num_kv_heads)
        fed = layer.fed_mass
        options = replace(options, mass=fed, mass_rows=None if fed is None else plan.mass)
        out, lse, increment = backend.attend(q, pool, plan.rows, selection, options)
        if increment is not None:
            self._add_mass(pool, plan, selection, increment)
        self._count(layer, plan, quota)
        return Attended(out.flatten(1, 2), lse, selection, scores)

    @staticmethod
    def _quota(layer: Layer, plan: Plan) -> Quota:
        graphs = layer.graphs
        scoring = graphs is not None and graphs.score is not None
        return plan.quota(layer.budget or DENSE, scoring, bool(graphs and graphs.state_writes))

    def _count_kept(self, layer: Layer, plan: Plan, options: AttentionOptions) -> None:
        """Count the queries of earlier calls that were kept because a crop could have taken them back."""
        for place, (request, mass) in enumerate(zip(self.requests, self.masses, strict=True)):
            if mass.committed is not None:
                rows = layer.queries.first(request, mass.surviving)[-mass.committed.rows :]
                self._seed(layer.pool, plan.before(place), rows, mass.committed, options)

    def _count_new(self, layer: Layer, q: torch.Tensor, plan: Plan, options: AttentionOptions) -> None:
        """Count the call's own prompt queries in the attention mass, or keep them: q [T, H, G, D]."""
        last = 0
        for place, (request, count, mass) in enumerate(zip(self.requests, self.counts, self.masses, strict=True)):
            new = q[last : last + count]
            last += count
            if not count:
                continue
            if mass.counted is not None and not self.decode:
                self._seed(layer.pool, plan.pages(place), new, mass.counted, options)
            if mass.kept:
                layer.queries.keep(request, mass.surviving, new, mass.kept)
            else:
                layer.queries.forget(request)

    def _seed(
        self, pool: LayerPool, where: Pages, q: torch.Tensor, update: MassUpdate, options: AttentionOptions
    ) -> None:
        """Add the attention of consecutive queries [n, H, G, D] of one request to its stored mass."""
        seed_mass(self.host.backend, q, pool, where.blocks, where.rows, update, options)

    def _add_mass(self, pool: LayerPool, plan: Plan, selection: Selection, increment: Increment) -> None:
        """Add what a step's attention gave the selected tokens."""
        self.host.backend.add_mass(pool, plan.rows, plan.mass, selection, increment)

    def _count(self, layer: Layer, plan: Plan, quota: Quota) -> None:
        pool, counted = layer.pool, self.host.counted
        token = (pool.k.shape[-1] + pool.v.shape[-1]) * pool.dtype.itemsize * pool.num_kv_heads
        counted.kv_bytes += quota.tokens * token
        counted.dense_bytes += plan.seen * token
        if quota.window is not None:
            counted.field_bytes += quota.window.total_pages * pool.num_kv_heads * layer.score_bytes

    def step_shape(self) -> tuple[object, ...] | None:
        """What two decode steps of the same requests have in common if one graph can run both; None if none can."""
        cuts = {(cut.stored, cut.kept) if cut else None for cut in self._growth.cuts}
        pending = any(mass.committed or mass.surviving or mass.kept for mass in self.masses)
        if not self.decode or pending or len(cuts) > 1 or any(cut and cut[0] > cut[1] + 1 for cut in cuts):
            return None
        return tuple(cuts)

    def plan_in(self, memory: StepMemory) -> StepPlan:
        """This step's plan, in the memory of a graph, with all that its layers read."""
        plan = StepPlan(*self._plan_arguments(memory.device), memory=memory)
        for _, layer in self.host.layers.items():
            self._quota(layer, plan)
        if self.masses:
            _ = plan.mass
        self._plans[memory.device] = plan
        return plan

    def replayed(self) -> None:
        """A graph attends all layers."""
        (plan,) = self._plans.values()
        for index, layer in self.host.layers.items():
            self.record.attended.add(index)
            self._count(layer, plan, self._quota(layer, plan))

    def _plan(self, device: torch.device) -> Plan:
        if device not in self._plans:
            self._plans[device] = Plan(*self._plan_arguments(device))
        return self._plans[device]

    def _plan_arguments(self, device: torch.device) -> tuple[Any, ...]:
        growth, host = self._growth, self.host
        return (
            host.tables,
            self.requests,
            self.counts,
            growth.entered,
            device,
            self.masses,
            host.eviction,
            growth.cuts,
        )


def _check_tensors(layer: int, tokens: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse tensors that contradict each other, before anything is stored."""
    fits = q.dim() == k.dim() == v.dim() == 3 and q.shape[0] == k.shape[0] == v.shape[0] == tokens
    if not fits or k.shape[1] != v.shape[1] or q.shape[1] % max(1, k.shape[1]) or q.shape[2] != k.shape[2]:
        raise ConfigError(
            f"layer {layer}: expected q [{tokens}, G * H, D], k [{tokens}, H, D] and v [{tokens}, H, Dv], received "
            f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(f"layer {layer}: expected q, k and v of one dtype, received {q.dtype}, {k.dtype}, {v.dtype}")


def _check_options(
    layer: int, query_heads: int, scale: float, softcap: float | None, sinks: torch.Tensor | None
) -> None:
    if not math.isfinite(scale) or (softcap is not None and not 0 < softcap < math.inf):
        raise ConfigError(f"layer {layer}: expected a finite scale, softcap > 0 or None, received {scale}, {softcap}")
    if sinks is not None and sinks.shape != (query_heads,):
        raise ConfigError(f"layer {layer}: expected sinks [{query_heads}], received {list(sinks.shape)}")
