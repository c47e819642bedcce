"""Verdicts: per flow a few lines for a person, or JSON for a program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsieve.verify.checks import Fault, Numbers
from kvsieve.verify.suite import Outcome

NARROW_ULP = 1.0
NATURAL = ("planted", "iid", "options", "grid")


@dataclass(frozen=True)
class FlowReport:
    """What the checks said of one flow."""

    flow: str
    backend: str
    dtype: str
    device: str
    outcomes: Sequence[Outcome]
    seconds: float
    seed: int = 0
    total: Numbers = field(init=False)

    def __post_init__(self) -> None:
        total = Numbers()
        for outcome in self.outcomes:
            total.merge(outcome.numbers)
        object.__setattr__(self, "total", total)

    @property
    def passed(self) -> bool:
        return all(outcome.error is None for outcome in self.outcomes)

    @property
    def boundary(self) -> float:
        """The narrowest top-k boundary on natural data, in ulp; checks that plant ties would always say 0."""
        return min((one.numbers.boundary for one in self.outcomes if one.check in NATURAL), default=math.inf)

    def as_json(self) -> dict[str, Any]:
        """A machine-readable verdict; infinities are null."""
        total = self.total
        return {
            "flow": self.flow,
            "passed": self.passed,
            "backend": self.backend,
            "dtype": self.dtype,
            "device": self.device,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "selections": {"compared": total.selections, "equal_to_reference": total.agreed},
            "boundary_ulp": self.boundary if math.isfinite(self.boundary) else None,
            "state_drift": total.drift,
            "worst_of_bound": {stage: ratio for stage, ratio in total.worst.items() if ratio},
            "comparisons": total.checked,
            "checks": [_outcome_json(outcome) for outcome in self.outcomes],
        }

    def text(self) -> str:
        """The verdict in a few lines; every failed check says what is wrong, where, and by how much."""
        total = self.total
        good = sum(outcome.error is None for outcome in self.outcomes)
        verdict, compared = "CORRECT" if self.passed else "WRONG", sum(total.checked.values())
        lines = [
            f"{self.flow}: {verdict} on {self.backend} ({self.dtype}, {self.device}): {good} of {len(self.outcomes)} "
            f"checks, {compared:,} comparisons, {self.seconds:.0f} s of work"
        ]
        worst = ", ".join(f"{stage} {ratio:.2f}" for stage, ratio in sorted(total.worst.items()) if ratio)
        if worst:
            lines.append(f"  largest error over its bound: {worst}")
        if total.selections:
            lines.append(f"  selections equal to the float64 reference: {total.agreed:,} of {total.selections:,}")
        if self.boundary < NARROW_ULP:
            lines.append(
                f"  top-k within rounding: the narrowest boundary was {self.boundary:.2g} ulp of float32; below one "
                "ulp no implementation can tell the order, and the older page stays"
            )
        if total.drift:
            lines.append(f"  state drift from the reference's own trajectory: {total.drift:.2g} relative")
        lines += [f"  FAILED {outcome.check}: {_message(outcome.error)}" for outcome in self.outcomes if outcome.error]
        return "\n".join(lines)


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    result: dict[str, Any] = {"check": outcome.check, "passed": outcome.error is None}
    if outcome.error is not None:
        result["error"] = _message(outcome.error)
        if isinstance(outcome.error, Fault):
            result |= {"stage": outcome.error.stage, "place": outcome.error.place}
    return result


def _message(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, Fault) else f"{type(error).__name__}: {text}"
