"""Fixtures of all tests: memory that nobody has written is poison."""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported: its kernels run on the CPU

from interpreter import replace_language_once
from kvsieve import layers
from kvsieve.flow import Flow
from kvsieve.graph import FlowGraphs, Geometry, trace_flow
from kvsieve.mass import AttentionMass
from kvsieve.verify.poison import poisoned_pools

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    replace_language_once()

# The same examples in every run, however slow or busy the machine is.
settings.register_profile(
    "repeatable", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

# torch writes a record with a stack trace for every op it traces, for whoever listens; pytest would, to every logger.
logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # a worker a core: threads that wait for each other cost minutes


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Every buffer that a pool creates is full of NaN, or of garbage where NaN does not exist."""
    with poisoned_pools():
        yield


_TRACED: dict[tuple[Hashable, Geometry], FlowGraphs] = {}


@pytest.fixture
def shared_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runtimes of one shipped flow share its graphs, as the layers and copies of one runtime do: each geometry is
    traced once a process. For tests of what runs a flow, not of tracing."""

    def trace(flow: Flow, geometry: Geometry, *summaries: Any) -> FlowGraphs:
        known = _flow_key(flow)
        if known is None:
            return trace_flow(flow, geometry, *summaries)
        if (known, geometry) not in _TRACED:
            _TRACED[known, geometry] = trace_flow(flow, geometry, *summaries)
        return _TRACED[known, geometry]

    monkeypatch.setattr(layers, "trace_flow", trace)


def _flow_key(flow: Flow) -> Hashable | None:
    """Equal for flows that are the same; None where that cannot be seen: a test's own class, or tensors."""
    key = type(flow), tuple(sorted((name, repr(value)) for name, value in vars(flow).items()))
    own = type(flow).__module__.startswith("kvsieve.flows.")
    plain = (bool, int, float, str, type(None), AttentionMass)
    return key if own and all(isinstance(value, plain) for value in vars(flow).values()) else None


@pytest.fixture
def generator() -> torch.Generator:
    """Seeded random numbers."""
    return torch.Generator().manual_seed(20240607)
