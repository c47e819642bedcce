"""Worker processes that end when the work does: also when it is interrupted, or fails half-way."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Workers(ProcessPoolExecutor):
    """Fresh processes, for a ``with`` block. An exception in the block, Ctrl-C included, ends them at once.

    A terminal sends Ctrl-C to every process of a command. Workers do not get it: one that died of it would leave the
    rest waiting for what it held, and print a traceback. Who called them ends them instead.
    """

    def __init__(self, count: int, initializer: Callable[..., object] | None = None, *arguments: Any) -> None:
        super().__init__(count, get_context("spawn"), initializer, arguments)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As in :class:`ProcessPoolExecutor`; processes that it starts get no interrupts."""
        with _held_interrupts():
            return super().submit(fn, *args, **kwargs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if kind is not None:
            processes = list((getattr(self, "_processes", None) or {}).values())
            self.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
        return super().__exit__(kind, error, trace)


@contextlib.contextmanager
def _held_interrupts() -> Iterator[None]:
    """Interrupts wait until the block is over; processes started in it never get any."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
