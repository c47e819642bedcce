"""Running the suite: one flow or many, in worker processes, and the helper for a user's own tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvsieve.dtypes import DTYPES, dtype_name
from kvsieve.flow import Flow, load_flow
from kvsieve.verify.checks import Numbers
from kvsieve.verify.programs import FuzzResult, fuzz
from kvsieve.verify.report import FlowReport
from kvsieve.verify.subject import Subject
from kvsieve.verify.suite import CHECKS, GRID, Check, Outcome, run_check
from kvsieve.workers import Workers

FUZZ_CHUNK = 20
"""Programmes a worker takes at a time."""


@dataclass(frozen=True)
class Order:
    """A flow by name or ``file.py:Class`` with its arguments, and where it is to run."""

    flow: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "eager"
    dtype: str = "fp32"
    device: str = "cpu"
    seed: int = 0

    def subject(self) -> Subject:
        flow = load_flow(self.flow, **self.arguments)
        return Subject(flow, self.backend, DTYPES[self.dtype], self.device, self.seed)


def verify_flow(flow: Flow | str, checks: Sequence[Check] = CHECKS, **where: Any) -> FlowReport:
    """Check a flow in this process.

    Args:
        flow: a flow, the name of a registered one, or ``file.py:ClassName``.
        checks: which checks; :data:`CHECKS` by default.
        where: ``backend``, ``dtype``, ``device``, ``seed`` of :class:`Subject`.
    """
    subject = Subject(load_flow(flow) if isinstance(flow, str) else flow, **where)
    start = time.perf_counter()
    outcomes = [run_check(check, subject) for check in checks]
    return report(subject, outcomes, time.perf_counter() - start)


def assert_flow_correct(flow: Flow | str, **where: Any) -> None:
    """For a user's test: raises AssertionError with the verdict unless every check passes.

    ``where`` is as in :func:`verify_flow`.
    """
    result = verify_flow(flow, **where)
    assert result.passed, result.text()


def verify_all(
    orders: Sequence[Order], grid: bool, jobs: int, progress: Callable[[], None] = lambda: None
) -> Iterable[FlowReport]:
    """Check many flows in ``jobs`` worker processes; ``grid`` adds the whole grid of geometries. Reports in order."""
    names = [*(["grid"] if grid else []), *(check.name for check in CHECKS)]
    tasks = [(index, name) for name in names for index in range(len(orders))]
    outcomes: dict[tuple[int, str], Outcome] = {}
    spent = [0.0] * len(orders)
    with Workers(jobs, torch.set_num_threads, 1) as pool:
        futures = {pool.submit(_work, orders[index], name): (index, name) for index, name in tasks}
        for future in pool.completed():
            index, name = futures[future]
            outcomes[index, name], seconds = future.result()
            spent[index] += seconds
            progress()
    for index, order in enumerate(orders):
        yield report(order.subject(), [outcomes[index, name] for name in names], spent[index])


def fuzz_in_parallel(
    programs: int,
    events: int,
    seed: int,
    flow: str | None,
    backend: str,
    jobs: int,
    progress: Callable[[int], None] = lambda count: None,
    *,
    dtype: str = "fp32",
    device: str = "cpu",
) -> FuzzResult:
    """:func:`fuzz` in worker processes; the same programmes as in one, and the first failing one of a worker."""
    if jobs == 1:
        return fuzz(programs, events, seed, flow, backend, lambda: progress(1), dtype=dtype, device=device)
    done = FuzzResult(0, 0, Numbers())
    starts = range(0, programs, FUZZ_CHUNK)
    with Workers(jobs, torch.set_num_threads, 1) as pool:
        for start in starts:
            count = min(FUZZ_CHUNK, programs - start)
            pool.submit(fuzz, count, events, seed + start, flow, backend, dtype=dtype, device=device)
        for future in pool.completed():
            part: FuzzResult = future.result()
            done.numbers.merge(part.numbers)
            done = FuzzResult(
                done.programs + part.programs, done.events + part.events, done.numbers, part.failing, part.error
            )
            progress(part.programs)
            if part.failing is not None:
                pool.shutdown(cancel_futures=True)
                return done
    return done


def report(subject: Subject, outcomes: Sequence[Outcome], seconds: float) -> FlowReport:
    """The report of a subject's outcomes."""
    backend = subject.backend if isinstance(subject.backend, str) else subject.backend.name
    return FlowReport(subject.name, backend, dtype_name(subject.dtype), subject.device, outcomes, seconds, subject.seed)


def _work(order: Order, name: str) -> tuple[Outcome, float]:
    start = time.perf_counter()
    check = next(check for check in (GRID, *CHECKS) if check.name == name)
    outcome = run_check(check, order.subject())
    return outcome, time.perf_counter() - start
