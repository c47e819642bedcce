"""A runtime that evicts beside its reference, for the tests of eviction."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from kvsieve import Evict, Runtime, build_flow
from kvsieve.flow import Flow, list_flows
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

    def admit(self, keys: Sequence[str] = ()) -> RequestId:
        request = self.runtime.admit(keys)
        self.segments[request] = self.fresh()
        return request

    def fresh(self) -> list[EvictingSegment]:
        """Empty segments of a request."""
        return [EvictingSegment(self.flow, self.retention) for _ in range(self.shape.heads)]

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
        allowed = (
            1e-5 if self.dtype is torch.float32 else 2 * u if decode else 8 * u
        )  # a dense kernel rounds on its way
        error = (received.double() - expected).abs().amax() / expected.abs().amax()
        assert error <= allowed, float(error)
