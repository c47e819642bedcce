"""Prompt queries of a layer that do not count in the attention mass yet."""

from __future__ import annotations

import torch

from kvsieve.paging.table import RequestId


class KeptQueries:
    """The last queries of requests, ``[n, H, G, D]`` each."""

    def __init__(self) -> None:
        self._kept: dict[RequestId, torch.Tensor] = {}

    def first(self, request: RequestId, count: int) -> torch.Tensor:
        """The first ``count`` kept queries: those after them were cropped away."""
        return self._kept[request][:count]

    def keep(self, request: RequestId, surviving: int, new: torch.Tensor, count: int) -> None:
        """Keep the last ``count`` of the surviving and the new queries [n, H, G, D]."""
        if surviving and count > len(new):
            new = torch.cat([self.first(request, surviving), new])
        self._kept[request] = new[len(new) - count :].clone()

    def copy(self, source: RequestId, target: RequestId) -> None:
        """A fork has the queries of its source."""
        if source in self._kept:
            self._kept[target] = self._kept[source]

    def forget(self, request: RequestId) -> None:
        """All of them count now, or the request has ended."""
        self._kept.pop(request, None)
