"""The part of ``kvsieve verify`` for flows that accumulate: their state beside a float64 accumulator."""

from __future__ import annotations

import json
import math
from typing import Any

from kvsieve.cli.progress import progress_bar
from kvsieve.flow import Flow
from kvsieve.verify.accumulator import AccumulatorOptions, run_accumulator, state_dtype_named
from kvsieve.verify.accumulator_report import AccumulatorReport, StatelessReport

__all__ = ["accumulator_command", "accumulator_options", "run_accumulator"]


def accumulator_options(
    *,
    seq_len: int | None = None,
    steps: int | None = None,
    group_size: int | None = None,
    head_dim: int | None = None,
    topk: int | None = None,
    sink: int | None = None,
    recent: int | None = None,
    decay: float | None = None,
    state_dtype: str | None = None,
    seed: int | None = None,
    seeds: int | None = None,
    page_size: int | None = None,
    backend: str | None = None,
    device: str | None = None,
) -> AccumulatorOptions:
    """Options of the command line; what is None keeps its default.

    Raises:
        ConfigError: a value out of range, or an unknown dtype.
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if value is not None}
    if state_dtype is not None:
        given["state_dtype"] = state_dtype_named(state_dtype)
    return AccumulatorOptions(**given)


def accumulator_command(flow: Flow, options: AccumulatorOptions, *, as_json: bool = False) -> int:
    """Run, print, and return the exit code: 0 passed, 1 failed."""
    with progress_bar("accumulator") as progress:
        report: AccumulatorReport | StatelessReport = run_accumulator(flow, options, progress=progress)
    print(json.dumps(finite(report.as_json()), allow_nan=False) if as_json else report.text())
    return 0 if report.passed else 1


def finite(value: Any) -> Any:
    """JSON values in which NaN and infinities, which JSON lacks, are text."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
