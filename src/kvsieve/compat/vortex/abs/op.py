"""What is common to the ops of both sides: a call checks and allocates, or computes, as its context says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from kvsieve.compat.vortex.abs.context_base import ContextBase
from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.core.segment import SegmentContext
from kvsieve.compat.vortex.utils import Mode, Schedule


class vOp(ABC):
    """Base class of ops. ``op(*operands, ctx=ctx)``; an op may be used at any number of call sites."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule.S

    @abstractmethod
    def profile(self, *args: Any, **kwargs: Any) -> Any:
        """Check the operands and allocate the result."""

    @abstractmethod
    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute."""

    def on_segment(self, *args: Any, **kwargs: Any) -> Any:
        """Compute on the view of one segment, where a flow is traced for kvsieve's backends."""
        raise OpError(
            f"{type(self).__name__} is an op of your own: it can be profiled and executed, but kvsieve cannot trace "
            "it; define on_segment(*operands, ctx), which computes on SegmentTensors"
        )

    def __call__(self, *args: Any, ctx: Any = None, **kwargs: Any) -> Any:
        """Profile or execute, as ``ctx.mode`` says (None executes).

        Raises:
            ValueError: another mode. OpError: the operands do not fit.
        """
        if ctx is None and args and isinstance(args[-1], (ContextBase, SegmentContext)):
            *operands, ctx = args
            args = tuple(operands)
        if ctx is None:
            raise OpError(f"{type(self).__name__}: expected ctx=, the context, received none")
        if isinstance(ctx, SegmentContext):
            return self.on_segment(*args, ctx=ctx, **kwargs)
        mode = getattr(ctx, "mode", None)
        if mode is None or mode is Mode.execute:
            return self.execute(*args, ctx=ctx, **kwargs)
        if mode is Mode.profile:
            return self.profile(*args, ctx=ctx, **kwargs)
        raise ValueError(f"{type(self).__name__}: expected mode profile, execute or None, received {mode!r}")

    def _prefix(self) -> str:
        return f"{type(self).__name__}: "
