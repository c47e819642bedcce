"""torch.export of one flow method, with every failure turned into a FlowError that names the user's line."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from string import ascii_letters
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from kvsieve.dtypes import default_dtype
from kvsieve.errors import KvsieveError
from kvsieve.watch import FlowMethod, Watch, explain, with_location

EXAMPLE_PAGES = 41  # a size that no head_dim, group or page size is likely to equal
PAGE_AXIS_SIZE = torch.export.Dim("W", min=2)


@dataclass
class Trace:
    """An exported method: its graph, what each placeholder stands for, and its outputs in order."""

    graph: fx.Graph
    inputs: dict[str, fx.Node]
    constants: dict[fx.Node, torch.Tensor]
    outputs: list[fx.Node]
    program: torch.export.ExportedProgram


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
    watch = Watch(method)
    names = list(examples)

    class Wrapper(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
            watch.start(tensors)
            with watch:
                return call(dict(zip(names, tensors, strict=True)))

    shapes = tuple({0: PAGE_AXIS_SIZE} if name in page_inputs else None for name in names)
    try:
        with _quiet(), fx.traceback.preserve_node_meta():
            program = torch.export.export(Wrapper(), tuple(examples.values()), dynamic_shapes=(shapes,), strict=False)
    except KvsieveError as error:
        raise with_location(method, error) from None
    except Exception as error:
        raise explain(method, watch, error) from error
    method.refuse_changes()
    return _collect(program, names)


def decomposed(trace: Trace, keep: Callable[[Any], bool]) -> Trace:
    """The trace in core ATen ops, except those that ``keep`` says to leave whole."""
    table: dict[Any, Any] = {**torch._decomp.decomposition_table, **torch.export.default_decompositions()}
    table |= _DECOMPOSITIONS
    with _quiet():
        program = trace.program.run_decompositions({op: rule for op, rule in table.items() if not keep(op)})
    return _collect(program, list(trace.inputs))


def _var_mean(
    x: torch.Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    axes = list(range(x.dim())) if dim is None else dim
    number = 1 if correction is None else correction
    return torch.var(x, axes, correction=number, keepdim=keepdim), torch.mean(x, axes, keepdim)


def _std_mean(x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    var, mean = _var_mean(x, *args, **kwargs)
    return torch.sqrt(var), mean


def _layer_norm(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    var, mean = _var_mean(x, list(range(x.dim() - len(shape), x.dim())), correction=0, keepdim=True)
    scale = torch.rsqrt(var + eps)
    out = (x - mean) * scale
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, mean, scale


def _tensordot(a: torch.Tensor, b: torch.Tensor, dims_a: list[int], dims_b: list[int]) -> torch.Tensor:
    first = list(ascii_letters[: a.dim()])
    second = list(ascii_letters[a.dim() : a.dim() + b.dim()])
    for i, j in zip(dims_a, dims_b, strict=True):
        second[j] = first[i]
    summed = {first[i] for i in dims_a}
    output = [letter for letter in first + second if letter not in summed]
    return torch.einsum(f"{''.join(first)},{''.join(second)}->{''.join(output)}", a, b)


def _inner(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _tensordot(a, b, [-1], [-1]) if a.dim() and b.dim() else a * b


_DECOMPOSITIONS = {  # torch's own end in prims, below the op table, or fold the page axis on their way
    torch.ops.aten.inner.default: _inner,
    torch.ops.aten.tensordot.default: _tensordot,
    torch.ops.aten.var_mean.correction: _var_mean,
    torch.ops.aten.std_mean.correction: _std_mean,
    torch.ops.aten.native_layer_norm.default: _layer_norm,
}


def _collect(program: torch.export.ExportedProgram, names: list[str]) -> Trace:
    graph = program.graph
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    inputs: dict[str, fx.Node] = {}
    constants: dict[fx.Node, torch.Tensor] = {}
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


_TRACING = threading.RLock()


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """torch.export shares global state: one trace at a time. And a flow is written for float32,
    whatever the program around it makes by default."""
    with _TRACING, default_dtype(torch.float32):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch's logs and warnings about a failed trace off the user's screen: the FlowError says it all."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
