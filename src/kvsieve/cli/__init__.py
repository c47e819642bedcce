"""The command line: ``kvsieve flows``, ``kvsieve generate`` and ``kvsieve new``."""

from kvsieve.cli.app import main

__all__ = ["main"]
