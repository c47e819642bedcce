"""The published figures of the H2O accumulator, run again: ours, the band that is accepted, and theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvsieve.flow import build_flow
from kvsieve.verify.accumulator import Progress, planted, run_with_data
from kvsieve.verify.accumulator_data import PrescribedWindow, WindowData
from kvsieve.verify.accumulator_flow import find_accumulator, with_decay
from kvsieve.verify.accumulator_options import AccumulatorOptions
from kvsieve.verify.accumulator_report import PUBLISHED_FLOW, AccumulatorReport, Outcome
from kvsieve.verify.poison import poisoned_pools

SEEDS = 8
WINDOWED, UNDECAYED = 1 - 2**-6, 1.0
ALONE_TOKENS, ALONE_STEPS = 128, 800


@dataclass(frozen=True)
class Band:
    """A figure: how it is read from an outcome, the least and largest value accepted, what was published."""

    name: str
    read: Callable[[Outcome], float]
    low: float
    high: float
    published: str


@dataclass(frozen=True)
class Figure:
    """A figure of one setting over all seeds: from ``least`` to ``most``."""

    setting: str
    name: str
    least: float
    most: float
    low: float
    high: float
    published: str

    @property
    def within(self) -> bool:
        """Whether every seed lies in the band."""
        return self.low <= self.least and self.most <= self.high


@dataclass(frozen=True)
class Setting:
    """A run: the flow's decay, the state's dtype, the data, and what is read from it."""

    name: str
    decay: float
    dtype: torch.dtype
    alone: bool
    bands: Sequence[Band]


def error(low: float, high: float, published: str) -> Band:
    """Relative error: largest difference over largest exact value."""
    return Band("rel. error", lambda outcome: outcome.last.error, low, high, published)


def overlap(low: float, high: float, published: str) -> Band:
    """Shared part of the two top-32 sets."""
    return Band("top-32", lambda outcome: outcome.last.overlap, low, high, published)


def mass(low: float, high: float, published: str) -> Band:
    """Sum of the stored state over the window."""
    return Band("mass", lambda outcome: outcome.mass, low, high, published)


def largest(low: float, high: float, published: str) -> Band:
    """Largest stored value at the end."""
    return Band("max", lambda outcome: outcome.last.peak, low, high, published)


BF16, FP32 = torch.bfloat16, torch.float32
SETTINGS = (
    Setting(
        "bfloat16, decay 1 - 2**-6",
        WINDOWED,
        BF16,
        False,
        (
            error(0.015, 0.033, "1.82e-2; 0.024-0.030"),
            mass(64.3, 64.8, "64.50; 64.4-64.7"),
            overlap(0.90, 1, "100 %; 94-100 %"),
        ),
    ),
    Setting(
        "bfloat16, decay 1",
        UNDECAYED,
        BF16,
        False,
        (
            error(0.30, 0.42, "3.19e-1; 0.32-0.40"),
            mass(425, 447, "445.8; 427-443"),
            overlap(0.45, 0.82, "62 %; 53-72 %"),
        ),
    ),
    Setting("float32, decay 1 - 2**-6", WINDOWED, FP32, False, (error(0, 1e-5, "-"), overlap(1, 1, "-"))),
    Setting("float32, decay 1", UNDECAYED, FP32, False, (error(0, 1e-5, "-"), overlap(1, 1, "-"))),
    Setting(
        "alone, bfloat16, decay 1 - 2**-6",
        WINDOWED,
        BF16,
        True,
        (error(0.002, 0.02, "8.40e-03"), largest(16.5, 18.8, "18.2"), overlap(0.93, 1, "-")),
    ),
    Setting(
        "alone, bfloat16, decay 1",
        UNDECAYED,
        BF16,
        True,
        (error(0.39, 0.43, "4.17e-01"), overlap(0.93, 1, "97 %")),
    ),
)


@dataclass(frozen=True)
class PublishedReport:
    """All figures."""

    figures: list[Figure]
    seeds: int

    @property
    def passed(self) -> bool:
        """Whether every figure lies in its band."""
        return all(figure.within for figure in self.figures)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        figures = [{**asdict(figure), "within": figure.within} for figure in self.figures]
        return {"flow": PUBLISHED_FLOW, "seeds": self.seeds, "figures": figures, "passed": self.passed}


def run_published(
    seed: int = 0, seeds: int = SEEDS, *, progress: Progress = lambda done, total: None
) -> PublishedReport:
    """Run every setting over consecutive seeds on the real stack."""
    figures = []
    for place, setting in enumerate(SETTINGS):
        report = run_setting(setting, seed, seeds)
        for band in setting.bands:
            values = [band.read(outcome) for outcome in report.outcomes]
            figures.append(
                Figure(setting.name, band.name, min(values), max(values), band.low, band.high, band.published)
            )
        progress(place + 1, len(SETTINGS))
    return PublishedReport(figures, seeds)


def run_setting(setting: Setting, seed: int, seeds: int) -> AccumulatorReport:
    """One setting; ``alone`` prescribes the increments, over a window of 128 tokens without sinks."""
    options = AccumulatorOptions(state_dtype=setting.dtype, seed=seed, seeds=seeds)
    data: Sequence[WindowData] = planted(options)
    if setting.alone:
        options = AccumulatorOptions(
            seq_len=ALONE_TOKENS + 1,
            steps=ALONE_STEPS,
            group_size=1,
            head_dim=ALONE_TOKENS,
            sink=0,
            recent=1,
            state_dtype=setting.dtype,
            seed=seed,
            seeds=seeds,
        )
        data = [PrescribedWindow(one, ALONE_TOKENS) for one in range(seed, seed + seeds)]
    with poisoned_pools():
        found = find_accumulator(
            with_decay(build_flow(PUBLISHED_FLOW), setting.decay), 1, options.head_dim, options.group_size
        )
        assert found is not None
        return run_with_data(found, options, data, 1, lambda done, total: None)
