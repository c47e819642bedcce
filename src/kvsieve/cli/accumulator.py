"""The part of ``kvsieve verify`` for flows that accumulate: their state beside a float64 accumulator."""

from __future__ import annotations

from typing import Any

from kvsieve.cli.json_output import print_json
from kvsieve.cli.terminal import progress_bar
from kvsieve.errors import ConfigError
from kvsieve.flow import Flow
from kvsieve.verify.accumulator import run_accumulator
from kvsieve.verify.accumulator_options import AccumulatorOptions, state_dtype_named


def accumulator_options(*, state_dtype: str | None = None, **options: Any) -> AccumulatorOptions:
    """Options of the command line, named as the fields of :class:`AccumulatorOptions`; None keeps the default.

    Raises:
        ConfigError: a value out of range, or an unknown dtype.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if state_dtype is not None:
        given["state_dtype"] = state_dtype_named(state_dtype)
    try:
        return AccumulatorOptions(**given)
    except ConfigError as error:
        field, colon, rest = str(error).partition(":")
        raise ConfigError(f"--{field.replace('_', '-')}{colon}{rest}" if field in given else str(error)) from None


def accumulator_command(flow: Flow, options: AccumulatorOptions, *, as_json: bool = False) -> int:
    """Run, print, and return the exit code: 0 passed, 1 failed."""
    with progress_bar("accumulator") as progress:
        report = run_accumulator(flow, options, progress=progress)
    print_json("verify", report.as_json()) if as_json else print(report.text())
    return 0 if report.passed else 1
