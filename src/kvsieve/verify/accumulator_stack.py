"""The real stack looking at the same window again and again: runtime, tables, pool, state rows and backend."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import torch

from kvsieve.backends.base import Selection
from kvsieve.budget import Budget
from kvsieve.flow import Flow
from kvsieve.layers import Layer
from kvsieve.paging.table import RequestId
from kvsieve.plan import Plan
from kvsieve.runtime import Runtime
from kvsieve.verify.accumulator_data import WindowData
from kvsieve.verify.rounding import F64


class FixedWindow:
    """One request per data source, all of the same length, in one layer with one KV head.

    The last token comes with a decode step of the runtime. Every later step scores the same window of the same pool
    through the backend and stores state in the same rows; it stores no token, so the window does not move.
    """

    def __init__(
        self, flow: Flow, budget: Budget, page_size: int, data: Sequence[WindowData], backend: str, device: str
    ) -> None:
        self.runtime = Runtime(flow, budget, page_size=page_size, backend=backend)
        self.budget, self.data, self.device = budget, data, torch.device(device)
        self.requests = [self.runtime.admit() for _ in data]
        self._plans: dict[tuple[RequestId, ...], Plan] = {}
        k, v = self._tokens()
        self._attend_prompt(self.requests, k[:, :-1], v[:, :-1])

    @property
    def layer(self) -> Layer:
        """The layer, with its pool."""
        return self.runtime.layers[0]

    def first_step(self, queries: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The runtime's own decode step, which stores the last token: q [G, D] a request -> scores [B, 1, W]."""
        k, v = self._tokens()
        q = torch.stack(list(queries)).to(self.device)
        return self.runtime.step(self.requests).attend(0, q, k[:, -1:], v[:, -1:]).scores

    def step(self, requests: Sequence[RequestId], queries: Sequence[torch.Tensor]) -> Selection:
        """A step that stores nothing but state: q [G, D] a request -> the selection."""
        key = tuple(requests)
        if key not in self._plans:
            self._plans[key] = Plan(self.runtime.tables, requests, [0] * len(requests), [], self.device)
        quota = self._plans[key].quota(self.budget, True, True)
        assert quota.window is not None
        q = torch.stack(list(queries)).to(self.device)[:, None]
        scores = self.runtime.backend.score(self.layer.flow, q, self.layer.pool, quota.window)
        return self.runtime.backend.select(scores, quota, 1)

    def rows(self, request: RequestId) -> list[int]:
        """State rows of a request, page by page."""
        return [int(row) for row in self.runtime.tables[request].rows]

    def state(self, requests: Sequence[RequestId], field: str) -> torch.Tensor:
        """Stored state of all pages, as float64: [B, S, ...]."""
        index = torch.tensor([self.rows(request) for request in requests], device=self.device)
        return self.layer.pool.state[field][0, index].to("cpu", F64)

    def readmit(self, *, reset: bool = True) -> list[RequestId]:
        """End all requests and admit as many new ones of the same tokens; a faulty stack has no ``reset``."""
        self._replace_requests()
        k, v = self._tokens()
        if reset:
            self._attend_prompt(self.requests, k, v)
        else:
            with mock.patch.object(self.layer.pool, "enter", lambda rows: None):
                self._attend_prompt(self.requests, k, v)
        return self.requests

    def replace(self, data: Sequence[WindowData]) -> None:
        """End all requests and admit new ones of other tokens, all but the last, which comes with the first step."""
        self._replace_requests()
        self.data = data
        k, v = self._tokens()
        self._attend_prompt(self.requests, k[:, :-1], v[:, :-1])

    def blocks(self) -> set[int]:
        """Blocks of all live requests."""
        return {int(block) for request in self.requests for block in self.runtime.tables[request].blocks}

    def _replace_requests(self) -> None:
        self.runtime.finish(self.requests)
        self._plans.clear()
        self.requests = [self.runtime.admit() for _ in self.data]

    def _attend_prompt(self, requests: Sequence[RequestId], k: torch.Tensor, v: torch.Tensor) -> None:
        k, v = k.flatten(0, 1)[:, None], v.flatten(0, 1)[:, None]
        count = len(k) // len(requests)
        q = torch.zeros(len(k), self.data[0].group, k.shape[-1], dtype=k.dtype, device=self.device)
        self.runtime.extend(requests, [count] * len(requests)).attend(0, q, k, v)

    def _tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all requests, [B, S, D] each."""
        k = torch.stack([one.k for one in self.data]).to(self.device)
        return k, torch.stack([one.v for one in self.data]).to(self.device)
