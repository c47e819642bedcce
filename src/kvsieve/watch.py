"""What is known of a flow method while it is traced, to say in the user's words what went wrong and where."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from kvsieve.errors import FlowError, KvsieveError, Location
from kvsieve.flow import Flow, definition_of, source_file, with_dtype
from kvsieve.maxpool import max_pool1d
from kvsieve.ops.shape import WHOLE


@dataclass
class FlowMethod:
    """A method being traced: where it lives, for messages.

    ``flow`` is a float32 copy of the user's flow that may not be changed.
    """

    flow: Flow
    method: str
    files: frozenset[str] = field(init=False)
    _before: Mapping[str, object] = field(init=False)

    def __post_init__(self) -> None:
        self.files = frozenset(source_file(cls) for cls in type(self.flow).__mro__ if cls not in (Flow, object))
        self.flow = with_dtype(self.flow, torch.float32)
        self._before = _attributes(self.flow)

    def fail(self, problem: str, remedy: str, location: Location | None = None) -> FlowError:
        """The error to raise; without a location it points to the method."""
        where = f"{type(self.flow).__name__}.{self.method}"
        return FlowError(where, one_line(problem), one_line(remedy), location or definition_of(self.flow, self.method))

    def refuse_changes(self) -> None:
        """Raise FlowError if the call changed an attribute of the flow."""
        after = _attributes(self.flow)
        changed = sorted(key for key, value in after.items() if self._before.get(key, None) != value)
        if changed:
            raise self.fail(
                f"changes self.{', self.'.join(changed)}; a flow keeps nothing between calls",
                "return it as a state field declared in init_state",
                self._location_of_change(changed[0]),
            )

    def location_of_frames(self, frames: Sequence[tuple[str, int]]) -> Location | None:
        """The innermost (file, line) that lies in the flow's own source."""
        inside = [Location(file, line) for file, line in frames if file in self.files]
        return inside[-1] if inside else None

    def location_of_node(self, node: fx.Node) -> Location | None:
        """The user's line that made a graph node, read from the stack that torch.export recorded."""
        frames = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
        return self.location_of_frames([(file, int(line)) for file, line in frames])

    def location_of_error(self, error: BaseException) -> Location | None:
        """The user's line that raised."""
        frames = traceback.extract_tb(error.__traceback__)
        return self.location_of_frames([(frame.filename, frame.lineno or 0) for frame in frames])

    def _location_of_change(self, attribute: str) -> Location | None:
        try:
            lines, first = inspect.getsourcelines(getattr(type(self.flow), self.method))
            file = source_file(type(self.flow))
        except (OSError, TypeError):
            return None
        pattern = re.compile(rf"\bself\.{re.escape(attribute)}\b.*(=|\()")
        return next((Location(file, first + i) for i, text in enumerate(lines) if pattern.search(text)), None)


@dataclass(frozen=True)
class TorchCall:
    """A torch call of the user's: its name with argument shapes, and its line."""

    text: str
    location: Location | None


