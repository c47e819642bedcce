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
            type(self).__name__,
            "expected an op of vortex_torch, received one of your own, which kvsieve cannot trace",
            "define on_segment(*operands, ctx), which computes on SegmentTensors",
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
            raise OpError(type(self).__name__, "expected ctx=, the context, received none", "pass ctx=ctx")
        if isinstance(ctx, SegmentContext):
            return self.on_segment(*args, ctx=ctx, **kwargs)
        mode = getattr(ctx, "mode", None)
        if mode is None or mode is Mode.execute:
            try:
                return self.execute(*args, ctx=ctx, **kwargs)
            except IndexError as error:  # CPU tensors say so; elsewhere it is the device that does
                problem = f"reads or writes a row that a tensor does not have: {error}"
                remedy = "give q, o and the fields the rows that the plan (or loc) names"
                raise OpError(type(self).__name__, problem, remedy) from error
        if mode is Mode.profile:
            return self.profile(*args, ctx=ctx, **kwargs)
        raise ValueError(f"{type(self).__name__}: expected mode profile, execute or None, received {mode!r}")
