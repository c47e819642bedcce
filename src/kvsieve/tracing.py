"""torch.export of one flow method, with every failure turned into a FlowError that names the user's line."""

from __future__ import annotations

import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode

from kvsieve.errors import FlowError, KvsieveError, Location
from kvsieve.flow import Flow, source_file, with_dtype

EXAMPLE_PAGES = 41  # a size that no head_dim, group or page size is likely to equal
PAGE_AXIS_SIZE = torch.export.Dim("W", min=2)


@torch.library.custom_op("kvsieve::max_pool1d_same", mutates_args=())
def max_pool1d_same(x: torch.Tensor, kernel_size: int) -> torch.Tensor:
    """Sliding maximum over the last axis, stride 1, odd kernel, output as long as the input.

    torch.nn.functional.max_pool1d fixes a symbolic length while it is exported; this op stands in for it.
    """
    flat = x.reshape(-1, 1, x.shape[-1])
    return torch.nn.functional.max_pool1d(flat, kernel_size, 1, kernel_size // 2).reshape(x.shape)


@max_pool1d_same.register_fake
def _(x: torch.Tensor, kernel_size: int) -> torch.Tensor:
    return torch.empty_like(x)


@dataclass
class Trace:
    """An exported method: its graph, what each placeholder stands for, and its outputs in order."""

    graph: torch.fx.Graph
    inputs: dict[str, torch.fx.Node]
    constants: dict[torch.fx.Node, torch.Tensor]
    outputs: list[torch.fx.Node]
    program: torch.export.ExportedProgram


@dataclass
class FlowMethod:
    """A method being traced: where it lives, for messages.

    ``flow`` is a float32 copy of the user's flow; ``call`` maps named tensors to a flat list of output tensors.
    """

    flow: Flow
    method: str
    files: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.flow = with_dtype(self.flow, torch.float32)
        self.files = frozenset(source_file(cls) for cls in type(self.flow).__mro__ if cls not in (Flow, object))

    @property
    def where(self) -> str:
        return f"{type(self.flow).__name__}.{self.method}"

    def fail(self, problem: str, remedy: str, location: Location | None = None) -> FlowError:
        code = getattr(getattr(type(self.flow), self.method, None), "__code__", None)
        start = Location(code.co_filename, code.co_firstlineno) if code else None
        return FlowError(self.where, problem, remedy, location or start)

    def location_of_frames(self, frames: Sequence[tuple[str, int]]) -> Location | None:
        """The innermost (file, line) that lies in the flow's own source."""
        inside = [Location(file, line) for file, line in frames if file in self.files]
        return inside[-1] if inside else None

    def location_of_node(self, node: torch.fx.Node) -> Location | None:
        """The user's line that made a graph node, read from the stack that torch.export recorded."""
        frames = []
        for text in (node.meta.get("stack_trace") or "").splitlines():
            parts = text.strip().split('"')
            if len(parts) == 3 and parts[0] == "File ":
                frames.append((parts[1], int(parts[2].split("line ")[1].split(",")[0])))
        return self.location_of_frames(frames)


def export(
    method: FlowMethod,
    call: Callable[[Mapping[str, torch.Tensor]], list[torch.Tensor]],
    examples: Mapping[str, torch.Tensor],
    page_inputs: frozenset[str],
) -> Trace:
    """Export ``call`` over named example tensors; axis 0 of ``page_inputs`` is the symbolic page axis.

    Raises:
        FlowError: the method cannot be exported; says which of the user's lines is to blame.
    """
    watch = _Watch(method)
    names = list(examples)

    class Wrapper(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
            watch.start(tensors)
            with watch:
                return call(dict(zip(names, tensors, strict=True)))

    shapes = tuple({0: PAGE_AXIS_SIZE} if name in page_inputs else None for name in names)
    before = _attributes(method.flow)
    try:
        program = torch.export.export(Wrapper(), tuple(examples.values()), dynamic_shapes=(shapes,), strict=False)
    except KvsieveError as error:
        raise _with_location(method, error) from None
    except Exception as error:
        raise _explain(method, watch, error) from error
    changed = sorted(key for key, value in _attributes(method.flow).items() if before.get(key, None) is not value)
    if changed:
        raise method.fail(
            f"sets self.{', self.'.join(changed)}; a flow keeps nothing between calls",
            "return it as a state field declared in init_state",
        )
    return _collect(program, names)


def decomposed(trace: Trace, keep: Callable[[Any], bool]) -> Trace:
    """The trace in core ATen ops, except those that ``keep`` says to leave whole."""
    table = torch.export.default_decompositions()
    for op in [op for op in table if keep(op)]:
        table.pop(op)
    return _collect(trace.program.run_decompositions(table), list(trace.inputs))


def _collect(program: torch.export.ExportedProgram, names: list[str]) -> Trace:
    graph = program.graph
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    inputs: dict[str, torch.fx.Node] = {}
    constants: dict[torch.fx.Node, torch.Tensor] = {}
    user = iter(names)
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            inputs[next(user)] = node
        else:
            store = program.constants if spec.target in program.constants else program.state_dict
            constants[node] = store[spec.target]
    (results,) = next(node for node in graph.nodes if node.op == "output").args
    return Trace(graph, inputs, constants, list(results), program)


class _Watch(TorchFunctionMode):
    """Remembers which user line made which shape guards, and swaps max_pool1d for its exportable twin."""

    def __init__(self, method: FlowMethod) -> None:
        super().__init__()
        self.method = method
        self.shape_env: Any = None
        self.guards_after: list[tuple[int, Location | None]] = []

    def start(self, tensors: Sequence[torch.Tensor]) -> None:
        symbolic = [size for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)]
        self.shape_env = symbolic[0].node.shape_env if symbolic else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("max_pool1d", "_max_pool1d"):
            return self._max_pool1d(*args, **kwargs)
        count = self._guard_count()
        try:
            return func(*args, **kwargs)
        finally:
            if self._guard_count() > count:
                self.guards_after.append((self._guard_count(), self._user_line()))

    def guard_problem(self) -> tuple[str, Location | None] | None:
        """The first guard that ties the trace to particular page counts, and the line that made it."""
        for index, guard in enumerate(self.shape_env.guards if self.shape_env is not None else ()):
            expression = guard.expr
            if isinstance(expression, sympy.Eq) and all(side.is_Symbol for side in expression.args):
                continue
            renamed = expression.subs(dict.fromkeys(expression.free_symbols, sympy.Symbol("W")))
            framework = guard.sloc.framework_loc
            direct = getattr(framework, "filename", None), getattr(framework, "lineno", None)
            if direct[0] in self.method.files:
                return str(renamed), Location(str(direct[0]), int(direct[1] or 0))
            later = [location for count, location in self.guards_after if count > index]
            return str(renamed), later[0] if later else None
        return None

    def _guard_count(self) -> int:
        return len(self.shape_env.guards) if self.shape_env is not None else 0

    def _user_line(self) -> Location | None:
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename in self.method.files:
                return Location(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        return None

    def _max_pool1d(
        self,
        input: torch.Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> torch.Tensor:
        size, stride, padding, dilation = (
            value[0] if isinstance(value, (list, tuple)) else value for value in (kernel_size, stride, padding, dilation)
        )
        if (stride, padding, dilation, return_indices) != (1, size // 2, 1, False) or size % 2 == 0:
            raise self.method.fail(
                f"max_pool1d(kernel_size={size}, stride={stride}, padding={padding}, dilation={dilation}) changes the "
                "length of its axis",
                "use an odd kernel_size with stride=1 and padding=kernel_size // 2",
                self._user_line(),
            )
        result: torch.Tensor = torch.ops.kvsieve.max_pool1d_same(input, size)
        return result


def _attributes(flow: Flow) -> dict[str, object]:
    return dict(vars(flow))


def _with_location(method: FlowMethod, error: KvsieveError) -> FlowError:
    if isinstance(error, FlowError) and error.location is not None:
        return error
    if isinstance(error, FlowError):
        return method.fail(error.problem, error.remedy, _traceback_location(method, error))
    return method.fail(str(error), "use a name listed here", _traceback_location(method, error))


def _traceback_location(method: FlowMethod, error: BaseException) -> Location | None:
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return method.location_of_frames(frames)


def _explain(method: FlowMethod, watch: _Watch, error: Exception) -> FlowError:
    """The user's mistake behind an export error."""
    location = _traceback_location(method, error)
    name, text = type(error).__name__, str(error)
    if "DataDependent" in name or "data-dependent" in text:
        return method.fail(
            "branches on, or sizes a tensor by, the values of a tensor",
            "use torch.where, a mask or a reduction: the same graph runs for every page and request",
            location,
        )
    if "numpy()" in text or ".tolist" in text:
        return method.fail(
            "leaves PyTorch with .numpy() or .tolist()", "stay in torch ops: the method is traced, not run", location
        )
    if "Constraints violated" in text or "ConstraintViolation" in name:
        problem = watch.guard_problem()
        if problem is not None:
            return method.fail(
                f"works only for some numbers of pages W (it needs {problem[0]}); a flow sees every W >= 1",
                "leave the page axis whole: reduce it (sum, mean, amax, softmax), pool it, or keep it",
                problem[1] or location,
            )
    if isinstance(error, TypeError) and "does not support item assignment" in text:
        return method.fail("assigns to pages, which is read-only", "return new values as state", location)
    first_line = text.strip().splitlines()[0] if text.strip() else name
    return method.fail(f"{name}: {first_line}", "mend this statement; it fails on tensors of the traced shapes", location)
