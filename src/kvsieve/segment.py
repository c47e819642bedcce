"""The graph of one flow method, for one segment, and the checks that every node of it must pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvsieve.errors import FlowError
from kvsieve.ops import NodeView, Refused, Shape, kind_of, op_name
from kvsieve.tracing import Trace, decomposed
from kvsieve.watch import FlowMethod, show_sizes


@dataclass(frozen=True)
class SegmentGraph:
    """A flow method for one segment, checked. ``outputs`` maps names to the nodes that compute them."""

    trace: Trace
    shape_of: Callable[[fx.Node], Shape]
    nodes: tuple[fx.Node, ...]
    outputs: Mapping[str, fx.Node]

    @property
    def reads(self) -> tuple[str, ...]:
        """Inputs that the outputs depend on."""
        return tuple(name for name, node in self.trace.inputs.items() if node in self.nodes)


def checked_graph(method: FlowMethod, trace: Trace, names: list[str]) -> SegmentGraph:
    """The graph of a traced method, every node checked; ops that are not in the table are tried in core ATen ops.

    Raises:
        FlowError: an op that no flow may use, or one that the page axis forbids.
    """
    _refuse_effects(method, trace)
    graph = _segment_graph(trace, names)
    strange = [node for node in graph.nodes if node.op == "call_function" and not _known(node)]
    for node in graph.nodes:
        if node in strange:
            _check_known_size(method, node)
        else:
            _check_node(method, graph, node)
    if not strange:
        return graph
    return _core_graph(method, graph, trace, names, strange[0])


def _core_graph(
    method: FlowMethod, graph: SegmentGraph, trace: Trace, names: list[str], strange: fx.Node
) -> SegmentGraph:
    """The checked graph in core ATen ops; what goes wrong in it is the fault of the user's ``strange`` op."""
    shown = f"op {op_name(strange.target) or strange.target} on {_operands(strange)}"
    where = method.location_of_node(strange)
    try:
        core = _segment_graph(decomposed(trace, lambda op: kind_of(op) is not None), names)
    except Exception as error:
        raise method.fail(f"{shown} is not in the op set", _OP_SET, where) from error
    if any(node.op == "call_function" and not _known(node) for node in core.nodes):
        raise method.fail(f"{shown} is not in the op set", _OP_SET, where)
    try:
        for node in core.nodes:
            _check_node(method, core, node)
    except FlowError as error:
        raise method.fail(f"{shown} is not in the op set for pages: {error.problem}", APART, where) from error
    return core


_OP_SET = "use the ops of docs/ops.md, or add a row to kvsieve.ops"
APART = "a page may meet other pages only in a reduction, softmax, cumsum or pooling over the page axis"


def _segment_graph(trace: Trace, names: list[str]) -> SegmentGraph:
    sizes = {
        size.node.expr
        for node in trace.inputs.values()
        for size in node.meta["val"].shape
        if isinstance(size, torch.SymInt)
    }

    def shape_of(node: fx.Node) -> Shape:
        return tuple(_size(size, sizes) for size in node.meta["val"].shape)

    needed: set[fx.Node] = set()
    pending = list(trace.outputs)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    ordered = tuple(node for node in trace.graph.nodes if node in needed)
    return SegmentGraph(trace, shape_of, ordered, dict(zip(names, trace.outputs, strict=True)))


def _size(size: Any, page_sizes: set[Any]) -> int | None:
    if not isinstance(size, torch.SymInt):
        return int(size)
    return None if size.node.expr in page_sizes else -1  # -1: a size computed from W; _check_node refuses it


def _known(node: fx.Node) -> bool:
    return kind_of(node.target) is not None or is_getitem(node) or is_symbolic(node)


def is_getitem(node: fx.Node) -> bool:
    """True for the selection of one result of an op with several."""
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node)


