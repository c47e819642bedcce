"""The life of a request: admit, extend, step, finish, on a pool and a backend. All layers share one runtime."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvsieve.backends import Backend, get_backend
from kvsieve.backends.base import AttentionOptions, Selection
from kvsieve.budget import Budget, BudgetLike, budget_for_layer
from kvsieve.errors import ConfigError
from kvsieve.flow import Flow, build_flow, check_flow, extra_parameters
from kvsieve.graph import FlowGraphs, Geometry, trace_flow
from kvsieve.paging.allocator import BlockId
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.table import RequestId, RequestTables
from kvsieve.plan import Plan

DEFAULT_PAGE_SIZE = 16


@dataclass
class ReadStats:
    """What decode steps read, over all layers, counted from the index lists.

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
class _Layer:
    pool: LayerPool
    group: int
    graphs: FlowGraphs | None
    flow: Any
    budget: Budget | None
    scale: float
    tokens_read: torch.Tensor


class Runtime:
    """Runs a flow over requests.

    Args:
        flow: a flow, or the name of a registered one.
        budget: pages attended per step, for all layers or per layer.
        page_size: tokens per page; None: the flow's own, else 16.
        num_blocks: blocks of the pool; None: it grows.
        dense_layers: layers that attend everything and keep no summaries.
        backend: a backend or its name.

    Raises:
        ConfigError: the flow cannot honour page size or budget, or the backend refuses it.
    """

    def __init__(
        self,
        flow: Flow | str,
        budget: BudgetLike,
        *,
        page_size: int | None = None,
        num_blocks: int | None = None,
        dense_layers: Collection[int] = (),
        backend: str | Backend = "eager",
    ) -> None:
        self.flow = build_flow(flow) if isinstance(flow, str) else flow
        self.budget = budget
        self.page_size = page_size if page_size is not None else self.flow.page_size or DEFAULT_PAGE_SIZE
        for one in [budget] if isinstance(budget, Budget) else budget.values():
            check_flow(self.flow, self.page_size, one)
        self.backend = get_backend(backend)
        self.dense_layers = frozenset(dense_layers)
        # One usable block more than asked for: block 0 is the null block.
        self.tables = RequestTables(
            self.page_size, None if num_blocks is None else num_blocks + 1, self.flow.init_state is not None
        )
        self._layers: dict[int, _Layer] = {}
        self._prepared: dict[tuple[Geometry, torch.device], tuple[FlowGraphs, Any]] = {}
        self._previous: Call | None = None
        self._counted = ReadStats()

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """A runtime with requests and memory of its own; flows, graphs and backends never change and are shared."""
        shared = [self.flow, self.backend, self._prepared]
        for graphs, prepared in self._prepared.values():
            shared += [graphs, prepared]
        memo.update({id(thing): thing for thing in shared})
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return twin

    def admit(self) -> RequestId:
        """A new, empty request."""
        return self.tables.admit()

    def length(self, request: RequestId) -> int:
        """Tokens stored for a request."""
        return self.tables[request].length

    def extend(self, requests: Sequence[RequestId], counts: Sequence[int]) -> Call:
        """Prefill: ``counts`` new tokens for each request, attended densely and exactly; a whole prompt or a chunk.

        Raises:
            OutOfPages: the pool is too small; nothing is changed.
        """
        return self._open(requests, counts, decode=False)

    def step(self, requests: Sequence[RequestId]) -> Call:
        """A decode step: one new token for each request, all of which have a past.

        Raises:
            OutOfPages: the pool is too small; nothing is changed.
        """
        empty = [request for request in requests if not self.length(request)]
        if empty:
            raise ConfigError(f"step: expected requests with a past, received empty ones ({empty}); use extend first")
        return self._open(requests, [1] * len(requests), decode=True)

    def finish(self, requests: Sequence[RequestId]) -> None:
        """End requests and free their blocks and state.

        Raises:
            ConfigError: an unknown request, or one that is named twice; nothing is changed.
        """
        if len({self.tables[request].slot for request in requests}) != len(requests):
            raise ConfigError(f"finish: expected distinct requests, received {list(requests)}")
        for request in requests:
            self.tables.finish(request)

    @property
    def stats(self) -> ReadStats:
        """What decode steps have read so far."""
        total = replace(self._counted)
        for layer in self._layers.values():
            pool = layer.pool
            total.kv_bytes += int(layer.tokens_read) * (pool.k.shape[-1] + pool.v.shape[-1]) * pool.dtype.itemsize
        return total

    def _open(self, requests: Sequence[RequestId], counts: Sequence[int], decode: bool) -> Call:
        if len(set(requests)) != len(requests) or len(requests) != len(counts):
            raise ConfigError(f"expected distinct requests, one count each; received {list(requests)}, {list(counts)}")
        if not requests or min(counts) < 0 or not sum(counts):
            raise ConfigError(f"expected at least one new token and no negative count, received {list(counts)}")
        if self._previous is not None and any(request in self.tables for request in self._previous.grown):
            missed = sorted(set(self._layers) - self._previous.attended)
            if missed:
                raise ConfigError(
                    f"layers {missed} did not attend the previous call, so their K and V have a hole: let them attend, "
                    f"or finish its requests {self._previous.grown}"
                )
        entered = self.tables.append(requests, counts)
        self._previous = Call(self, tuple(requests), tuple(counts), entered, decode)
        self._counted.steps += decode
        return self._previous

    def _layer(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> _Layer:
        if index not in self._layers:
            self._refuse_hole(index)
            self._layers[index] = self._new_layer(index, q, k, v, scale)
        layer = self._layers[index]
        pool = layer.pool
        expected = (pool.num_kv_heads, pool.k.shape[-1], pool.v.shape[-1], layer.group, pool.dtype, layer.scale)
        received = (k.shape[1], k.shape[2], v.shape[2], q.shape[1] // k.shape[1], k.dtype, scale)
        if expected != received:
            raise ConfigError(
                f"layer {index}: expected (KV heads, K width, V width, group, dtype, scale) {expected}, "
                f"received {received}"
            )
        pool.reserve(self.tables.block_allocator.capacity, self.tables.row_allocator.capacity)
        return layer

    def _refuse_hole(self, index: int) -> None:
        """A layer that starts when requests have a past would never have stored that past."""
        new = dict(zip(self._previous.requests, self._previous.counts, strict=True)) if self._previous else {}
        past = [request for request in self.tables if self.length(request) > new.get(request, 0)]
        if past:
            raise ConfigError(
                f"layer {index}: expected its first attend in the first call, received requests {past} with a past "
                "that it has not stored; finish them first"
            )

    def _new_layer(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> _Layer:
        heads, head_dim = k.shape[1:]
        group = q.shape[1] // heads
        graphs, flow, budget = None, None, None
        if index not in self.dense_layers:
            budget = budget_for_layer(self.budget, index)
            graphs, flow = self._prepare(index, head_dim, v.shape[2], group, scale, k.device)
        pool = LayerPool(
            heads,
            self.page_size,
            head_dim,
            v.shape[2],
            k.dtype,
            k.device,
            graphs.summary_fields if graphs else {},
            graphs.state_fields if graphs else {},
        )
        return _Layer(pool, group, graphs, flow, budget, scale, torch.zeros((), dtype=torch.int64, device=k.device))

    def _prepare(
        self, index: int, head_dim: int, v_head_dim: int, group: int, scale: float, device: torch.device
    ) -> tuple[FlowGraphs, Any]:
        wanted = extra_parameters(self.flow)
        geometry = Geometry(
            self.page_size,
            head_dim,
            v_head_dim,
            group,
            scale if "scale" in wanted else None,
            index if "layer" in wanted else 0,
        )
        if (geometry, device) not in self._prepared:
            graphs = trace_flow(self.flow, geometry)
            reason = self.backend.refusal(graphs)
            if reason is not None:
                raise ConfigError(f"backend {self.backend.name} refuses flow {self.flow!r}: {reason}")
            self._prepared[geometry, device] = graphs, self.backend.prepare(graphs, device)
        return self._prepared[geometry, device]


class Call:
    """One forward pass: every layer attends it once. It owns its plan, so a later call cannot change it."""

    def __init__(
        self,
        runtime: Runtime,
        requests: tuple[RequestId, ...],
        counts: tuple[int, ...],
        entered: list[BlockId],
        decode: bool,
    ) -> None:
        self.runtime, self.requests, self.counts, self.decode = runtime, requests, counts, decode
        self.attended: set[int] = set()
        self._entered = entered
        self._plans: dict[torch.device, Plan] = {}

    @property
    def grown(self) -> list[RequestId]:
        """Requests that got tokens."""
        return [request for request, count in zip(self.requests, self.counts, strict=True) if count]

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
        """Store the new tokens of a layer and attend them.

        Args:
            layer: layer index; once per call.
            q: [T, Hq, D], the requests' new tokens one after the other.
            k: [T, H, D]. v: [T, H, Dv].
            scale: attention scale; None: ``D ** -0.5``.
            softcap: logits become ``softcap * tanh(logits / softcap)``.
            sinks: sink logits [Hq], added to the softmax's denominator.
        """
        if self is not self.runtime._previous or layer in self.attended:
            raise ConfigError(f"layer {layer}: expected one attend per layer and call, in the newest call")
        _check_tensors(layer, sum(self.counts), q, k, v)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        _check_options(layer, q.shape[1], scale, softcap, sinks)
        state = self.runtime._layer(layer, q, k, v, scale)
        heads = state.pool.num_kv_heads
        options = AttentionOptions(scale, softcap, None if sinks is None else sinks.reshape(heads, state.group))
        plan = self._plan(k.device)
        writes, pool, backend = plan.writes, state.pool, self.runtime.backend
        pool.write(writes.blocks, writes.offsets, k, v)
        pool.enter(writes.entered)
        if state.graphs is not None:
            backend.summarize(state.flow, pool, writes.filled)
        self.attended.add(layer)
        grouped = q.unflatten(1, (heads, state.group))
        if not self.decode:
            return Attended(backend.prefill(grouped, k, v, pool, plan.rows, options).flatten(1, 2))
        return self._step(state, grouped, plan, options)

    def _step(self, layer: _Layer, q: torch.Tensor, plan: Plan, options: AttentionOptions) -> Attended:
        backend, pool, graphs = self.runtime.backend, layer.pool, layer.graphs
        everything = Budget(0, 0, 1, 1.0)
        scoring = graphs is not None and graphs.score is not None
        quota = plan.quota(layer.budget or everything, scoring, bool(graphs and graphs.state_writes))
        scores = None
        if quota.window is not None:
            scores = backend.score(layer.flow, q[quota.window.requests], pool, quota.window)
        selection = backend.select(scores, quota, pool.num_kv_heads)
        out, lse = backend.attend(q, pool, plan.rows, selection, options)
        self._count(layer, plan, selection, quota.window.total_pages if quota.window else 0)
        return Attended(out.flatten(1, 2), lse, selection, scores)

    def _count(self, layer: _Layer, plan: Plan, selection: Selection, scored_pages: int) -> None:
        pool, counted = layer.pool, self.runtime._counted
        layer.tokens_read += selection.tokens(pool.page_size, plan.rows.lengths_tensor).sum()
        token = (pool.k.shape[-1] + pool.v.shape[-1]) * pool.dtype.itemsize
        counted.dense_bytes += sum(plan.rows.lengths) * pool.num_kv_heads * token
        if layer.graphs is not None:
            counted.field_bytes += scored_pages * pool.num_kv_heads * layer.graphs.score_bytes_per_page(pool.dtype)

    def _plan(self, device: torch.device) -> Plan:
        if device not in self._plans:
            self._plans[device] = Plan(self.runtime.tables, self.requests, self.counts, self._entered, device)
        return self._plans[device]


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
