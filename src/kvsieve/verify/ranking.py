"""The order of scores: NaN, infinities, both zeros, negative numbers, neighbours in float32, ties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from kvsieve.budget import Budget
from kvsieve.flow import Flow
from kvsieve.verify.checks import Numbers
from kvsieve.verify.data import Draw, IidData, LayerShape
from kvsieve.verify.poison import poisoned_pools
from kvsieve.verify.subject import Subject

INFINITY = float("inf")
SCORES = (
    float("nan"),
    -INFINITY,
    -3.0,
    -2.0,
    -1e-30,
    -0.0,
    0.0,
    1e-30,
    1.0,
    1 + 2.0**-23,
    1 + 2.0**-22,
    3e38,
    INFINITY,
)
MIXES = ((0, 1, 2), (5, 6, 2), (2, 3, 4), (8, 9, 10), (0, 5, 6, 12), (0, 4, 7), tuple(range(len(SCORES))))
"""Which scores the pages of a request have: each mix puts another pair at the boundary of the top-k."""


class Planted(Flow):
    """``score[w]`` is the planted score that the first key of page ``w`` names."""

    name = "planted scores"

    def __init__(self) -> None:
        self.scores = torch.tensor(SCORES)

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.scores[pages["k"][:, 0, 0].long()]


class PlantedScores(IidData):
    """The first element of a key is the number of a score in its request's mix."""

    def shape_draw(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, owner: int, token: int) -> Draw:
        mix = torch.tensor(MIXES[owner % len(MIXES)], dtype=k.dtype)
        random = torch.Generator().manual_seed(hash((self.seed, owner, token)) % 2**62)
        k = k.clone()
        k[:, 0] = mix[torch.randint(len(mix), k.shape[:1], generator=random)]
        return q, k, v


def check_ranking(subject: Subject) -> Numbers:
    """Every mix in one batch, for a dozen steps; the flow is the check's own."""
    p = 2
    ranked = replace(subject, flow=Planted(), given_budget=Budget(3, 1, 1))
    with poisoned_pools():
        twin = ranked.twin([LayerShape(3, 2, 6, 6)], PlantedScores(subject.seed), page_size=p, judged=0.1)
        requests = [twin.admit() for _ in MIXES]
        twin.extend(requests, [(8 + i) * p for i in range(len(MIXES))], compare=False)
        for _ in range(12):
            twin.step(requests)
    return twin.numbers
