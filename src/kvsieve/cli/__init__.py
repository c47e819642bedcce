"""The command line: ``kvsieve flows``, ``generate``, ``new``, ``verify`` and ``study``."""

from kvsieve.cli.app import main

__all__ = ["main"]