def is_symbolic(node: fx.Node) -> bool:
    """True for integer arithmetic on sizes."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def _refuse_effects(method: FlowMethod, trace: Trace) -> None:
    for node in trace.graph.nodes:
        effect = _effect(node)
        if effect is not None:
            raise method.fail(*effect, method.location_of_node(node))


def _effect(node: fx.Node) -> tuple[str, str] | None:
    """What an op does beside returning a value, and the remedy."""
    name = op_name(node.target) or ""
    if not isinstance(node.target, torch._ops.OpOverload) or name == "detach_":
        return None
    if node.target._schema.is_mutable:
        return (
            f"op {name} on {_operands(node)} changes a tensor in place",
            "use the form that returns a new tensor (x = x + 1, torch.where, masked_fill)",
        )
    idle = name == "dropout" and node.args[2] is False
    if torch.Tag.nondeterministic_seeded in node.target.tags and not idle and "attention" not in name:
        return f"op {name} draws random numbers", "draw them once in __init__ and keep them on the flow"
    if name in ("item", "_local_scalar_dense"):
        return (
            "takes a number out of a tensor (.item(), .tolist(), a number as index)",
            "keep it a tensor: the method is traced, not run",
        )
    return None


def _check_node(method: FlowMethod, graph: SegmentGraph, node: fx.Node) -> None:
    if node.op != "call_function" or is_symbolic(node):
        return
    try:
        if not is_getitem(node):
            view = NodeView(node, graph.shape_of)
            kind = kind_of(node.target)
            assert kind is not None
            _check_sizes(view)
            kind.check(view)
        if isinstance(node.meta.get("val"), torch.Tensor):
            _check_value(graph, node)
    except Refused as refusal:
        raise method.fail(f"op {refusal.problem}", refusal.remedy, method.location_of_node(node)) from None


def _check_known_size(method: FlowMethod, node: fx.Node) -> None:
    values = node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]
    if any(isinstance(value, torch.Tensor) and "?" in show_sizes(value) for value in values):
        raise method.fail(
            f"op {op_name(node.target)} on {_operands(node)} makes a size that depends on values",
            "use torch.where or a mask of 0 and 1",
            method.location_of_node(node),
        )


def _check_value(graph: SegmentGraph, node: fx.Node) -> None:
    """One page axis at most, and one floating dtype."""
    shape, value = graph.shape_of(node), node.meta["val"]
    made_by = node.args[0] if is_getitem(node) else node
    assert isinstance(made_by, fx.Node)
    name = op_name(made_by.target)
    if -1 in shape or shape.count(None) > 1:
        raise Refused(f"{name} on {_operands(node)} makes {show_sizes(value)}, which pairs or folds pages", APART)
    if value.dtype.is_complex or (value.dtype.is_floating_point and value.dtype is not torch.float32):
        raise Refused(
            f"{name} on {_operands(node)} makes a {value.dtype} tensor; a flow computes in float32",
            "drop the cast; storage dtypes of summary fields belong into summary_dtypes",
        )


def _check_sizes(view: NodeView) -> None:
    """A page count may shape a tensor, but not become a value: the graph runs for many segments at once."""
    for name, argument in view.args().items():
        items = argument if isinstance(argument, (list, tuple)) else [argument]
        counts = any(isinstance(item, fx.Node) and is_symbolic(item) for item in items)
        if counts and (view.name, name) not in _SIZE_ARGUMENTS:
            raise Refused(
                f"{view.name} computes with the number of pages", "use mean, or sum a tensor of ones over the page axis"
            )


_SIZE_ARGUMENTS = {  # (op, argument) that page counts may enter
    *((name, "size") for name in ("expand", "broadcast_to", "view", "_unsafe_view", "full", "zeros", "ones")),
    *((name, "size") for name in ("new_full", "new_zeros", "new_ones")),
    ("reshape", "shape"),
    ("unflatten", "sizes"),
    ("slice", "end"),
}


def _operands(node: fx.Node) -> str:
    values = [operand.meta.get("val") for operand in node.all_input_nodes]
    return ", ".join(show_sizes(value) for value in values if isinstance(value, torch.Tensor)) or "no tensor"
