"""Where the queries, keys and values of a check come from: seeded, and the same wherever a token is asked for again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

Draw = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
FAMILY = 1 << 20  # requests of a family draw from its seed, not from their own


@dataclass(frozen=True)
class LayerShape:
    """A layer: KV heads, query heads per KV head, widths of K and V."""

    heads: int
    group: int
    head_dim: int
    v_head_dim: int

    def sizes(self, tokens: int) -> tuple[tuple[int, int, int], ...]:
        """Sizes of q, k and v: [T, H * G, D], [T, H, D], [T, H, Dv]."""
        heads, width = self.heads, self.head_dim
        return (tokens, heads * self.group, width), (tokens, heads, width), (tokens, heads, self.v_head_dim)


class Data(Protocol):
    """Draws float32 q [n, H * G, D], k [n, H, D], v [n, H, Dv] of a request's tokens ``start .. start + n``.

    ``family`` is (family, tokens): K and V of the first tokens are the family's.
    """

    def tokens(
        self, shape: LayerShape, layer: int, request: int, start: int, count: int, family: tuple[int, int]
    ) -> Draw:
        """The draw."""


class IidData:
    """Independent normal numbers, a generator a token: chunks, forks and crops draw the same tokens again.

    ``q_scale``, ``k_scale``: standard deviations. Subclasses reshape the draw in :meth:`shape_draw`.
    """

    def __init__(self, seed: int, q_scale: float = 1.0, k_scale: float = 1.0) -> None:
        self.seed, self.q_scale, self.k_scale = seed, q_scale, k_scale

    def tokens(
        self, shape: LayerShape, layer: int, request: int, start: int, count: int, family: tuple[int, int]
    ) -> Draw:
        parts = []
        for token in range(start, start + count):
            owner = FAMILY + family[0] if token < family[1] else request
            parts.append(self._token(shape, layer, owner, token))
        if not parts:
            q, k, v = (torch.zeros(size, dtype=torch.float32) for size in shape.sizes(0))
            return q, k, v
        q, k, v = (torch.stack(part) for part in zip(*parts, strict=True))
        return q, k, v

    def shape_draw(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, owner: int, token: int) -> Draw:
        """One token's draw: q [H * G, D], k [H, D], v [H, Dv]."""
        return q, k, v

    def _token(self, shape: LayerShape, layer: int, owner: int, token: int) -> Draw:
        random = torch.Generator().manual_seed(hash((self.seed, layer, owner, token)) % 2**62)
        q, k, v = (torch.randn(size[1:], generator=random, dtype=torch.float32) for size in shape.sizes(1))
        return self.shape_draw(q * self.q_scale, k * self.k_scale, v, layer, owner, token)


class BulkData(IidData):
    """Independent normal numbers, a generator a call: fast, for requests that are neither forked nor cropped."""

    def tokens(
        self, shape: LayerShape, layer: int, request: int, start: int, count: int, family: tuple[int, int]
    ) -> Draw:
        random = torch.Generator().manual_seed(hash((self.seed, layer, request, start)) % 2**62)
        q, k, v = (torch.randn(size, generator=random, dtype=torch.float32) for size in shape.sizes(count))
        return q * self.q_scale, k * self.k_scale, v


class PlantedData(IidData):
    """Heavy hitters and a sink, as real models have them.

    Queries share a direction; one token in ``every`` has a large component along it, and token 0 a larger one.
    """

    def __init__(self, seed: int, every: int = 17, strength: float = 2.0) -> None:
        super().__init__(seed, q_scale=0.5, k_scale=0.5)
        self.every, self.strength = every, strength

    def shape_draw(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, owner: int, token: int) -> Draw:
        direction = torch.ones(q.shape[-1], dtype=torch.float32) / q.shape[-1] ** 0.5
        affinity = 2 * self.strength if token == 0 else self.strength if (token * 7 + owner) % self.every == 0 else 0.0
        return q + 2 * direction, k + affinity * q.shape[-1] ** 0.25 * direction, v


class TopicData(IidData):
    """Topics that come and go: tokens speak of one for ``span`` tokens, then of the next, the first again at last.

    A query looks for its own topic's keys, wherever they lie; some keys of a topic say more than others.
    """

    def __init__(self, seed: int, topics: int = 8, span: int = 100, strength: float = 3.0) -> None:
        super().__init__(seed)
        self.topics, self.span, self.strength = topics, span, strength

    def topic(self, token: int) -> int:
        """What a token speaks of."""
        return token // self.span % self.topics

    def shape_draw(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, owner: int, token: int) -> Draw:
        random = torch.Generator().manual_seed(hash((self.seed, layer, owner, -1 - self.topic(token))) % 2**62)
        direction = torch.nn.functional.normalize(torch.randn(q.shape[-1], generator=random), dim=0)
        direction = self.strength * q.shape[-1] ** 0.25 * direction
        return q / 2 + direction, k + direction, v


class TiedData(IidData):
    """Coarse values: many pages score exactly the same."""

    def shape_draw(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, owner: int, token: int) -> Draw:
        return torch.round(q), torch.round(k / 2) if token % 3 else torch.zeros_like(k), v


class ExtremeData(IidData):
    """Huge and tiny magnitudes side by side, within the range of bfloat16's neighbours."""

    def shape_draw(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, owner: int, token: int) -> Draw:
        scale = (1e-12, 1.0, 30.0)[token % 3]
        return q, k * scale, v * (1e3 if token % 2 else 1e-6)


class BrokenRequestData(IidData):
    """One request's keys hold NaN and infinities; the others must not notice."""

    def __init__(self, seed: int, broken: int = 0) -> None:
        super().__init__(seed)
        self.broken = broken

    def shape_draw(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, owner: int, token: int) -> Draw:
        if owner == self.broken:
            k = k.clone()
            k[:, token % k.shape[1]] = (float("nan"), float("inf"), -float("inf"))[token % 3]
        return q, k, v


KINDS = {"iid": IidData, "planted": PlantedData, "ties": TiedData, "extreme": ExtremeData, "broken": BrokenRequestData}
