"""Flows as checked one-segment graphs: fields, page axis, costs. torch.export is the whole front end."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvsieve.flow import BUILTIN_FIELDS, Flow, PageFields, extra_parameters
from kvsieve.mass import FIELDS as MASS_FIELDS
from kvsieve.ops import Shape, show
from kvsieve.repeat import refuse_history
from kvsieve.segment import SegmentGraph, checked_graph
from kvsieve.tracing import EXAMPLE_PAGES, exclusive, export
from kvsieve.watch import FlowMethod

RESERVED = frozenset({*BUILTIN_FIELDS, *MASS_FIELDS, "q", "scores"})


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
        """``scale``, or what None stands for."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class FieldSpec:
    """A summary or state field: shape per page, storage dtype (None: K's dtype), and a state's initial value."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    initial: torch.Tensor | None = None

    def bytes(self, kv_dtype: torch.dtype) -> int:
        """Bytes of one page's value."""
        return math.prod(self.shape) * (self.dtype or kv_dtype).itemsize


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
    def user_state_fields(self) -> dict[str, FieldSpec]:
        """State fields that ``init_state`` declares: all but the attention mass."""
        return {name: spec for name, spec in self.state_fields.items() if name not in MASS_FIELDS}

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
        return sum(self.score_bytes_by_field(kv_dtype).values())

    def score_bytes_by_field(self, kv_dtype: torch.dtype) -> dict[str, int]:
        """The same by what is moved: ``k_mean read``, ``heavy written``."""
        shape = self.geometry
        fields = {
            "k": FieldSpec((shape.page_size, shape.head_dim), None),
            "v": FieldSpec((shape.page_size, shape.v_head_dim), None),
            **self.summary_fields,
            **self.state_fields,
        }
        reads = {f"{name} read": fields[name].bytes(kv_dtype) for name in self.score_reads if name in fields}
        return reads | {f"{name} written": fields[name].bytes(kv_dtype) for name in self.state_writes}


Summaries = dict[tuple[int, int, int], tuple[SegmentGraph | None, dict[str, FieldSpec]]]
"""Traced ``summarize`` and its fields by what they depend on: page size, widths of K and V."""


def trace_flow(flow: Flow, geometry: Geometry, summaries: Summaries | None = None) -> FlowGraphs:
    """Trace and check a flow.

    ``summaries``: those that this flow's other geometries have; what is missing is added.

    Raises:
        FlowError: the flow breaks a rule; names its file, line, op and shapes, and the remedy.
    """
    with exclusive(), torch.inference_mode(False), torch.no_grad():
        return _trace_flow(flow, geometry, {} if summaries is None else summaries)


def _trace_flow(flow: Flow, geometry: Geometry, summaries: Summaries) -> FlowGraphs:
    key = geometry.page_size, geometry.head_dim, geometry.v_head_dim
    if key not in summaries:
        summaries[key] = _trace_summarize(flow, geometry)
    summarize, summary_fields = summaries[key]
    state_fields = _state_fields(flow, geometry)
    both = sorted(set(summary_fields) & set(state_fields))
    if both:
        raise FlowMethod(flow, "init_state").fail(
            f"{', '.join(both)} is both a summary and a state field", "give them different names"
        )
    mass = _mass_fields(flow, geometry)
    score = _trace_score(flow, geometry, {**summary_fields, **mass}, state_fields) if flow.score is not None else None
    return FlowGraphs(flow, geometry, summary_fields, {**state_fields, **mass}, summarize, score)


