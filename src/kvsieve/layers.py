"""The layers of a runtime: each has a pool of its own and the flow traced for its geometry."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvsieve.backends.base import Backend
from kvsieve.budget import Budget, BudgetLike, budget_for_layer
from kvsieve.errors import ConfigError
from kvsieve.flow import Flow, extra_parameters
from kvsieve.graph import FieldSpec, FlowGraphs, Geometry, Summaries, trace_flow
from kvsieve.mass import AttentionMass
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.queries import KeptQueries
from kvsieve.paging.slots import slot_fields


@dataclass
class Layer:
    """A layer's memory and what runs on it; ``graphs``, ``flow`` and ``budget`` are None where all that is stored is
    attended: in a dense layer, and where tokens are evicted.

    ``mass``: the attention mass that is kept here, if any. ``score_bytes``: what ``score`` reads and writes per window
    page and KV head. ``queries``: those that do not count in the attention mass yet.
    """

    pool: LayerPool
    group: int
    graphs: FlowGraphs | None
    flow: Any
    budget: Budget | None
    scale: float
    score_bytes: int
    mass: AttentionMass | None
    queries: KeptQueries

    @property
    def fed_mass(self) -> AttentionMass | None:
        """The attention mass that decode steps add to, if any."""
        return self.mass if self.mass and self.mass.update == "steps" else None

    def signature(self) -> tuple[Any, ...]:
        """(KV heads, K width, V width, group, dtype, scale): what every call must agree with."""
        pool = self.pool
        return pool.num_kv_heads, pool.k.shape[-1], pool.v.shape[-1], self.group, pool.dtype, self.scale


class Layers:
    """Layers by index, made when they first attend. ``budget`` is None where tokens are evicted."""

    def __init__(
        self,
        flow: Flow,
        budget: BudgetLike | None,
        page_size: int,
        dense: Collection[int],
        backend: Backend,
        mass: AttentionMass | None,
    ) -> None:
        self.flow, self.budget, self.page_size, self.backend, self.mass = flow, budget, page_size, backend, mass
        self.dense = frozenset(dense)
        self._layers: dict[int, Layer] = {}
        self._prepared: dict[tuple[Geometry, torch.device], tuple[FlowGraphs, Any]] = {}
        self._summaries: Summaries = {}

    def __contains__(self, index: object) -> bool:
        return index in self._layers

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __getitem__(self, index: int) -> Layer:
        return self._layers[index]

    def forget(self, indices: Collection[int]) -> None:
        """Drop layers, as if they had never attended."""
        for index in indices:
            self._layers.pop(index, None)

    def items(self) -> Iterator[tuple[int, Layer]]:
        """Index and layer, in the order of their first attend."""
        return iter(self._layers.items())

    def shared(self) -> list[object]:
        """What never changes and may be shared by copies of a runtime."""
        things: list[object] = [self.flow, self.backend, self._prepared, self._summaries]
        for pair in self._prepared.values():
            things += pair
        return things

    def get(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Layer:
        """The layer that q [T, Hq, D], k [T, H, D], v [T, H, Dv] belong to.

        Raises:
            ConfigError: they do not fit what the layer holds.
        """
        if index not in self._layers:
            self._layers[index] = self._new(index, q, k, v, scale)
        layer = self._layers[index]
        received = (k.shape[1], k.shape[2], v.shape[2], q.shape[1] // k.shape[1], k.dtype, scale)
        if layer.signature() != received:
            raise ConfigError(
                f"layer {index}: expected (KV heads, K width, V width, group, dtype, scale) {layer.signature()}, "
                f"received {received}"
            )
        return layer

    def _new(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Layer:
        self.backend.check_device(k.device)
        heads, head_dim = k.shape[1:]
        group = q.shape[1] // heads
        graphs, flow, budget, mass = None, None, None, None
        state_fields: Mapping[str, FieldSpec] = {}
        if self.budget is None:
            mass, state_fields = self.mass, slot_fields(self.page_size, self.mass is not None)
        elif index not in self.dense:
            mass, budget = self.mass, budget_for_layer(self.budget, index)
            graphs, flow = self._prepare(index, head_dim, v.shape[2], group, scale, k.device)
            state_fields = graphs.state_fields
        pool = LayerPool(
            heads,
            self.page_size,
            head_dim,
            v.shape[2],
            k.dtype,
            k.device,
            graphs.summary_fields if graphs else {},
            state_fields,
            self.backend.page_major,
        )
        score_bytes = graphs.score_bytes_per_page(k.dtype) if graphs else 0
        return Layer(pool, group, graphs, flow, budget, scale, score_bytes, mass, KeptQueries())

    def _prepare(
        self, index: int, head_dim: int, v_head_dim: int, group: int, scale: float, device: torch.device
    ) -> tuple[FlowGraphs, Any]:
        wanted = extra_parameters(self.flow)
        if self.flow.equal_widths and head_dim != v_head_dim:
            raise ConfigError(
                f"layer {index}: flow {self.flow!r} requires keys and values of one width, received {head_dim} and "
                f"{v_head_dim}"
            )
        geometry = Geometry(
            self.page_size,
            head_dim,
            v_head_dim,
            group,
            scale if "scale" in wanted else None,
            index if "layer" in wanted else 0,
        )
        return self.prepared(geometry, device)

    def prepared(self, geometry: Geometry, device: torch.device) -> tuple[FlowGraphs, Any]:
        """The flow, traced for a geometry and as the backend runs it on a device.

        Raises:
            ConfigError: the backend refuses it.
        """
        if (geometry, device) not in self._prepared:
            graphs = trace_flow(self.flow, geometry, self._summaries)
            reason = self.backend.refusal(graphs)
            if reason is not None:
                raise ConfigError(f"backend {self.backend.name} refuses flow {self.flow!r}: {reason}")
            self._prepared[geometry, device] = graphs, self.backend.prepare(graphs, device)
        return self._prepared[geometry, device]
