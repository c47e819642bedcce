"""The ``kvsieve`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 a check failed, 2 an error (one line on stderr), 130 interrupted.

    Args:
        arguments: words after ``kvsieve``; None: those of the process.
    """
    try:
        from kvsieve.cli.app import run  # here, so that an interrupt of a slow import shows no traceback either
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


__all__ = ["main"]
