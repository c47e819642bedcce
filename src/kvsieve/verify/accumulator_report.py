"""What an accumulator run says: trajectory, mass, life of the state, verdict; beside what was published."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvsieve.dtypes import torch_name
from kvsieve.verify.accumulator_options import AccumulatorOptions

ERROR, LOST, RESPONSE, WITHIN = 0.15, 0.10, 1e-4, 1.0
"""Tolerances: relative error; share of mass lost; least answer to a changed last step; boundary in ulp that excuses."""
SINGLE_ERROR = 1e-5
"""Relative error of a float32 state, unless its window is so long that worst-case rounding exceeds it."""
SLACK = 1.1
PUBLISHED_FLOW = "h2o_token_sparse_attention"
"""The flow of the published figures, and of the studies."""
PUBLISHED = {
    (0.984375, "bfloat16"): "published, one seed: mass 64.50 of 64.00, rel. error 1.82e-2, top-32 100 %; "
    "over eight: 0.024-0.030, 64.4-64.7, 94-100 %",
    (1.0, "bfloat16"): "published, one seed: mass 445.8 of 600, rel. error 3.19e-1, top-32 62 %; "
    "over eight: 0.32-0.40, 427-443, 53-72 %",
}


@dataclass(frozen=True)
class Row:
    """One line of the trajectory: relative error and maximum of the stored state, top-k overlap, boundary in ulp."""

    step: int
    error: float
    peak: float
    overlap: float
    boundary: float


@dataclass(frozen=True)
class Outcome:
    """What one seed gave. ``closed_form``: the mass that equal steps would retain; ``touched``: pages with state."""

    seed: int
    rows: list[Row]
    mass: float
    exact_mass: float
    closed_form: float
    highest: float
    bound: float
    response: float
    touched: int
    touched_right: bool
    pages: int
    tolerance: float = ERROR

    @property
    def last(self) -> Row:
        """The trajectory's last line."""
        return self.rows[-1]

    @property
    def lost(self) -> float:
        """Share of the mass that rounding took; negative where it added."""
        return 1 - self.mass / self.exact_mass

    def faults(self) -> list[str]:
        """What is beyond the tolerances, in words."""
        last, found = self.last, []
        if not last.error < self.tolerance:
            found.append(f"relative error {last.error:.3g} is not below {self.tolerance:.3g}")
        if last.overlap < 1 and not last.boundary < WITHIN:
            found.append(f"top-k agrees to {last.overlap:.0%} although its boundary is {last.boundary:.1f} ulp wide")
        if not abs(self.lost) <= LOST:
            found.append(f"rounding took {self.lost:.1%} of the mass, more than {LOST:.0%}")
        if not self.highest <= SLACK * self.bound:
            found.append(f"state reaches {self.highest:.3g}, beyond its bound {self.bound:.3g}")
        if not self.response > RESPONSE:
            found.append(f"a changed last step moves state by {self.response:.2g} only")
        if not self.touched_right:
            found.append(f"state differs from its initial value on {self.touched} pages that are not the window")
        return [f"seed {self.seed}: {fault}" for fault in found]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "lost": self.lost, "faults": self.faults()}


@dataclass(frozen=True)
class Reset:
    """State rows after a request ended and another was admitted into them.

    ``reused``: rows that a former request had written. ``clean``: all of them held exactly the initial value.
    ``noticed``: with the reset skipped on purpose, the same comparison finds leftovers.
    """

    reused: int
    clean: bool
    noticed: bool

    @property
    def passed(self) -> bool:
        """Rows were reused, were clean, and would not have been without the reset."""
        return self.reused > 0 and self.clean and self.noticed

    def faults(self) -> list[str]:
        """What is wrong, in words."""
        found = [] if self.reused else ["no state row of a finished request was reused: the check says nothing"]
        found += [] if self.clean else ["state of a new request does not start at its initial value"]
        return found + ([] if self.noticed else ["the check does not notice a reset that is skipped"])


