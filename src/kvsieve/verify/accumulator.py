"""A decayed accumulator on the real stack beside a float64 one of the same recurrence, over hundreds of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvsieve.errors import ConfigError
from kvsieve.flow import Flow, initial_state
from kvsieve.reference import rank
from kvsieve.verify.accumulator_data import PlantedWindow, WindowData
from kvsieve.verify.accumulator_flow import (
    Accumulator,
    ExactScore,
    find_accumulator,
    with_decay,
    with_state_dtype,
)
from kvsieve.verify.accumulator_options import AccumulatorOptions
from kvsieve.verify.accumulator_report import AccumulatorReport, Outcome, Row, StatelessReport, error_tolerance
from kvsieve.verify.accumulator_reset import check_reset, check_stateless
from kvsieve.verify.accumulator_stack import FixedWindow
from kvsieve.verify.poison import poisoned_pools
from kvsieve.verify.rounding import F64

Progress = Callable[[int, int], None]
"""Told (steps done, steps in all)."""
ROWS = (1, 10, 25, 50, 100, 200, 300, 400, 600, 800, 1200, 2000, 4000, 8000, 16000)


def run_accumulator(
    flow: Flow, options: AccumulatorOptions, *, progress: Progress = lambda done, total: None
) -> AccumulatorReport | StatelessReport:
    """Drive a flow's accumulator on the real stack beside float64, and check its life.

    A flow without state is shown to need no reset instead.

    Raises:
        ConfigError: the options do not fit the flow, or its state is of another kind.
    """
    if flow.mass is not None:
        raise ConfigError(
            f"accumulator harness: expected a flow whose score keeps a state of its own, received {flow!r}, whose "
            "attention mass the runtime keeps; kvsieve verify without options of the harness judges it"
        )
    page_size = options.page_size or flow.page_size or (1 if flow.init_state else 2)
    options.window(page_size)
    flow = flow if options.decay is None else with_decay(flow, options.decay)
    with poisoned_pools():
        found = find_accumulator(flow, page_size, options.head_dim, options.group_size)
        if found is not None:
            return run_with_data(found, options, planted(options), page_size, progress)

        def make(other: bool) -> FixedWindow:
            data = planted(options, 1000 if other else 0)
            return FixedWindow(flow, options.budget, page_size, data, options.backend, options.device)

        return check_stateless(flow, make)


def planted(options: AccumulatorOptions, shift: int = 0) -> list[WindowData]:
    """Planted heavy hitters, a source a seed."""
    shape = options.seq_len, options.group_size, options.head_dim
    first = options.seed + shift
    return [PlantedWindow(seed, *shape) for seed in range(first, first + options.seeds)]


def run_with_data(
    found: Accumulator, options: AccumulatorOptions, data: Sequence[WindowData], page_size: int, progress: Progress
) -> AccumulatorReport:
    """The run over given data; the flow's decay is rounded to the dtype of its state first, as a kernel would."""
    dtype = options.state_dtype or initial_state(found.flow, page_size, options.head_dim)[found.field].dtype
    stored_decay = float(torch.tensor(found.decay, dtype=dtype))
    flow = found.flow if stored_decay == found.decay else with_decay(found.flow, stored_decay)
    stack = FixedWindow(with_state_dtype(flow, dtype), options.budget, page_size, data, options.backend, options.device)
    twins = [ExactSegment(found, one, options, page_size, dtype) for one in data]
    run_steps(stack, twins, options.steps, progress)
    outcomes = [twin.outcome(options.seed + place) for place, twin in enumerate(twins)]
    reset = check_reset(stack, found.field, twins[0].initial)
    return AccumulatorReport(
        repr(found.flow), found.flow.name, options, found.decay, stored_decay, dtype, page_size, outcomes, reset
    )


def run_steps(stack: FixedWindow, twins: Sequence[ExactSegment], steps: int, progress: Progress) -> None:
    """All steps on both sides. The last one runs on forks too, with the opposite query: state must answer to it."""
    for step in range(1, steps + 1):
        queries = [twin.data.query() for twin in twins]
        for twin, query in zip(twins, queries, strict=True):
            twin.add(query)
        requests = list(stack.requests)
        if step == 1:
            stack.first_step(queries)
        elif step < steps:
            stack.step(requests, queries)
        else:
            forks = [stack.runtime.fork(request) for request in requests]
            stack.step([*requests, *forks], [*queries, *(-query for query in queries)])
            changed = stack.state(forks, twins[0].found.field)
            stack.runtime.finish(forks)
        if step in ROWS or step == steps:
            for twin, state in zip(twins, stack.state(requests, twins[0].found.field), strict=True):
                twin.note(step, state)
        progress(step, steps)
    for twin, state in zip(twins, changed, strict=True):
        twin.response = float((state - twin.stored).abs().max())


