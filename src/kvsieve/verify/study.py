"""How long a window a decayed accumulator can have: per storage dtype, decay = 1 - 2**-k, over long runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvsieve.dtypes import STATE_DTYPES
from kvsieve.flow import build_flow
from kvsieve.reference import rank
from kvsieve.verify.accumulator import Progress, stored_recurrence
from kvsieve.verify.accumulator_data import NOISE, SPREAD, PlantedWindow
from kvsieve.verify.accumulator_flow import ExactScore
from kvsieve.verify.accumulator_report import ERROR, PUBLISHED_FLOW
from kvsieve.verify.rounding import F64

POWERS = tuple(range(1, 13))
STEADY, VARIED = "steady", "varied"
NOISES = {STEADY: 0.02, VARIED: NOISE}
"""How much attention differs from step to step: hardly, and as in the published setting (``PlantedWindow``'s noise)."""
LOOKS = 8
"""Top-k sets are compared at so many steps of the last half."""


@dataclass(frozen=True)
class DecayRow:
    """One dtype, decay and kind of attention.

    ``power``: decay is ``1 - 2**-power``; None: 1. ``stored_decay``: the decay as the dtype holds it. ``agree`` and
    ``agree_sum``: mean top-k overlap with a float64 accumulator of the same recurrence, and with the undecayed float64
    sum; ``recall``: that of the float64 accumulator with the undecayed sum. ``lost``: share of the mass that rounding
    took. ``error``: relative error at the end. ``frozen``: first step from which the heaviest token's value no longer
    moves, None if it still moves in the last tenth of the run.
    """

    dtype: str
    attention: str
    power: int | None
    stored_decay: float
    agree: float
    agree_sum: float
    recall: float
    lost: float
    error: float
    frozen: int | None

    @property
    def decay(self) -> float:
        """The decay that was asked for."""
        return 1.0 if self.power is None else 1 - 2.0**-self.power

    @property
    def works(self) -> bool:
        """Whether the state stays within the relative error that ``kvsieve verify`` allows to 16-bit state."""
        return self.error < ERROR


@dataclass(frozen=True)
class DecayStudy:
    """All rows, and what they were made with."""

    steps: int
    topk: int
    tokens: int
    seed: int
    rows: list[DecayRow]

    def longest(self, dtype: str, attention: str) -> int | None:
        """The largest power up to which every window works; None if none does."""
        best = None
        for row in self.of(dtype, attention):
            if row.power is None or not row.works:
                break
            best = row.power
        return best

    def of(self, dtype: str, attention: str) -> list[DecayRow]:
        """The rows of one curve, in order of the power, the undecayed one last."""
        return [row for row in self.rows if (row.dtype, row.attention) == (dtype, attention)]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        rows = [{**asdict(row), "decay": row.decay, "works": row.works} for row in self.rows]
        setting = {"steps": self.steps, "topk": self.topk, "tokens": self.tokens, "seed": self.seed}
        longest = {dtype: {kind: self.longest(dtype, kind) for kind in NOISES} for dtype in STATE_DTYPES}
        return {**setting, "longest": longest, "rows": rows}


def study_decay(
    steps: int = 20_000,
    seed: int = 0,
    topk: int = 32,
    tokens: int = 116,
    powers: Sequence[int] = POWERS,
    *,
    progress: Progress = lambda done, total: None,
) -> DecayStudy:
    """Sweep dtypes and decays over the increments of the token-level H2O flow on planted heavy hitters.

    Storage follows :func:`stored_recurrence`, which a test holds bit for bit against the state rows of the real stack.

    Args:
        steps: steps of every run; several windows of the longest decay.
        tokens: tokens of the window. topk: of them, how many are chosen.
    """
    rows: list[DecayRow] = []
    decays: list[int | None] = [*powers, None]
    for kind, noise in NOISES.items():
        increments = planted_increments(seed, tokens, steps, noise)
        for power in decays:
            exact = Sweep(increments, 1.0 if power is None else 1 - 2.0**-power, topk)
            for name, dtype in STATE_DTYPES.items():
                rows.append(exact.row(name, dtype, kind, power))
                progress(len(rows), len(NOISES) * len(decays) * len(STATE_DTYPES))
    return DecayStudy(steps, topk, tokens, seed, rows)


def planted_increments(seed: int, tokens: int, steps: int, noise: float) -> torch.Tensor:
    """What the flow adds in each step, float64 [steps, tokens]: attention of the mean query over planted keys."""
    data = PlantedWindow(seed, tokens, group=4, head_dim=128, spread=SPREAD, noise=noise)
    score = ExactScore(build_flow(PUBLISHED_FLOW), data.k[:, None], data.v[:, None], tokens + 1, 0)
    return torch.stack([score.increment("heavy", data.query()) for _ in range(steps)])


class Sweep:
    """One sequence of increments and one decay: the float64 accumulators, against which dtypes are measured."""

    def __init__(self, increments: torch.Tensor, decay: float, topk: int) -> None:
        self.increments, self.decay, self.topk = increments, decay, topk
        steps = len(increments)
        self.looks = sorted({steps - place * steps // (2 * LOOKS) for place in range(LOOKS)})
        self.sums = {look: increments[:look].sum(0) for look in self.looks}
        self.exact: dict[int, torch.Tensor] = {}
        state = torch.zeros(increments.shape[1], dtype=F64)
        for step, increment in enumerate(increments, 1):
            state = increment + decay * state
            if step in self.sums:
                self.exact[step] = state

    def row(self, name: str, dtype: torch.dtype, attention: str, power: int | None) -> DecayRow:
        """Run the recurrence as ``dtype`` stores it, and measure."""
        steps, exact = len(self.increments), self.exact[len(self.increments)]
        heavy = int(exact.argmax())
        seen: dict[int, torch.Tensor] = {}
        heaviest = torch.zeros(steps + 1, dtype=dtype)

        def see(step: int, state: torch.Tensor) -> None:
            heaviest[step] = state[heavy]
            if step in self.sums:
                seen[step] = state

        last = stored_recurrence(self.increments.float(), self.decay, dtype, see).to(F64)
        moves = (heaviest[1:] != heaviest[:-1]).nonzero()
        frozen = int(moves[-1]) + 2 if len(moves) else 1
        return DecayRow(
            dtype=name,
            attention=attention,
            power=power,
            stored_decay=float(torch.tensor(self.decay, dtype=dtype)),
            agree=self._mean_overlap(seen, self.exact),
            agree_sum=self._mean_overlap(seen, self.sums),
            recall=self._mean_overlap(self.exact, self.sums),
            lost=1 - float(last.sum() / exact.sum()),
            error=float((last - exact).abs().max() / exact.abs().max()),
            frozen=frozen if frozen <= steps - steps // 10 else None,
        )

    def _mean_overlap(self, one: dict[int, torch.Tensor], other: dict[int, torch.Tensor]) -> float:
        shared = [len(self._top(one[look]) & self._top(other[look])) for look in self.looks]
        return sum(shared) / len(shared) / self.topk

    def _top(self, values: torch.Tensor) -> set[int]:
        return set(rank(values)[: self.topk])