@dataclass(frozen=True)
class AccumulatorReport:
    """All of a run. ``stored_decay``: the decay as the state's dtype holds it."""

    flow: str
    name: str
    options: AccumulatorOptions
    decay: float
    stored_decay: float
    dtype: torch.dtype
    page_size: int
    outcomes: list[Outcome]
    reset: Reset

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words; empty when all is well."""
        return [fault for outcome in self.outcomes for fault in outcome.faults()] + self.reset.faults()

    @property
    def passed(self) -> bool:
        """The verdict."""
        return not self.faults

    @property
    def dtype_name(self) -> str:
        """``bfloat16``, ``float16`` or ``float32``."""
        return torch_name(self.dtype)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        options = {key: value for key, value in asdict(self.options).items() if key not in ("state_dtype", "decay")}
        return {
            "flow": self.flow,
            "name": self.name,
            **options,
            "page_size": self.page_size,
            "decay": self.decay,
            "stored_decay": self.stored_decay,
            "state_dtype": self.dtype_name,
            "outcomes": [outcome.as_json() for outcome in self.outcomes],
            "reset": {**asdict(self.reset), "passed": self.reset.passed},
            "published": self.published(),
            "faults": self.faults,
            "passed": self.passed,
        }

    def published(self) -> str | None:
        """The published figures, if this is their setting."""
        o = self.options
        same = (o.seq_len, o.steps, o.group_size, o.head_dim, o.topk, o.sink, o.recent) == (128, 600, 4, 128, 32, 4, 8)
        same = same and self.name == PUBLISHED_FLOW
        return PUBLISHED.get((self.decay, self.dtype_name)) if same else None

    def text(self) -> str:
        """The report for reading."""
        o = self.options
        lines = [
            f"{self.flow}",
            f"{o.steps} steps over {o.seq_len} tokens (pages of {self.page_size}: {o.sink} sink, top {o.topk}, "
            f"{o.recent} recent), G {o.group_size}, D {o.head_dim}; state {self.dtype_name}, decay {self.decay:.10g}"
            + (f", which {self.dtype_name} holds as {self.stored_decay:.10g}" * (self.stored_decay != self.decay)),
        ]
        for outcome in self.outcomes:
            lines += ["", *outcome_lines(outcome, o.topk)]
        if self.published() is not None:
            lines += ["", str(self.published())]
        return "\n".join([*lines, "", *self.verdict()])

    def verdict(self) -> list[str]:
        """The reset in a line, then PASS or FAIL with the reasons."""
        reset = self.reset
        clean = "start at the initial value" if reset.clean else "DO NOT start at the initial value"
        noticed = "would be noticed" if reset.noticed else "would NOT be noticed"
        line = f"reuse: {reset.reused} rows that a finished request had written {clean}; a skipped reset {noticed}"
        if self.passed:
            return [line, "PASS"]
        return [line, *(f"FAIL: {fault}" for fault in self.faults)]


def error_tolerance(dtype: torch.dtype, window: float) -> float:
    """Relative error allowed to a state stored in ``dtype`` that adds up ``window`` steps' worth of increments."""
    return max(SINGLE_ERROR, window * 2.0**-24) if dtype is torch.float32 else ERROR


def outcome_lines(outcome: Outcome, topk: int) -> list[str]:
    """One seed for reading."""
    head = f"seed {outcome.seed}:  step   rel. error        max   top-{topk}   boundary/ulp"
    rows = [
        f"{row.step:>{len(str(outcome.seed)) + 12}}   {row.error:10.2e}   {row.peak:8.4g}   {row.overlap:5.0%}   "
        f"{row.boundary:10.3g}"
        for row in outcome.rows
    ]
    return [
        head,
        *rows,
        f"  mass {outcome.mass:.2f}; float64 {outcome.exact_mass:.2f}; closed form {outcome.closed_form:.2f}; "
        f"lost to rounding {outcome.lost:.2%}",
        f"  highest {outcome.highest:.4g}, bound {outcome.bound:.4g}; an opposite last query moves state by "
        f"{outcome.response:.2g}; state on {outcome.touched} of {outcome.pages} pages"
        + (", exactly the window" if outcome.touched_right else ""),
    ]


@dataclass(frozen=True)
class StatelessReport:
    """A flow without state: nothing is carried over, so nothing needs a reset.

    ``blocks``: blocks of a finished request that were reused; ``same``: scores in them equal those in fresh memory.
    """

    flow: str
    blocks: int
    same: bool

    @property
    def passed(self) -> bool:
        """Blocks were reused and nothing of their past shows."""
        return self.blocks > 0 and self.same

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "state": False, "passed": self.passed}

    def text(self) -> str:
        """The report for reading."""
        found = "equal, bit for bit, those in fresh memory" if self.same else "DIFFER from those in fresh memory"
        return (
            f"{self.flow}\nkeeps no state, so there is nothing to reset: scores in {self.blocks} blocks of a finished "
            f"request {found}\n{'PASS' if self.passed else 'FAIL'}"
        )
