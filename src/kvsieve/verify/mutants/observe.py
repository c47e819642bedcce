"""What a run lets out, whoever judges it: whether the outputs of requests with finite tokens are finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import kvsieve.layers
from kvsieve.call import Call
from kvsieve.flow import Flow
from kvsieve.graph import FlowGraphs, Geometry, Summaries, trace_flow
from kvsieve.verify import poison

FINITE_GARBAGE = 3


class Outputs:
    """Watches every attend; ``finite`` says whether what came out so far was."""

    def __init__(self) -> None:
        self.finite = True
        self._spoiled: dict[Any, set[int]] = {}  # requests whose own tokens are not finite, by runtime

    def see(self, call: Call, tokens: tuple[torch.Tensor, ...], result: Any) -> None:
        """q, k, v [T, heads, width] of a call and what a layer made of them."""
        spoiled = self._spoiled.setdefault(call.host, set())
        counts = torch.tensor(call.counts)
        owner = torch.repeat_interleave(torch.tensor(call.requests), counts)
        broken = ~torch.stack([_finite_rows(x) for x in tokens]).all(0)
        spoiled.update(owner[broken].tolist())
        clean = torch.tensor([request not in spoiled for request in owner.tolist()])
        seen = [result.out] if result.lse is None else [result.out, result.lse]
        self.finite &= all(bool(_finite_rows(x)[clean].all()) for x in seen)


@contextmanager
def watched() -> Iterator[Outputs]:
    """Outputs of all calls made inside."""
    outputs, original = Outputs(), Call.attend

    def attend(call: Call, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        result = original(call, layer, q, k, v, **options)
        outputs.see(call, (q, k, v), result)
        return result

    with mock.patch.object(Call, "attend", attend):
        yield outputs


@contextmanager
def finite_memory() -> Iterator[None]:
    """Poison is a small number instead of NaN: as in a program whose memory happens to hold something."""

    def garbage(dtype: torch.dtype) -> int:
        return 1 if dtype is torch.bool else FINITE_GARBAGE

    with mock.patch.object(poison, "garbage", garbage):
        yield


_TRACED: dict[tuple[Flow, Geometry], FlowGraphs] = {}


@contextmanager
def traced_once() -> Iterator[None]:
    """Flows are traced once a process: tracing is most of a short check's time, and no mutant touches it."""

    def traced(flow: Flow, geometry: Geometry, summaries: Summaries) -> FlowGraphs:
        if (flow, geometry) not in _TRACED:
            _TRACED[flow, geometry] = trace_flow(flow, geometry, summaries)
        return _TRACED[flow, geometry]

    with mock.patch.object(kvsieve.layers, "trace_flow", traced):
        yield


def _finite_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.isfinite(x).flatten(1).all(1)
