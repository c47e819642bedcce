"""What is written to a terminal: tables on stdout, a progress bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Output(Console):
    """A console whose reader may go away: that is no error (rich would exit with code 1)."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def output(pipe_width: int) -> Console:
    """Where results are printed: as wide as the terminal, or ``pipe_width`` columns into a pipe or a file."""
    return Output(width=None if sys.stdout.isatty() else pipe_width, highlight=False)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A function that is told (done, total); nothing is drawn into a pipe or a file."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