@dataclass
class ExactSegment:
    """The float64 side of one segment, and what was measured against it."""

    found: Accumulator
    data: WindowData
    options: AccumulatorOptions
    page_size: int
    dtype: torch.dtype
    rows: list[Row] = field(default_factory=list)
    increments: list[float] = field(default_factory=list)
    peak_increment: float = 0.0
    highest: float = 0.0
    response: float = 0.0

    def __post_init__(self) -> None:
        size, sink = self.page_size, self.options.sink
        self.width = self.options.window(size)
        tokens = slice(sink * size, (sink + self.width) * size)
        k, v = (x[tokens].unflatten(0, (self.width, size)) for x in (self.data.k, self.data.v))
        self.exact_score = ExactScore(self.found.flow, k, v, self.options.seq_len, sink * size)
        self.initial = self.exact_score.initial[self.found.field]
        self.exact = self.initial.expand(self.width, *self.initial.shape).clone()
        self.stored = self.exact

    def add(self, query: torch.Tensor) -> None:
        """One step of the recurrence."""
        increment = self.exact_score.increment(self.found.field, query)
        self.exact = increment + self.found.decay * self.exact
        self.increments.append(float(increment.sum()))
        self.peak_increment = max(self.peak_increment, float(increment.abs().max()))

    def note(self, step: int, state: torch.Tensor) -> None:
        """Compare stored state [S, ...] of all pages after a step."""
        self.stored = state
        window = state[self.options.sink : self.options.sink + self.width]
        error = (window - self.exact).abs().max() / self.exact.abs().max()
        self.highest = max(self.highest, float(window.abs().max()))
        agreed, boundary = top_agreement(per_page(window), per_page(self.exact), self.options.topk, self.dtype)
        self.rows.append(Row(step, float(error), float(window.abs().max()), agreed, boundary))

    def outcome(self, seed: int) -> Outcome:
        """All that was measured."""
        sink, decay, steps = self.options.sink, self.found.decay, len(self.increments)
        touched = (self.stored != self.initial).reshape(len(self.stored), -1).any(1)
        inside = torch.zeros(len(touched), dtype=torch.bool)
        inside[sink : sink + self.width] = True
        total = steps if decay == 1 else (1 - decay**steps) / (1 - decay)
        return Outcome(
            seed=seed,
            rows=self.rows,
            mass=float(self.stored[inside].sum()),
            exact_mass=float(self.exact.sum()),
            closed_form=total * sum(self.increments) / steps,
            highest=self.highest,
            bound=self.peak_increment * total,
            response=self.response,
            touched=int(touched.sum()),
            touched_right=bool(torch.equal(touched, inside)),
            pages=len(touched),
            tolerance=error_tolerance(self.dtype, total),
        )


def top_agreement(stored: torch.Tensor, exact: torch.Tensor, topk: int, dtype: torch.dtype) -> tuple[float, float]:
    """Shared part of the two top-k sets of values [W]; gap between the exact k-th and the next, in ulp of ``dtype``."""
    order = rank(exact)
    agreed = len(set(rank(stored)[:topk]) & set(order[:topk])) / topk
    inside, outside = float(exact[order[topk - 1]]), float(exact[order[topk]])
    return agreed, abs(inside - outside) / ulp(max(abs(inside), abs(outside)), dtype)


def ulp(value: float, dtype: torch.dtype) -> float:
    """Distance of a positive value from the next one of a format."""
    info = torch.finfo(dtype)
    exponent = int(torch.frexp(torch.tensor(max(value, info.smallest_normal), dtype=F64)).exponent) - 1
    return float(info.eps) * 2.0**exponent


def per_page(state: torch.Tensor) -> torch.Tensor:
    """State [W, ...] as one number a page."""
    return state.reshape(len(state), -1).sum(1)


def stored_recurrence(
    increments: torch.Tensor, decay: float, dtype: torch.dtype, see: Callable[[int, torch.Tensor], None]
) -> torch.Tensor:
    """The recurrence as the stack stores it: float32 arithmetic, decay rounded to ``dtype``, one rounding a store.

    ``increments`` [steps, N] float32 -> state [N] in ``dtype``; ``see(step, state)`` after every step.
    """
    factor = torch.tensor(decay, dtype=dtype).float()
    state = torch.zeros(increments.shape[1:], dtype=dtype)
    for step, increment in enumerate(increments, 1):
        state = (increment + factor * state.float()).to(dtype)
        see(step, state)
    return state
