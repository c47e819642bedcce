"""Eviction: Evict's values, what a runtime refuses, and what stays and is attended beside the float64 reference."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvsieve import Budget, ConfigError, Evict, Keep, NotCroppable, OutOfPages, Runtime, build_flow
from kvsieve.flow import Flow, list_flows
from kvsieve.mass import AttentionMass
from kvsieve.paging.slots import POSITION
from kvsieve.reference import EvictingSegment
from kvsieve.runtime import RequestId
from kvsieve.verify.data import IidData, LayerShape
from kvsieve.verify.poison import spoil_free_memory
from kvsieve.verify.rounding import unit_roundoff

EVICTABLE = [name for name, flow in list_flows().items() if flow.evictable]
SHAPE = LayerShape(2, 3, 20, 12)


def evict(flow: str | Flow, capacity: int, sink: int = 2, recent: int = 4) -> Evict:
    """A retention that the flow can honour."""
    flow = build_flow(flow) if isinstance(flow, str) else flow
    return Evict(capacity, sink, recent if flow.mass else capacity - sink)


class Pair:
    """A runtime that evicts beside one reference segment per (request, KV head); after every call both hold the same
    tokens, and steps give the same outputs."""

    def __init__(
        self,
        flow: str,
        retention: Evict,
        page_size: int = 5,
        shape: LayerShape = SHAPE,
        dtype: torch.dtype = torch.float32,
        num_blocks: int | None = None,
    ) -> None:
        self.flow, self.retention, self.shape, self.dtype = build_flow(flow), retention, shape, dtype
        self.runtime = Runtime(self.flow, page_size=page_size, num_blocks=num_blocks, retention=retention)
        self.data = IidData(5, q_scale=1.5)
        self.segments: dict[RequestId, list[EvictingSegment]] = {}

    def admit(self) -> RequestId:
        request = self.runtime.admit()
        self.segments[request] = [EvictingSegment(self.flow, self.retention) for _ in range(self.shape.heads)]
        return request

    def fork(self, source: RequestId) -> RequestId:
        twin = self.runtime.fork(source)
        self.segments[twin] = copy.deepcopy(self.segments[source])
        return twin

    def extend(self, requests: Sequence[RequestId], counts: Sequence[int]) -> torch.Tensor:
        return self._call(requests, counts, decode=False)

    def step(self, requests: Sequence[RequestId], times: int = 1) -> torch.Tensor:
        for _ in range(times):
            out = self._call(requests, [1] * len(requests), decode=True)
        return out

    def crop(self, request: RequestId, length: int) -> None:
        self.runtime.crop([request], [length])
        for segment in self.segments[request]:
            segment.crop(length)

    def stored(self, request: RequestId, head: int) -> list[int]:
        """Positions of the tokens that are stored."""
        entry = self.runtime.tables[request]
        field = self.runtime.layers[0].pool.state[POSITION]
        return sorted(field[head, entry.rows].flatten()[: entry.stored].tolist())

    def _call(self, requests: Sequence[RequestId], counts: Sequence[int], decode: bool) -> torch.Tensor:
        draws = [
            self.data.tokens(self.shape, 0, request, self.runtime.length(request), count, (0, 0))
            for request, count in zip(requests, counts, strict=True)
        ]
        q, k, v = (torch.cat(part).to(self.dtype) for part in zip(*draws, strict=True))
        call = self.runtime.step(requests) if decode else self.runtime.extend(requests, counts)
        out = call.attend(0, q, k, v).out
        spoil_free_memory(self.runtime)
        first = 0
        for request, count in zip(requests, counts, strict=True):
            rows = slice(first, first + count)
            first += count
            for head, segment in enumerate(self.segments[request] if count else ()):
                mine = slice(head * self.shape.group, (head + 1) * self.shape.group)
                queries, keys, values = q[rows, mine], k[rows, head], v[rows, head]
                if decode:
                    expected = segment.step(queries[0], keys[0], values[0]).out[None]
                else:
                    expected, _ = segment.extend(queries, keys, values)
                assert self.stored(request, head) == segment.alive
                self._close(out[rows, mine], expected, decode)
        return out

    def _close(self, received: torch.Tensor, expected: torch.Tensor, decode: bool) -> None:
        u = unit_roundoff(self.dtype)
        allowed = 1e-5 if self.dtype is torch.float32 else 2 * u if decode else 8 * u  # a dense kernel rounds on its way
        error = (received.double() - expected).abs().amax() / expected.abs().amax()
        assert error <= allowed, float(error)


# Values and refusals


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"capacity": 35}, r"capacity=\): expected at least sink \+ recent = 36 tokens, received 35; raise it"),
        ({"capacity": 0, "sink": 0}, r"Evict\(capacity=\): expected an integer >= 1, received 0"),
        ({"capacity": 8.0}, r"Evict\(capacity=\): expected an integer >= 1, received 8.0"),
        ({"capacity": True}, r"Evict\(capacity=\): expected an integer >= 1, received True"),
        ({"capacity": 99, "sink": -1}, r"Evict\(sink=\): expected an integer >= 0, received -1"),
        ({"capacity": 99, "recent": 0}, r"Evict\(recent=\): expected an integer >= 1, received 0"),
        ({"capacity": 99, "recent": "4"}, r"Evict\(recent=\): expected an integer >= 1, received '4'"),
    ],
)
def test_wrong_values_are_refused(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Evict(**arguments)


def test_values() -> None:
    assert (Evict(36).sink, Evict(36).recent) == (4, 32)
    assert Evict(1, 0, 1) == Evict(capacity=1, sink=0, recent=1)
    assert EVICTABLE == ["h2o", "snapkv", "streaming_llm", "tova"]


class Rigid(Flow):
    """Evictable, at one page size only."""

    page_size, evictable = 4, True
    mass = AttentionMass(1.0)


@pytest.mark.parametrize(
    ("flow", "options", "expected"),
    [
        ("h2o", {"budget": Budget(3), "retention": Evict(64)}, r"expected a budget or retention=Evict.*received both"),
        ("h2o", {}, r"budget: expected a Budget, or a mapping .* received None"),
        ("h2o", {"retention": 64}, r"retention: expected Keep\(\) or Evict\(capacity\), received 64"),
        ("h2o", {"budget": Budget(3), "retention": Evict}, r"retention: expected Keep\(\) or Evict"),
        (
            "gqa_quest_sparse_attention",
            {"retention": Evict(64)},
            r"flow gqa_quest_sparse_attention: expected one that may evict .*\(h2o, snapkv, streaming_llm, tova, or .*"
            r"use retention Keep\(\)",
        ),
        (
            "streaming_llm",
            {"retention": Evict(64)},
            r"no attention mass .* expected capacity = sink \+ recent, received Evict.*; set recent=60",
        ),
        ("h2o", {"retention": Evict(64), "dense_layers": [2, 0]}, r"expected no dense layers .*received \[0, 2\]"),
        ("h2o", {"retention": Evict(64), "page_size": 0}, r"page_size: expected an integer >= 1, received 0"),
        (Rigid(), {"retention": Evict(64), "page_size": 5}, r"requires page_size 4, received 5"),
    ],
)
def test_what_a_runtime_refuses(flow: str | Flow, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Runtime(flow, **options)


def test_a_flow_of_ones_own_evicts_at_its_page_size() -> None:
    assert Runtime(Rigid(), retention=Evict(64)).page_size == 4
    assert Runtime("h2o", Budget(3), retention=Keep()).eviction is None
