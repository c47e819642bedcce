"""Decode steps as one CUDA graph: captured once, replayed while the requests grow.

The host works out each step's integers as ever and sends them in one copy; the block table is on the device and takes
the newest block of each request from them. What a graph fixes are bounds: requests, and the length they may reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from kvsieve.call import Call
from kvsieve.errors import ConfigError, check_integer
from kvsieve.layers import Layer
from kvsieve.paging.table import RequestId
from kvsieve.runtime import Runtime
from kvsieve.stepplan import StepMemory, StepPlan

T = TypeVar("T")


class StepGraph(Generic[T]):
    """Decode steps of some requests of a runtime.

    Args:
        runtime: all of its layers hold the requests' past.
        requests: the batch, in this order in every step.
        until: tokens that each request may reach, or all of them; room for them is reserved now.
        body: runs a step: it attends every layer with the call that it is given, reading its inputs from tensors that
            the caller fills before each step, and returns tensors. It must not wait for the device.
        device: of all layers. On a CPU there are no graphs, and every step runs op by op.

    Attributes:
        graph: the captured step, None before it is captured. Replayed by itself it does the newest step again.

    Raises:
        ConfigError: no request; not a length for each, or no room for a step in it; the device is not available, or not
            that of all layers.
        OutOfPages: a limited pool that is too small.
    """

    def __init__(
        self,
        runtime: Runtime,
        requests: Sequence[RequestId],
        until: int | Sequence[int],
        body: Callable[[Call], T],
        device: torch.device | str = "cuda",
    ) -> None:
        self.runtime, self.requests, self.body = runtime, tuple(requests), body
        if not self.requests:
            raise ConfigError("StepGraph: expected at least one request, received none")
        self.until = _lengths(until, len(self.requests))
        self.device = _device(device)
        elsewhere = {layer.pool.device for layer in self._layers()} - {self.device}
        if elsewhere:
            raise ConfigError(f"StepGraph: expected layers on {self.device}, received some on {elsewhere.pop()}")
        evict = runtime.eviction
        if evict is not None:
            self.until = (evict.capacity + 1,) * len(self.requests)
        self._refuse_full()
        runtime.reserve(self.requests, self.until)
        budgets = len({layer.budget for layer in self._layers()})
        self._memory = StepMemory(self.device, [runtime.tables.pages(length) for length in self.until], budgets)
        self._warm: object = None
        self._captured: object = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self._result: T | None = None

    def step(self) -> T:
        """A decode step; what ``body`` returned, overwritten by the next step.

        A step that is unlike the one before runs op by op: kernels are compiled then. So does a step after a prompt,
        where pending queries count or much is trimmed. The second of a kind is captured.

        Raises:
            ConfigError: a request would grow beyond ``until``.
        """
        self._refuse_full()
        call = self.runtime.step(self.requests)
        self.runtime.reserve((), ())  # others may have taken the blocks that were free: the tables have grown then
        shape = call.step_shape()
        if shape is None:
            return self.body(call)
        plan = call.plan_in(self._memory)
        plan.upload(self.requests)
        self._rebase(plan)
        return self._run(call, plan, (shape, *self._pointers()))

    def _refuse_full(self) -> None:
        """Refuse requests that may take no further token."""
        if self.runtime.eviction is not None:
            return  # they make room for themselves
        for request, until in zip(self.requests, self.until, strict=True):
            stored = self.runtime.tables[request].stored
            if stored >= until:
                raise ConfigError(
                    f"StepGraph: expected requests of up to {until} tokens, one has {stored} already; raise until"
                )

    def _run(self, call: Call, plan: StepPlan, kind: object) -> T:
        if self.device.type == "cpu" or kind != self._warm:
            self._warm = kind
            return self._body(call, plan)
        if kind != self._captured:
            graph, self._captured = torch.cuda.CUDAGraph(), None
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._result = self._body(call, plan)
            self.graph, self._captured = graph, kind
        else:
            call.replayed()
        assert self.graph is not None and self._result is not None
        self.graph.replay()
        return self._result

    def _body(self, call: Call, plan: StepPlan) -> T:
        plan.take_newest()
        return self.body(call)

    def _rebase(self, plan: StepPlan) -> None:
        """Rebase stored mass ahead of the step: it happens once in hundreds of steps."""
        for place, factor in plan.rebases.items():
            for layer in self._layers():
                if layer.fed_mass is not None:
                    layer.pool.rebase_mass(self._memory.rows[place], factor)

    def _layers(self) -> list[Layer]:
        return [layer for _, layer in self.runtime.layers.items()]

    def _pointers(self) -> tuple[int, ...]:
        """Where the pools lie: a graph is void once one has moved."""
        fields = [
            field
            for layer in self._layers()
            for field in (layer.pool.k, layer.pool.v, *layer.pool.summaries.values(), *layer.pool.state.values())
        ]
        return tuple(field.data_ptr() for field in fields)


def _lengths(until: int | Sequence[int], requests: int) -> tuple[int, ...]:
    """A length per request."""
    lengths = tuple(until) if isinstance(until, Sequence) else (until,) * requests
    if len(lengths) != requests:
        raise ConfigError(f"StepGraph(until=): expected a length for each of {requests} requests, received {until!r}")
    for length in lengths:
        check_integer("StepGraph(until=)", length, 1)
    return lengths


def _device(device: torch.device | str) -> torch.device:
    """A device to step on, with its index."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"StepGraph: expected cpu or a CUDA device, received {device!r}") from None
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"StepGraph: expected cpu or a CUDA device, received {found}")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"StepGraph: expected an available device, received {found}")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found if found.type == "cuda" else torch.device("cpu")