class Watch(TorchFunctionMode):
    """Remembers which torch call failed or tied the trace to some page counts; swaps in an exportable max_pool1d."""

    def __init__(self, method: FlowMethod) -> None:
        super().__init__()
        self.method = method
        self.shape_env: Any = None
        self.calls: list[tuple[int, TorchCall]] = []  # guards that exist after a call that added some
        self.failed: tuple[Exception, TorchCall] | None = None

    def start(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called with the traced inputs before the method runs; they know the guards of the trace."""
        symbolic: list[Any] = [size for x in tensors for size in x.shape if isinstance(size, torch.SymInt)]
        self.shape_env = symbolic[0].node.shape_env if symbolic else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = self._guards()
        line = self._line()
        if line is not None:  # torch.export would record the frames of nn.Modules only
            fx.traceback.set_stack_trace([f'File "{line.file}", line {line.line}'])
        try:
            if getattr(func, "__name__", "") in ("max_pool1d", "_max_pool1d", "max_pool1d_with_indices"):
                return max_pool1d(*args, **kwargs)
            return func(*args, **kwargs)
        except Exception as error:
            self.failed = error, _call(func, args, kwargs, line)
            raise
        finally:
            if self._guards() > before:
                self.calls.append((self._guards(), _call(func, args, kwargs, line)))

    def guard_problem(self) -> tuple[str, TorchCall] | None:
        """The first guard that ties the trace to particular page counts, and the call that made it."""
        for index, guard in enumerate(self.shape_env.guards if self.shape_env is not None else ()):
            expression = guard.expr
            if isinstance(expression, sympy.Eq) and all(side.is_Symbol for side in expression.args):
                continue
            frame = guard.sloc.framework_loc
            file, line = str(getattr(frame, "filename", "")), getattr(frame, "lineno", 0)
            if file in self.method.files:  # plain Python: int(W), range(W), if W > 5
                return in_pages(expression), TorchCall("", Location(file, int(line or 0)))
            made_by = (call for count, call in self.calls if count > index)
            return in_pages(expression), next(made_by, TorchCall("", None))
        return None

    def _guards(self) -> int:
        return len(self.shape_env.guards) if self.shape_env is not None else 0

    def _line(self) -> Location | None:
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename in self.method.files:
                return Location(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        return None


def _call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], line: Location | None) -> TorchCall:
    name = getattr(func, "__name__", str(func))
    name = {"__getitem__": "indexing", "__setitem__": "assignment", "__get__": "attribute"}.get(name, name.strip("_"))
    operands = [*args, *kwargs.values()]
    flat = [x for value in operands for x in (value if isinstance(value, (list, tuple)) else [value])]
    shapes = ", ".join(show_sizes(value) for value in flat if isinstance(value, torch.Tensor))
    return TorchCall(f"op {name} on {shapes}: " if shapes else f"op {name}: ", line)


def in_pages(expression: object) -> str:
    """A size or guard of the trace, its symbols written as W."""
    text = str(getattr(getattr(expression, "node", None), "expr", expression))
    text = re.sub(r"\bs\d+\b", "W", text)
    for name, sign in (("Eq", "=="), ("Ne", "!=")):
        text = re.sub(rf"^{name}\((.*), (.*)\)$", rf"\1 {sign} \2", text)
    return re.sub(r"\bu\d+\b", "?", text)


def show_sizes(value: torch.Tensor) -> str:
    """The shape of a traced tensor for messages, such as ``[W, 16, 64]``."""
    return "[" + ", ".join(in_pages(size) for size in value.shape) + "]"


def one_line(text: str) -> str:
    """A message of torch's or a user's as one line without a full stop."""
    return re.sub(r"\s+", " ", text).strip().rstrip(".")


def with_location(method: FlowMethod, error: KvsieveError) -> FlowError:
    """An error that was raised inside the flow, with the line that caused it."""
    if isinstance(error, FlowError) and error.location is not None:
        return error
    if isinstance(error, FlowError):
        return method.fail(error.problem, error.remedy, method.location_of_error(error))
    problem, _, hint = str(error).partition(": ")
    return method.fail(problem, hint.replace("did you mean", "use").strip("?"), method.location_of_error(error))


_KNOWN = (
    (
        ("data-dependent", "DataDependent"),
        "turns values of a tensor into Python numbers (if, while, float(), int(), a size)",
        "use torch.where, a mask or a reduction: the same graph runs for every page and request",
    ),
    (
        (".numpy()", ".tolist", "__array__"),
        "leaves PyTorch with .numpy() or .tolist()",
        "stay in torch ops: the method is traced, not run",
    ),
    (
        ("data is not allocated yet",),
        "makes a tensor out of the values of others",
        "use torch.stack or torch.cat of tensors",
    ),
    (
        ("does not support item assignment", "does not support item deletion"),
        "assigns to pages, which is read-only",
        "return new values as state",
    ),
)


def explain(method: FlowMethod, watch: Watch, error: Exception) -> FlowError:
    """The user's mistake behind an export error."""
    location = method.location_of_error(error)
    text = f"{type(error).__name__}: {error}"
    if "ConstraintViolation" in text or "Constraints violated" in text:
        problem = watch.guard_problem()
        if problem is not None:
            needs, call = problem
            wrong = f"works only for some numbers of pages W (it needs {needs}); a flow sees every W >= 1"
            return method.fail(call.text + wrong, WHOLE, call.location or location)
    for marks, wrong, remedy in _KNOWN:
        if any(mark in text for mark in marks):
            return method.fail(wrong, remedy, location)
    if isinstance(error, FlowError):
        return with_location(method, error)
    call_text = watch.failed[1].text if watch.failed and watch.failed[0] is error else ""
    first = re.sub(r"\bs\d+\b", "W", text.strip().splitlines()[0]) if call_text else text
    if "is invalid for input of size" in first and "W" in first:
        return method.fail(call_text + "folds the page axis into another", WHOLE, location)
    remedy = "mend this statement; it fails on tensors of the traced shapes"
    return method.fail(call_text + first, remedy, location)


def _attributes(flow: Flow) -> dict[str, object]:
    """What a call must leave as it is: the identity of every attribute, and of what containers hold."""

    def snapshot(value: object) -> object:
        if isinstance(value, dict):
            return {key: snapshot(item) for key, item in value.items()}
        if isinstance(value, (list, tuple, set)):
            return [snapshot(item) for item in value]
        return id(value)

    return {key: snapshot(value) for key, value in vars(flow).items()}
