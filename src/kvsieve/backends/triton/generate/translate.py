"""A checked one-segment ATen graph as a program of :mod:`ir`."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from kvsieve.backends.triton.generate.call import Call, Results
from kvsieve.backends.triton.generate.errors import Refused
from kvsieve.backends.triton.generate.ir import TRITON_TYPES, Builder, Op
from kvsieve.backends.triton.generate.table import ROWS
from kvsieve.dtypes import default_dtype
from kvsieve.flow import Flow
from kvsieve.ops import NodeView, row_of
from kvsieve.segment import SegmentGraph, is_getitem, is_symbolic
from kvsieve.watch import FlowMethod


@dataclass(frozen=True)
class Translated:
    """A flow method's outputs by name, and the builder that can go on."""

    outputs: Mapping[str, Op]
    builder: Builder


def translate(flow: Flow, method: str, segment: SegmentGraph) -> Translated:
    """``segment`` of ``summarize`` or ``score``.

    Raises:
        Refused: an op without a row, or that its row refuses.
    """
    builder = Builder()
    lines = FlowMethod(flow, method)
    values: dict[fx.Node, Results] = {}
    for name, node in segment.trace.inputs.items():
        values[node] = _input(builder, name, segment, node)
    known = dict(segment.trace.constants)
    for node, tensor in known.items():
        values[node] = _constant(builder, node.name, tensor)
    for node in segment.nodes:
        if node.op == "call_function" and not is_symbolic(node):
            builder.name, builder.line = node.name, _line(lines, node)
            with default_dtype(torch.float32):  # what numbers and integers are promoted to
                folded = _folded(node, known)
                if folded is None:
                    values[node] = _node(builder, segment, node, values)
                else:
                    known[node], values[node] = folded, _constant(builder, node.name, folded)
    outputs = {}
    for name, node in segment.outputs.items():
        value = values[node]
        assert isinstance(value, Op)
        outputs[name] = value
    return Translated(outputs, builder)


def _input(b: Builder, name: str, segment: SegmentGraph, node: fx.Node) -> Op:
    shape, dtype = segment.shape_of(node), node.meta["val"].dtype
    if name == "q":
        op = b.make("query", shape, torch.float32)
        op.name = "q"
        return op
    if name in ("position", "age"):
        return b.make(name, shape, torch.float32)
    return b.field(name, shape, dtype)


def _constant(b: Builder, name: str, tensor: torch.Tensor) -> Op:
    tensor = tensor.detach()
    tensor = tensor.float() if tensor.is_floating_point() else tensor
    if tensor.dtype not in TRITON_TYPES:
        raise Refused(f"constant {name} is {tensor.dtype}")
    op = b.make("constant", tuple(tensor.shape), tensor.dtype, (), tensor)
    op.name = name.removeprefix("c_").removeprefix("b_").removeprefix("p_")
    return op


def _folded(node: fx.Node, known: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """What an op makes of constants, computed once here; None: it takes other values, or makes more than it takes."""
    operands = [known[one] for one in node.all_input_nodes if one in known]
    if not operands or len(operands) < len(node.all_input_nodes) or is_getitem(node):
        return None

    def value(argument: fx.Node) -> torch.Tensor:
        tensor = known[argument].detach()
        return tensor.float() if tensor.is_floating_point() else tensor

    result = node.target(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))  # type: ignore[operator]
    small = isinstance(result, torch.Tensor) and result.numel() <= sum(one.numel() for one in operands)
    return result if small else None


def _node(b: Builder, segment: SegmentGraph, node: fx.Node, values: Mapping[fx.Node, Results]) -> Results:
    if is_getitem(node):
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        parts = values[source]
        assert isinstance(parts, tuple)
        return parts[index]
    row = row_of(node.target)
    if row is None or row not in ROWS:
        raise Refused(f"op {node.target} has no row")
    return ROWS[row].build(Call(b, NodeView(node, segment.shape_of), values))


def _line(method: FlowMethod, node: fx.Node) -> str:
    where = method.location_of_node(node)
    return linecache.getline(where.file, where.line).strip() if where else ""
