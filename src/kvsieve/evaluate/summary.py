"""Results as numbers to read: means over samples, differences to dense and to the oracle, shares per layer and head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvsieve.evaluate.contenders import DENSE, ORACLE, Contender, reference
from kvsieve.evaluate.run import Setting, Wish
from kvsieve.evaluate.store import Key, Result, ResultStore

Map = list[list[float]]


@dataclass(frozen=True)
class Figure:
    """A mean over samples and its standard error; None for a single sample."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """Of at least one value."""
        mean = math.fsum(values) / len(values)
        if len(values) < 2:
            return cls(mean, None)
        variance = math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1)
        return cls(mean, math.sqrt(variance / len(values)))


@dataclass(frozen=True)
class Row:
    """One contender on one task, context and budget.

    Attributes:
        nll: nats per answer token. exact: share of wholly right answers. accuracy: share of right tokens.
        over_dense, over_oracle: nll minus that of dense, and of the oracle selection at the same budget and page size,
            sample by sample; None: not run.
        kv_bytes, field_bytes, dense_bytes: per decode step and sequence, all layers together.
        stored: share of the context's K and V that stays in memory.
        captured, window, recall: means over layers and heads; ``maps`` has them per layer and KV head.
    """

    task: str
    context: int
    tokens: int
    contender: str
    rule: str
    page_size: int
    samples: int
    nll: Figure
    exact: float
    accuracy: float
    over_dense: Figure | None
    over_oracle: Figure | None
    kv_bytes: float
    field_bytes: float
    dense_bytes: float
    stored: float
    captured: float
    window: float
    recall: float
    layers: list[int]
    maps: dict[str, Map]

    @property
    def bytes_read(self) -> float:
        """K/V attended and what scoring read and wrote, relative to dense attention."""
        return (self.kv_bytes + self.field_bytes) / self.dense_bytes

    def as_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        figures = ("nll", "over_dense", "over_oracle")
        plain = {name: vars(value) if name in figures and value else value for name, value in vars(self).items()}
        return {**plain, "bytes_read": self.bytes_read}


@dataclass(frozen=True)
class Summary:
    """An evaluation: its setting, what was asked, and a row per contender, task, context and budget."""

    setting: Setting
    wish: Wish
    rows: list[Row]

    def as_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**self.setting.as_json(), "samples": self.wish.samples, "rows": [row.as_json() for row in self.rows]}

    def of(self, task: str, context: int) -> list[Row]:
        """Rows of one task and context."""
        return [row for row in self.rows if (row.task, row.context) == (task, context)]


def summarize(setting: Setting, wish: Wish, store: ResultStore) -> Summary:
    """The rows of a wish that is wholly in the store, in the order of the wish."""
    rows = []
    for task in wish.tasks:
        for context in wish.contexts:
            groups = list(wish.keys(task, context, range(wish.samples)))
            known = {(who.name, keys[0].tokens): [store.results[key] for key in keys] for who, keys in groups}
            dense = next(
                (results for who, results in zip(groups, known.values(), strict=True) if who[0].rule == DENSE), None
            )
            for who, keys in groups:
                best = known.get((reference(ORACLE, who.page_size).name, keys[0].tokens))
                rows.append(_row(who, keys[0], known[who.name, keys[0].tokens], dense, best))
    return Summary(setting, wish, rows)


def _row(who: Contender, key: Key, results: list[Result], dense: list[Result] | None, best: list[Result] | None) -> Row:
    outcomes = [result.outcome for result in results]
    maps = {name: mean_map([one.shares[name] for one in outcomes]) for name in ("captured", "window", "recall")}
    read = {
        name: Figure.of([getattr(one, name) for one in outcomes]).mean
        for name in ("kv_bytes", "field_bytes", "dense_bytes")
    }
    return Row(
        key.task,
        key.context,
        key.tokens,
        who.name,
        who.rule,
        who.page_size,
        len(outcomes),
        Figure.of([one.nll for one in outcomes]),
        exact=Figure.of([one.exact for one in outcomes]).mean,
        accuracy=Figure.of([one.accuracy for one in outcomes]).mean,
        over_dense=_difference(results, dense),
        over_oracle=_difference(results, best),
        **read,
        stored=who.stored(key.tokens, key.context),
        **{name: mean_of(values) for name, values in maps.items()},
        layers=outcomes[0].layers,
        maps=maps,
    )


def _difference(results: list[Result], others: list[Result] | None) -> Figure | None:
    if others is None:
        return None
    return Figure.of([a.outcome.nll - b.outcome.nll for a, b in zip(results, others, strict=True)])


def mean_map(maps: Sequence[Map]) -> Map:
    """The mean of maps of one shape, layer by layer and head by head."""
    return [[math.fsum(values) / len(maps) for values in zip(*heads, strict=True)] for heads in zip(*maps, strict=True)]


def mean_of(values: Map) -> float:
    """The mean over layers and heads."""
    flat = [value for heads in values for value in heads]
    return math.fsum(flat) / len(flat)
