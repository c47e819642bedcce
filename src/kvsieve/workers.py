"""Worker processes that end when the work does: also when it is interrupted, or fails half-way."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from queue import Empty, SimpleQueue
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
        self._done: SimpleQueue[Future[Any]] = SimpleQueue()
        self._submitted = 0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As in :class:`ProcessPoolExecutor`; processes that it starts get no interrupts."""
        with _held_interrupts():
            future = super().submit(fn, *args, **kwargs)
            future.add_done_callback(self._done.put)
            self._submitted += 1
        return future

    def next_done(self, timeout: float | None = None) -> Future[Any] | None:
        """A future that is done and was not given before, as they come; None if none is after so many seconds.

        ``concurrent.futures.wait`` and ``as_completed`` take the locks of all futures, and an interrupt in between
        leaves them taken: the thread that ends the workers then waits for ever.
        """
        try:
            return self._done.get(timeout=timeout)
        except Empty:
            return None

    def completed(self) -> Iterator[Future[Any]]:
        """All futures that were submitted, as they are done."""
        for _ in range(self._submitted):
            future = self.next_done()
            assert future is not None
            yield future

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
