"""A run of workers whose units fail, end their process, or send more than a pipe holds; started by test_evaluate.py."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import kvsieve.evaluate.run as running
from kvsieve.errors import ConfigError, KvsieveError


def run_unit(setting: str, unit: int) -> Iterator[Any]:
    """Stands in for the real one, in the workers as well: they import this file."""
    for part in range(5):
        if setting == "dies" and (unit, part) == (2, 2):
            os._exit(9)
        if setting == "fails" and (unit, part) == (1, 1):
            time.sleep(0.5)
            raise ConfigError("this unit cannot be run")
        yield ["x" * 300_000, unit, part]


running.run_unit = run_unit  # type: ignore[assignment]

if __name__ == "__main__":
    setting: Any = sys.argv[1]
    units: Any = list(range(6))
    seen = []
    try:
        for _, unit, part in running.run_units(setting, units, 2):  # type: ignore[misc]
            seen.append((unit, part))
            if setting == "interrupted" and len(seen) == 2:
                raise KeyboardInterrupt
    except (KvsieveError, KeyboardInterrupt) as error:
        print(type(error).__name__, error)
    print(len(seen), len(set(seen)))
