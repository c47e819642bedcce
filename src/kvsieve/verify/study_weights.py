"""What the two weights of the page-level H2O flows do: scale of the terms, and captured attention over their ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvsieve.budget import Budget
from kvsieve.flow import Flow, PageFields, build_flow
from kvsieve.reference import rank
from kvsieve.verify.accumulator import Progress
from kvsieve.verify.data import LayerShape, PlantedData
from kvsieve.verify.recorded import Recorded

FLOWS = ("h2o_sparse_attention", "gqa_h2o_sparse_attention")
RATIOS = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0, 16.0, math.inf)
"""``w_peak / w_avg``: 0 is the mean key alone, infinity the envelope alone."""

EVERY, STRENGTH = 67, 6.0
"""Planted keys: one token in so many is heavy, in one page of four, and how strongly."""


@dataclass(frozen=True)
class WeightsRow:
    """One flow on one kind of keys.

    ``mean_scale``, ``peak_scale``: standard deviation of each term over the window's pages, averaged over steps; it is
    what decides a ranking. ``mean_level``, ``peak_level``: the terms' averages. ``captured``: for each ratio, the share
    of the window's true attention that the chosen pages cover; ``exact``: that of the truly best pages.
    """

    keys: str
    flow: str
    mean_scale: float
    peak_scale: float
    mean_level: float
    peak_level: float
    captured: list[float]
    exact: float

    @property
    def best(self) -> float:
        """The ratio that captures most."""
        return RATIOS[max(range(len(RATIOS)), key=self.captured.__getitem__)]


@dataclass(frozen=True)
class WeightsStudy:
    """All rows; the budget is in pages of ``page_size``."""

    page_size: int
    topk: int
    sink: int
    recent: int
    segments: dict[str, int]
    rows: list[WeightsRow]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; the ratio infinity is the text ``inf``."""
        ratios = [ratio if math.isfinite(ratio) else "inf" for ratio in RATIOS]
        rows = [{**asdict(row), "best": row.best if math.isfinite(row.best) else "inf"} for row in self.rows]
        return {**asdict(self), "ratios": ratios, "rows": rows}


def planted_segments(seed: int, tokens: int = 1024, queries: int = 16, count: int = 8) -> list[Recorded]:
    """Keys with planted heavy hitters and a sink, and queries that share their direction."""
    shape = LayerShape(heads=count, group=4, head_dim=64, v_head_dim=1)
    q, k, _ = PlantedData(seed, EVERY, STRENGTH).tokens(shape, 0, 0, 0, tokens, (0, 0))
    last = q[-queries:].unflatten(1, (count, -1))
    return [Recorded(0, k[:, head], last[:, head], 64**-0.5) for head in range(count)]


def study_weights(
    keys: Mapping[str, Sequence[Recorded]],
    budget: Budget,
    page_size: int = 16,
    *,
    progress: Progress = lambda done, total: None,
) -> WeightsStudy:
    """Rank the window's pages at every ratio of the weights and measure the attention that the choice covers.

    Args:
        keys: segments by the name of their kind.
        budget: pages chosen, and the sink and recent ones that do not compete.
    """
    steps = {
        name: [step for segment in segments for step in steps_of(segment, budget, page_size)]
        for name, segments in keys.items()
    }
    rows = []
    total = sum(len(some) for some in steps.values()) * len(FLOWS)
    done = 0
    for name, some in steps.items():
        for flow in FLOWS:
            ratios = Ratios(flow, budget.topk)
            for step in some:
                ratios.add(step)
                done += 1
                progress(done, total)
            rows.append(ratios.row(name))
    counts = {name: len(segments) for name, segments in keys.items()}
    return WeightsStudy(page_size, budget.topk, budget.sink, budget.recent, counts, rows)


@dataclass(frozen=True)
class WindowStep:
    """One query: its heads ``q`` [G, D], the window's keys by page [W, p, D], true attention of each page [W]."""

    q: torch.Tensor
    pages: torch.Tensor
    attention: torch.Tensor


def steps_of(segment: Recorded, budget: Budget, page_size: int) -> list[WindowStep]:
    """The decode steps of a segment's queries; each sees the tokens up to its own."""
    steps = []
    for place, q in enumerate(segment.q):
        length = len(segment.k) - len(segment.q) + place + 1
        pages = -(-length // page_size)
        tokens = slice(budget.sink * page_size, (budget.sink + budget.window(pages)) * page_size)
        seen = torch.softmax(q @ segment.k[:length].T * segment.scale, -1).sum(0)
        attention = seen[tokens].unflatten(0, (-1, page_size)).sum(1)
        steps.append(WindowStep(q, segment.k[tokens].unflatten(0, (-1, page_size)), attention))
    return steps


class Ratios:
    """Sums over steps for one flow: scales of the two terms, and captured attention at each ratio."""

    def __init__(self, flow: str, topk: int) -> None:
        self.flow, self.topk, self.steps = flow, topk, 0
        self.flows = [build_flow(flow, **weights(ratio)) for ratio in RATIOS]
        self.terms = torch.zeros(4, dtype=torch.float32)
        self.captured = torch.zeros(len(RATIOS) + 1, dtype=torch.float32)

    def add(self, step: WindowStep) -> None:
        """Score one step with every ratio, by the flow's own code."""
        fields = summarize(self.flows[0], step)
        scores = [score(flow, step.q, fields) for flow in self.flows]
        mean, peak = scores[0], scores[-1]
        self.terms += torch.stack([mean.std(), peak.std(), mean.mean(), peak.mean()])
        total = step.attention.sum()
        shares = [step.attention[rank(one)[: self.topk]].sum() / total for one in (*scores, step.attention)]
        self.captured += torch.stack(shares)
        self.steps += 1

    def row(self, keys: str) -> WeightsRow:
        """Averages over the steps."""
        *captured, exact = (self.captured / self.steps).tolist()
        mean_scale, peak_scale, mean_level, peak_level = (self.terms / self.steps).tolist()
        return WeightsRow(keys, self.flow, mean_scale, peak_scale, mean_level, peak_level, captured, exact)


def weights(ratio: float) -> dict[str, float]:
    """Weights of a ratio; the mean term's is 1 where it counts."""
    return {"w_avg": 1.0, "w_peak": ratio} if math.isfinite(ratio) else {"w_avg": 0.0, "w_peak": 1.0}


def summarize(flow: Flow, step: WindowStep) -> PageFields:
    """Summary fields of a step's pages; the weights do not enter them."""
    assert flow.summarize is not None
    summaries = [flow.summarize(page, page) for page in step.pages]
    return PageFields({name: torch.stack([summary[name] for summary in summaries]) for name in summaries[0]})


def score(flow: Flow, q: torch.Tensor, fields: PageFields) -> torch.Tensor:
    """Scores [W] of one step."""
    assert flow.score is not None
    result = flow.score(q, fields)
    assert isinstance(result, torch.Tensor)
    return result
