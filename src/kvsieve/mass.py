"""Attention mass: what a flow asks for, and the host's arithmetic of its lazily decayed store.

Mass is the attention probability that each token has received, decayed with every query:
``m <- decay * m + sum_g softmax(scale * q_g . k)`` (H2O, arXiv 2306.14048, Algorithm 1, which has ``decay = 1``).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import torch

from kvsieve.errors import ConfigError

KEEP_DECAY = 0.9
"""What ``decay=None`` stands for where unselected K and V stay."""
EVICT_DECAY = 1 - 2.0**-6
"""What ``decay=None`` stands for where tokens are evicted."""
FIELDS = ("mass", "mass_sum")
"""State fields that the runtime writes: mass per token [p], and its sum over the page."""

_REDUCTIONS = ("sum", "mean", "max")
_WINDOW = re.compile(r"window:([1-9][0-9]*)")
LARGEST_UNIT = 2.0**60
"""Of stored mass per mass of 1: the store is rebased before it grows larger."""
_LEAST_WEIGHT = 2.0**-32


@dataclass(frozen=True)
class AttentionMass:
    """Asks the runtime to keep the attention mass of every token.

    Args:
        decay: 0 or in [0.01, 1]: what a query leaves of the earlier ones' mass; None: 0.9 where everything is kept,
            ``1 - 2**-6`` where tokens are evicted.
        group: how the probabilities of a group's query heads become one number: ``sum``, ``mean`` or ``max``.
        seed: which prompt queries count: ``all``, the last N (``window:N``, an approximation), or ``none``.
        update: ``steps``: decode steps add to the mass; ``none``: they leave it, decay included.

    Raises:
        ConfigError: a value outside of these.
    """

    decay: float | None = None
    group: str = "sum"
    seed: str = "all"
    update: str = "steps"

    def __post_init__(self) -> None:
        decay = self.decay
        number = isinstance(decay, (int, float)) and not isinstance(decay, bool)
        if decay is not None and not (number and (decay == 0 or 0.01 <= decay <= 1)):
            raise ConfigError(f"AttentionMass(decay=): expected 0, a number in [0.01, 1] or None, received {decay!r}")
        if self.group not in _REDUCTIONS:
            raise ConfigError(f"AttentionMass(group=): expected {', '.join(_REDUCTIONS)}, received {self.group!r}")
        if self.seed not in ("all", "none") and not (isinstance(self.seed, str) and _WINDOW.fullmatch(self.seed)):
            raise ConfigError(f"AttentionMass(seed=): expected all, window:N or none, received {self.seed!r}")
        if self.update not in ("steps", "none"):
            raise ConfigError(f"AttentionMass(update=): expected steps or none, received {self.update!r}")

    @property
    def factor(self) -> float:
        """The decay, resolved."""
        return KEEP_DECAY if self.decay is None else float(self.decay)

    def where_evicted(self) -> AttentionMass:
        """The same mass where tokens are evicted by it: None stands for another decay there."""
        return replace(self, decay=EVICT_DECAY) if self.decay is None else self

    @property
    def window(self) -> int | None:
        """N of ``window:N``, else None."""
        found = _WINDOW.fullmatch(self.seed)
        return int(found[1]) if found else None

    def reduce(self, probabilities: torch.Tensor, dim: int) -> torch.Tensor:
        """Probabilities of a group's query heads, reduced over ``dim``."""
        if self.group == "sum":
            return probabilities.sum(dim)
        return probabilities.mean(dim) if self.group == "mean" else probabilities.amax(dim)

    def row_weights(self, rows: int) -> list[float]:
        """What each of ``rows`` consecutive queries still counts for after the last of them: ``decay ** age``."""
        return [self.factor ** (rows - 1 - row) for row in range(rows)]

    def significant(self, rows: int) -> int:
        """How many of the last ``rows`` queries count: the others' weight is below rounding."""
        if self.factor in (0.0, 1.0):
            return min(rows, 1) if self.factor == 0 else rows
        return min(rows, 1 + math.floor(math.log(_LEAST_WEIGHT) / math.log(self.factor)))


@dataclass(frozen=True)
class MassUpdate:
    """What some consecutive queries of a request do to its stored mass.

    The store holds ``mass / decay ** age``, so that a query touches what it attended and nothing else. ``rows``: how
    many queries; ``first``: position of the first. ``rebase``: what the store is multiplied by beforehand, where
    ``unit`` would grow too large. ``unit``: stored value of a mass of 1 that the last of the queries adds.
    """

    rows: int
    first: int
    rebase: float | None
    unit: float


@dataclass(frozen=True)
class RequestMass:
    """What a call does to the mass of one of its requests, in this order.

    Of ``surviving`` kept queries the last are ``committed``; a step scores with stored values times ``scale``; the new
    queries are ``counted``, or so many are ``kept`` (with those that survived) for a later call.
    """

    surviving: int = 0
    committed: MassUpdate | None = None
    scale: float = 1.0
    counted: MassUpdate | None = None
    kept: int = 0


@dataclass
class MassLedger:
    """A request's mass as the host knows it.

    ``age``: decays that the store has not seen. ``pending``: last queries that are kept and not yet counted, so that a
    crop can take them back, or because a window of them is counted when the prompt ends.
    """

    age: int = 0
    pending: int = 0

    def call(self, mass: AttentionMass, start: int, count: int, decode: bool, croppable: int) -> RequestMass:
        """Account for a call of ``count`` queries from position ``start``; ``croppable``: so many can be taken back."""
        surviving, window = self.pending, mass.window
        if window is not None and not decode:  # which queries are the last ones is known when the prompt has ended
            self.pending = min(surviving + count, window + croppable)
            return RequestMass(surviving, kept=self.pending)
        rows = surviving if window is None else min(window, surviving)
        committed = self._update(mass, rows, start - rows) if rows else None
        self.pending, scale, counted = 0, mass.factor**self.age, None
        if decode and mass.update == "steps":
            counted = self._update(mass, 1, start)
        elif not decode and mass.seed != "none":
            if count > croppable:
                counted = self._update(mass, count, start)
            else:
                self.pending = count
        return RequestMass(surviving, committed, scale, counted, self.pending)

    def crop(self, removed: int) -> None:
        """The last ``removed`` tokens of the request are taken back."""
        self.pending = max(0, self.pending - removed)

    def _update(self, mass: AttentionMass, rows: int, first: int) -> MassUpdate:
        age, rebase = self.age + rows, None
        if age and mass.factor**age * LARGEST_UNIT < 1:
            age, rebase = 0, mass.factor**age
        self.age = age
        return MassUpdate(rows, first, rebase, mass.factor**-age)
