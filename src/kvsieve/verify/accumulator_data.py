"""Keys of a window and the queries that look at it again and again, for flows that accumulate."""

from __future__ import annotations

import math
from typing import Protocol

import torch

SPREAD, NOISE = 0.2, 0.32
"""Logit units: deviation of the tokens' affinities, and of each key's part that the queries' noise meets."""
HEAVY_SHARE, ALONE_SPREAD, ALONE_JITTER = 0.28, 2.0, 0.3


class WindowData(Protocol):
    """One segment: ``k`` [S, D] and ``v`` [S, D], the same at every step; queries [G, D] that change with it."""

    k: torch.Tensor
    v: torch.Tensor
    group: int

    def query(self) -> torch.Tensor:
        """The next step's query heads [G, D]."""


class PlantedWindow:
    """Heavy hitters: every token has an affinity along a direction ``u`` that all queries share.

    ``k_t = D**(1/4) * spread * a_t * u + noise * x_t`` and ``q = D**(1/4) * u + y``, with ``a`` standard
    normal and x, y standard normal orthogonal to u; rounded to bfloat16. So the logits of the mean query, at scale
    ``D ** -0.5``, are ``spread * a_t`` and a part of deviation ``noise / sqrt(G)`` that every step draws anew.
    """

    def __init__(
        self, seed: int, seq_len: int, group: int, head_dim: int, spread: float = SPREAD, noise: float = NOISE
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.group, self.head_dim = group, head_dim
        direction = torch.randn(head_dim, generator=self.random, dtype=torch.float32)
        self.direction = direction / direction.norm()
        affinity = torch.randn(seq_len, 1, generator=self.random, dtype=torch.float32)
        planted = spread * affinity * head_dim**0.25 * self.direction
        self.k = (planted + noise * self._across(seq_len)).bfloat16()
        self.v = torch.randn(seq_len, head_dim, generator=self.random, dtype=torch.float32).bfloat16()

    def query(self) -> torch.Tensor:
        """The next step's query heads [G, D], bfloat16."""
        shared: torch.Tensor = self.head_dim**0.25 * self.direction
        return (shared + self._across(self.group)).bfloat16()

    def _across(self, rows: int) -> torch.Tensor:
        """Normal vectors [rows, D] without their part along the direction."""
        x = torch.randn(rows, self.head_dim, generator=self.random, dtype=torch.float32)
        along: torch.Tensor = (x @ self.direction)[:, None] * self.direction
        return x - along


class PrescribedWindow:
    """Increments that are given: the keys of the first ``D`` tokens are unit vectors, so the logits are the query.

    The logits are ``spread * a_t`` plus, anew at every step, a part of deviation ``jitter``; the heaviest token is
    moved until it receives ``HEAVY_SHARE`` of a step's attention. One query head; float32; ``tokens + 1`` tokens.
    """

    def __init__(self, seed: int, tokens: int, spread: float = ALONE_SPREAD, jitter: float = ALONE_JITTER) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.tokens, self.jitter, self.group = tokens, jitter, 1
        self.logits = with_heavy_token(spread * torch.randn(tokens, generator=self.random, dtype=torch.float32))
        self.k = torch.eye(tokens + 1, tokens, dtype=torch.float32)
        self.v = torch.randn(tokens + 1, tokens, generator=self.random, dtype=torch.float32)

    def query(self) -> torch.Tensor:
        """The next step's logits as a query head [1, D] for the scale ``D ** -0.5``, float32."""
        logits: torch.Tensor = self.logits + self.jitter * torch.randn(
            self.tokens, generator=self.random, dtype=torch.float32
        )
        return logits[None] * math.sqrt(self.tokens)


def with_heavy_token(logits: torch.Tensor, share: float = HEAVY_SHARE) -> torch.Tensor:
    """Logits [N] whose largest is moved until its softmax is ``share``."""
    heavy = int(logits.argmax())
    rest = torch.cat([logits[:heavy], logits[heavy + 1 :]])
    lifted = logits.clone()
    lifted[heavy] = torch.logsumexp(rest, 0) + torch.log(torch.tensor(share / (1 - share), dtype=torch.float32))
    return lifted
