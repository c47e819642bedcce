"""What a measurement yields, ready for JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvsieve.backends.base import Tuning


@dataclass(frozen=True)
class Phase:
    """One phase of a step in one layer: seconds (median and least), bytes that had to move, what ran it."""

    name: str
    seconds: float
    least: float
    bytes: int
    kernel: str

    @property
    def bandwidth(self) -> float:
        """Bytes per second at the median."""
        return self.bytes / self.seconds


@dataclass(frozen=True)
class DenseTime:
    """A dense form in one layer. ``fair`` ones read K and V once and serve as the baseline."""

    name: str
    seconds: float
    least: float
    fair: bool


@dataclass(frozen=True)
class Case:
    """A flow at a context length: its phases, the last of which is the whole step, and the dense forms beside it.

    ``kind``: ``sparse``, or one of the cases in which a step has nothing to choose (``under budget``,
    ``budget = length``). ``checked``: segments whose step was compared with float64 before anything was timed.
    ``single``: on a GPU, median and least seconds of a step by itself, the cache flushed; the other times are those
    among many in one graph. ``tuned``: what trying other tilings found.
    """

    kind: str
    context: int
    pages: int
    kept: int
    phases: tuple[Phase, ...]
    dense: tuple[DenseTime, ...]
    checked: int
    single: tuple[float, float] | None = None
    tuned: tuple[Tuning, ...] = ()

    @property
    def step(self) -> Phase:
        """The whole step."""
        return self.phases[-1]

    @property
    def baseline(self) -> DenseTime:
        """The fastest fair dense form."""
        return min((form for form in self.dense if form.fair), key=lambda form: form.seconds)

    @property
    def speedup(self) -> float:
        """How many times faster than the baseline the whole step is, by medians."""
        return self.baseline.seconds / self.step.seconds

    @property
    def least_speedup(self) -> float:
        """The same by the least times: what an undisturbed machine would show."""
        return min(form.least for form in self.dense if form.fair) / self.step.least


@dataclass(frozen=True)
class FlowResult:
    """All cases of a flow."""

    flow: str
    page_size: int
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Measurement:
    """Everything that one run measured. ``copy_bandwidth``: bytes read and written per second by a large copy."""

    setting: dict[str, Any]
    copy_bandwidth: float
    flows: tuple[FlowResult, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, with the ratios that follow from them."""
        data = asdict(self)
        for flow, row in zip(self.flows, data["flows"], strict=True):
            for case, values in zip(flow.cases, row["cases"], strict=True):
                values |= {"baseline": case.baseline.name, "speedup": case.speedup, "least_speedup": case.least_speedup}
                for phase, cell in zip(case.phases, values["phases"], strict=True):
                    cell["bandwidth"] = phase.bandwidth
                    cell["share_of_copy"] = phase.bandwidth / self.copy_bandwidth
        return data
