"""Scales of charts: values to pixels, and where the ticks lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Values in [low, high], linear or logarithmic, onto pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool
    label: Callable[[float], str]

    def __call__(self, value: float) -> float:
        """Pixel of a value; values outside are drawn at the border."""
        low, high, x = (math.log(max(v, 1e-9)) if self.log else v for v in (self.low, self.high, value))
        share = min(1.0, max(0.0, (x - low) / (high - low)))
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values between low and high."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [digit * 10.0**power for power in decades for digit in (1, 2, 5)]
        else:
            step = _round_up((self.high - self.low) / 6)
            first = math.ceil(self.low / step - 1e-9)
            found = [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [tick for tick in found if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]


def nats(values: Sequence[float], start: float, end: float) -> Scale:
    """A scale for nll: logarithmic where values spread over more than a factor of six."""
    low, high = max(min(values), 1e-3), max(*values, 2e-3)
    if high / low > 6:
        return Scale(low / 1.3, high * 1.3, start, end, True, lambda x: f"{x:.3g}")
    margin = 0.08 * (high - low) or 0.1 * high
    return Scale(max(0.0, low - margin), high + margin, start, end, False, lambda x: f"{x:.3g}")


def shares(values: Sequence[float], start: float, end: float, log: bool) -> Scale:
    """A scale for shares: logarithmic for bytes, else from 0 to 1."""
    if log:
        return Scale(min([*values, 0.5]) / 1.3, max([*values, 1.0]) * 1.15, start, end, True, _percent)
    return Scale(0.0, 1.0, start, end, False, _percent)


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def _round_up(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(digit * power for digit in (1.0, 2.0, 5.0, 10.0) if digit * power >= step * (1 - 1e-9))