def _trace_summarize(flow: Flow, geometry: Geometry) -> tuple[SegmentGraph | None, dict[str, FieldSpec]]:
    if flow.summarize is None:
        return None, {}
    method = FlowMethod(flow, "summarize")
    _check_signature(method, inspect.signature(flow.summarize))
    names: list[str] = []

    def call(inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        fields = method.flow.summarize(inputs["k"], inputs["v"])  # type: ignore[misc]
        _check_fields(method, fields, "summary field")
        names[:] = fields
        return _distinct(fields.values(), inputs)

    examples = {
        "k": torch.zeros(geometry.page_size, geometry.head_dim),
        "v": torch.zeros(geometry.page_size, geometry.v_head_dim),
    }
    graph = checked_graph(method, export(method, call, examples, frozenset()), names)
    refuse_history(method, call, examples, frozenset())
    unknown = sorted(set(flow.summary_dtypes) - set(names))
    if unknown:
        raise method.fail(f"summary_dtypes names {', '.join(unknown)}", f"name fields of summarize: {', '.join(names)}")
    specs = {}
    for name, node in graph.outputs.items():
        value = node.meta["val"]
        dtype = flow.summary_dtypes.get(name, None if value.dtype is torch.float32 else value.dtype)
        specs[name] = FieldSpec(tuple(value.shape), dtype)
    return graph, specs


def _check_signature(method: FlowMethod, signature: inspect.Signature) -> None:
    try:
        signature.bind(None, None)
    except TypeError:
        received = ", ".join(signature.parameters) or "none"
        raise method.fail(
            f"expected the parameters (k, v), received ({received})",
            "take k [p, D] and v [p, Dv] of one page, and make other numbers constructor arguments",
        ) from None


def _mass_fields(flow: Flow, geometry: Geometry) -> dict[str, FieldSpec]:
    """State that the runtime writes."""
    if flow.mass is None:
        return {}
    shapes = {"mass": (geometry.page_size,), "mass_sum": ()}
    return {name: FieldSpec(shapes[name], torch.float32, torch.zeros(shapes[name])) for name in MASS_FIELDS}


def _state_fields(flow: Flow, geometry: Geometry) -> dict[str, FieldSpec]:
    if flow.init_state is None:
        return {}
    method = FlowMethod(flow, "init_state")
    try:
        fields = flow.init_state(geometry.page_size, geometry.head_dim)
    except Exception as error:
        where = method.location_of_error(error)
        raise method.fail(
            f"{type(error).__name__}: {error}",
            "return {name: tensor} of one page for any page size, from `def init_state(self, page_size, head_dim)`",
            where,
        ) from error
    _check_fields(method, fields, "state field")
    return {name: FieldSpec(tuple(value.shape), value.dtype, value.detach().clone()) for name, value in fields.items()}


def _trace_score(
    flow: Flow, geometry: Geometry, readable: Mapping[str, FieldSpec], states: Mapping[str, FieldSpec]
) -> SegmentGraph:
    """``states`` may be read and returned, ``readable`` fields only read."""
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
                f"returns {_kind(result)}", "return scores [W], or (scores, {state name: new value [W, ...]})"
            )
        for name in state:
            if name not in states:
                raise method.fail(
                    f"returns state {name!r}, which init_state does not declare (it declares "
                    f"{', '.join(states) or 'nothing'})",
                    f"add {name!r} to init_state",
                )
            if not isinstance(state[name], torch.Tensor):
                raise method.fail(f"state {name!r} is {_kind(state[name])}", "return a tensor")
        names[:] = ["scores", *state]
        return _distinct((scores, *state.values()), inputs)

    examples = _score_examples(geometry, readable, states)
    pages = frozenset(examples) - {"q"}
    graph = checked_graph(method, export(method, call, examples, pages), names)
    _check_outputs(method, graph, states)
    refuse_history(method, call, examples, pages)
    return graph


def _score_examples(
    geometry: Geometry, summaries: Mapping[str, FieldSpec], states: Mapping[str, FieldSpec]
) -> dict[str, torch.Tensor]:
    w, p = EXAMPLE_PAGES, geometry.page_size
    examples = {
        "q": torch.zeros(geometry.group, geometry.head_dim),
        "k": torch.zeros(w, p, geometry.head_dim),
        "v": torch.zeros(w, p, geometry.v_head_dim),
        "position": torch.arange(w, dtype=torch.float32) * p,
        "age": torch.arange(w, dtype=torch.float32).flip(0) * p,
    }
    for name, spec in {**summaries, **states}.items():
        dtype = compute_dtype(spec.dtype)
        examples[name] = (
            torch.zeros(w, *spec.shape) if dtype.is_floating_point else torch.ones(w, *spec.shape, dtype=dtype)
        )
    return examples


def compute_dtype(stored: torch.dtype | None) -> torch.dtype:
    """The dtype in which ``score`` sees a stored field: float32 for all floating ones."""
    return torch.float32 if stored is None or stored.is_floating_point else stored


def _check_fields(method: FlowMethod, fields: Any, what: str) -> None:
    if not isinstance(fields, Mapping):
        raise method.fail(f"returns {_kind(fields)}", "return a dict of name: tensor")
    for name, value in fields.items():
        if not isinstance(value, torch.Tensor):
            raise method.fail(f"{what} {name!r} is {_kind(value)}", "return a dict of name: tensor")
        if name in RESERVED:
            raise method.fail(f"{what} {name!r} has a reserved name ({', '.join(sorted(RESERVED))})", "rename it")
        if not (isinstance(name, str) and name.isidentifier()):
            raise method.fail(f"{what} {name!r} has a name that is no identifier", "rename it")
        floating = value.dtype.is_floating_point or value.dtype.is_complex
        if what == "summary field" and floating and value.dtype is not torch.float32:
            raise method.fail(f"{what} {name!r} is {value.dtype}", "return float32 and name dtypes in summary_dtypes")


def _distinct(results: Iterable[torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The results of a method, none of them an input itself: each must be a node of its own."""
    return [value.clone() if any(value is x for x in inputs.values()) else value for value in results]


def _kind(value: object) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else type(value).__name__


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
