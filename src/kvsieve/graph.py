"""Flows as checked one-segment graphs: fields, page axis, costs. torch.export is the whole front end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvsieve.errors import FlowError
from kvsieve.flow import BUILTIN_FIELDS, Flow, PageFields, definition_of, extra_parameters
from kvsieve.ops import NodeView, Refused, Shape, kind_of
from kvsieve.ops.reduce import show
from kvsieve.tracing import EXAMPLE_PAGES, FlowMethod, Trace, decomposed, export


@dataclass(frozen=True)
class Geometry:
    """The sizes a flow is traced for.

    Args:
        page_size: tokens per page.
        head_dim: width D of queries and keys.
        v_head_dim: width Dv of values.
        group: query heads per KV head (G).
        scale: attention scale; None: ``head_dim ** -0.5``.
        layer: layer index, seen by flows that ask for it.
    """

    page_size: int
    head_dim: int
    v_head_dim: int
    group: int
    scale: float | None = None
    layer: int = 0

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class FieldSpec:
    """A summary or state field: shape per page, storage dtype (None: K's dtype), and a state's initial value."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    initial: torch.Tensor | None = None

    def bytes(self, kv_dtype: torch.dtype) -> int:
        """Bytes of one page's value."""
        count = 1
        for size in self.shape:
            count *= size
        return count * (self.dtype or kv_dtype).itemsize


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


@dataclass(frozen=True)
class FlowGraphs:
    """All that the runtime needs to know about a flow at one geometry."""

    flow: Flow
    geometry: Geometry
    summary_fields: Mapping[str, FieldSpec]
    state_fields: Mapping[str, FieldSpec]
    summarize: SegmentGraph | None
    score: SegmentGraph | None

    @property
    def score_reads(self) -> tuple[str, ...]:
        """Fields that ``score`` reads, ``q`` excluded."""
        return tuple(name for name in self.score.reads if name != "q") if self.score else ()

    @property
    def state_writes(self) -> tuple[str, ...]:
        """State fields that ``score`` returns."""
        return tuple(name for name in self.score.outputs if name != "scores") if self.score else ()

    def score_bytes_per_page(self, kv_dtype: torch.dtype) -> int:
        """Bytes that ``score`` reads and writes per window page, KV head and step."""
        shape = self.geometry
        sizes = {"k": shape.page_size * shape.head_dim, "v": shape.page_size * shape.v_head_dim}
        total = sum(sizes[name] * kv_dtype.itemsize for name in self.score_reads if name in sizes)
        fields = {**self.summary_fields, **self.state_fields}
        total += sum(fields[name].bytes(kv_dtype) for name in self.score_reads if name in fields)
        return total + sum(self.state_fields[name].bytes(kv_dtype) for name in self.state_writes)


def trace_flow(flow: Flow, geometry: Geometry) -> FlowGraphs:
    """Trace and check a flow.

    Raises:
        FlowError: the flow breaks a rule; names its file, line, op and shapes, and the remedy.
    """
    summarize, summary_fields = _trace_summarize(flow, geometry)
    state_fields = _state_fields(flow, geometry)
    both = sorted(set(summary_fields) & set(state_fields))
    if both:
        raise FlowError(
            type(flow).__name__,
            f"{', '.join(both)} is both a summary and a state field",
            "give them different names",
            definition_of(flow, "init_state"),
        )
    score = _trace_score(flow, geometry, summary_fields, state_fields) if flow.score is not None else None
    return FlowGraphs(flow, geometry, summary_fields, state_fields, summarize, score)


def _trace_summarize(flow: Flow, geometry: Geometry) -> tuple[SegmentGraph | None, dict[str, FieldSpec]]:
    if flow.summarize is None:
        return None, {}
    method = FlowMethod(flow, "summarize")
    names: list[str] = []

    def call(inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        fields = method.flow.summarize(inputs["k"], inputs["v"])  # type: ignore[misc]
        _check_fields(method, fields, "summary fields")
        names.extend(fields)
        return [fields[name].clone() if any(fields[name] is x for x in inputs.values()) else fields[name] for name in fields]

    k = torch.randn(geometry.page_size, geometry.head_dim)
    v = torch.randn(geometry.page_size, geometry.v_head_dim)
    graph = _checked(method, export(method, call, {"k": k, "v": v}, frozenset()), names)
    unknown = sorted(set(flow.summary_dtypes) - set(names))
    if unknown:
        raise method.fail(f"summary_dtypes names {', '.join(unknown)}", f"name fields of summarize: {', '.join(names)}")
    specs = {}
    for name, node in graph.outputs.items():
        value = node.meta["val"]
        dtype = flow.summary_dtypes.get(name, None if value.dtype is torch.float32 else value.dtype)
        specs[name] = FieldSpec(tuple(value.shape), dtype)
    return graph, specs


def _state_fields(flow: Flow, geometry: Geometry) -> dict[str, FieldSpec]:
    if flow.init_state is None:
        return {}
    method = FlowMethod(flow, "init_state")
    try:
        fields = flow.init_state(geometry.page_size, geometry.head_dim)
    except Exception as error:
        raise method.fail(f"{type(error).__name__}: {error}", "return {name: tensor} for any page size") from error
    _check_fields(method, fields, "state fields")
    return {name: FieldSpec(tuple(value.shape), value.dtype, value.detach().clone()) for name, value in fields.items()}


def _trace_score(
    flow: Flow, geometry: Geometry, summaries: Mapping[str, FieldSpec], states: Mapping[str, FieldSpec]
) -> SegmentGraph:
    method = FlowMethod(flow, "score")
    wanted = extra_parameters(flow)
    extra = {
        name: value
        for name, value in (("layer", geometry.layer), ("scale", geometry.attention_scale))
        if name in wanted
    }
    names: list[str] = []

    def call(inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        pages = PageFields({name: value for name, value in inputs.items() if name != "q"})
        result = method.flow.score(inputs["q"], pages, **extra)  # type: ignore[misc]
        scores, state = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(scores, torch.Tensor) or not isinstance(state, Mapping):
            raise method.fail(
                f"returns {type(result).__name__}", "return scores [W], or (scores, {state name: new value [W, ...]})"
            )
        for name in state:
            if name not in states:
                raise method.fail(
                    f"returns state {name!r}, which init_state does not declare (it declares "
                    f"{', '.join(states) or 'nothing'})",
                    f"add {name!r} to init_state",
                )
            if not isinstance(state[name], torch.Tensor):
                raise method.fail(f"state {name!r} is {type(state[name]).__name__}", "return a tensor")
        names.extend(["scores", *state])
        return [value.clone() if any(value is x for x in inputs.values()) else value for value in (scores, *state.values())]

    examples = _score_examples(geometry, summaries, states)
    graph = _checked(method, export(method, call, examples, frozenset(examples) - {"q"}), names)
    _check_outputs(method, graph, states)
    return graph


def _score_examples(
    geometry: Geometry, summaries: Mapping[str, FieldSpec], states: Mapping[str, FieldSpec]
) -> dict[str, torch.Tensor]:
    w, p = EXAMPLE_PAGES, geometry.page_size
    examples = {
        "q": torch.randn(geometry.group, geometry.head_dim),
        "k": torch.randn(w, p, geometry.head_dim),
        "v": torch.randn(w, p, geometry.v_head_dim),
        "position": torch.arange(w, dtype=torch.float32) * p,
        "age": torch.arange(w, dtype=torch.float32).flip(0) * p,
    }
    for name, spec in {**summaries, **states}.items():
        dtype = compute_dtype(spec.dtype)
        examples[name] = torch.randn(w, *spec.shape) if dtype.is_floating_point else torch.ones(w, *spec.shape, dtype=dtype)
    return examples


def compute_dtype(stored: torch.dtype | None) -> torch.dtype:
    """The dtype in which ``score`` sees a stored field: float32 for all floating ones."""
    return torch.float32 if stored is None or stored.is_floating_point else stored


def _check_fields(method: FlowMethod, fields: Any, what: str) -> None:
    if not isinstance(fields, Mapping) or not all(isinstance(value, torch.Tensor) for value in fields.values()):
        raise method.fail(f"returns {type(fields).__name__}", "return a dict of name: tensor")
    taken = sorted(set(fields) & {*BUILTIN_FIELDS, "q", "scores", "mass", "mass_sum"})
    if taken or not all(isinstance(name, str) and name.isidentifier() for name in fields):
        raise method.fail(f"{what} {sorted(map(str, fields))} use a reserved name or no identifier", "rename them")


def _check_outputs(method: FlowMethod, graph: SegmentGraph, states: Mapping[str, FieldSpec]) -> None:
    for name, node in graph.outputs.items():
        shape, dtype = graph.shape_of(node), node.meta["val"].dtype
        expected: Shape = (None,) if name == "scores" else (None, *states[name].shape)
        what = "scores" if name == "scores" else f"state {name!r}"
        if shape != expected:
            raise method.fail(
                f"{what} has shape {show(shape)}, expected {show(expected)}",
                "reduce over heads, tokens and head_dim until one value a page is left"
                if name == "scores"
                else "return the state in the shape that init_state gives it, one row a page",
                method.location_of_node(node),
            )
        floating = dtype.is_floating_point
        if not floating and name == "scores":
            raise method.fail(f"scores are {dtype}", "return floating-point scores", method.location_of_node(node))
        if name != "scores" and dtype is not compute_dtype(states[name].dtype):
            raise method.fail(
                f"{what} is returned as {dtype}, expected {compute_dtype(states[name].dtype)} "
                f"(init_state says {states[name].dtype})",
                "cast it, or change the dtype in init_state",
                method.location_of_node(node),
            )


def _checked(method: FlowMethod, trace: Trace, names: list[str]) -> SegmentGraph:
    """Check every node; ops that are not in the table are tried again in core ATen ops."""
    _refuse_effects(method, trace)
    graph = _segment_graph(trace, names)
    strange = [node for node in graph.nodes if node.op == "call_function" and not _known(node)]
    if strange:
        core = _segment_graph(decomposed(trace, lambda op: kind_of(op) is not None), names)
        if any(node.op == "call_function" and not _known(node) for node in core.nodes):
            raise _unsupported(method, graph, strange[0])
        graph = core
    for node in graph.nodes:
        _check_node(method, graph, node)
    return graph


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
        if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name == "aten::detach_":
            continue
        name, where = node.target._overloadpacket.__name__, method.location_of_node(node)
        if node.target._schema.is_mutable:
            raise method.fail(f"op {name} changes a tensor in place", "use the form that returns a new tensor", where)
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise method.fail(
                f"op {name} draws random numbers", "draw them once in __init__ and keep them on the flow", where
            )
        if name in ("item", "_local_scalar_dense"):
            raise method.fail(
                "takes a number out of a tensor with .item()", "keep it a tensor: the method is traced, not run", where
            )


def _unsupported(method: FlowMethod, graph: SegmentGraph, node: fx.Node) -> FlowError:
    target = node.target
    name = target._overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else str(target)
    shapes = ", ".join(show(graph.shape_of(x)) for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor))
    return method.fail(
        f"op {name} on {shapes} is not in the op set",
        "use the ops of docs/ops.md, or add a row to kvsieve.ops",
        method.location_of_node(node),
    )


def _check_node(method: FlowMethod, graph: SegmentGraph, node: fx.Node) -> None:
    value = node.meta.get("val")
    where = method.location_of_node(node)
    if isinstance(value, torch.Tensor):
        shape = graph.shape_of(node)
        if -1 in shape or shape.count(None) > 1:
            inputs = ", ".join(show(graph.shape_of(x)) for x in node.all_input_nodes if isinstance(x.meta["val"], torch.Tensor))
            sizes = ", ".join(str(size) for size in value.shape)
            raise method.fail(
                f"op {getattr(node.target, '__name__', node.target)} on {inputs} makes [{sizes}], which pairs or folds pages",
                "a page may meet other pages only in a reduction, softmax, cumsum or pooling over the page axis",
                where,
            )
    if node.op != "call_function" or is_getitem(node) or is_symbolic(node):
        return
    kind = kind_of(node.target)
    assert kind is not None
    try:
        kind.check(NodeView(node, graph.shape_of))
        _check_sizes(node)
    except Refused as refusal:
        raise method.fail(f"op {refusal.problem}", refusal.remedy, where) from None


def _check_sizes(node: fx.Node) -> None:
    """A page count may shape a tensor, but not become a value: the graph runs for many segments at once."""
    shapers = ("expand", "view", "reshape", "_unsafe_view", "full", "zeros", "ones", "new_full", "new_zeros", "new_ones")
    name = node.target._overloadpacket.__name__  # type: ignore[union-attr]
    if name in (*shapers, "broadcast_to", "slice", "unflatten"):
        return
    if any(is_symbolic(argument) for argument in node.all_input_nodes):
        raise Refused(
            f"{name} computes with the number of pages", "use mean, or sum a tensor of ones over the page axis"
        )
