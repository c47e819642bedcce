"""``kvsieve show``: a flow as it is traced, lowered and generated, with the bytes that it moves per page."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import typer
from torch import fx

from kvsieve.cli import declared
from kvsieve.cli.flow_table import describe
from kvsieve.cli.json_output import print_json
from kvsieve.cli.options import parse_dtype, parse_flow_arguments
from kvsieve.dtypes import torch_name
from kvsieve.errors import ConfigError
from kvsieve.flow import check_page_size, choose_page_size, flow_name, load_flow
from kvsieve.graph import FlowGraphs, Geometry, trace_flow
from kvsieve.lower import lower
from kvsieve.ops import op_name, show
from kvsieve.segment import SegmentGraph, is_symbolic

INDENT = "    "


def show_command(
    flow: str = declared.FLOW_ARGUMENT,
    flow_arg: list[str] = declared.FLOW_ARGS,
    as_graph: bool = typer.Option(False, "--graph", help="the checked graph of one request and one KV head"),
    as_lowered: bool = typer.Option(False, "--lowered", help="the batched graph that eager and compiled run"),
    as_kernel: bool = typer.Option(False, "--kernel", help="the source that backend triton generates"),
    page_size: int | None = declared.PAGE_SIZES,
    head_dim: int = typer.Option(128, min=1, help="width of queries and keys"),
    v_head_dim: int | None = typer.Option(None, min=1, help="width of values  [default: head_dim]"),
    group: int = typer.Option(4, min=1, help="query heads per KV head"),
    dtype: str = typer.Option("bf16", help="what K and V are stored in: fp32, bf16 or fp16"),
    as_json: bool = declared.AS_JSON,
) -> None:
    """Show what becomes of a flow: fields, bytes per page, and its graph, lowered graph or generated source."""
    if as_graph + as_lowered + as_kernel > 1:
        raise ConfigError("expected one of --graph, --lowered and --kernel, received several; drop all but one")
    built, kind = load_flow(flow, **parse_flow_arguments(flow_arg)), parse_dtype(dtype)
    page = choose_page_size(built, page_size)
    check_page_size(built, page)
    geometry = Geometry(page, head_dim, head_dim if v_head_dim is None else v_head_dim, group)
    graphs = trace_flow(built, geometry)
    form = "kernel" if as_kernel else "lowered" if as_lowered else "graph"
    write = {"kernel": kernel_text, "lowered": lowered_text, "graph": graph_text}[form]
    methods = {"summarize": graphs.summarize, "score": graphs.score}
    texts = {method: write(graphs, method, graph) for method, graph in methods.items() if graph is not None}
    if as_json:
        print_json("show", {**overview_json(graphs, kind), form: texts})
    else:
        print("\n\n".join([overview(graphs, kind), *texts.values()]))


def overview_json(graphs: FlowGraphs, dtype: torch.dtype) -> dict[str, Any]:
    """What :func:`overview` says, as plain JSON values."""
    return {
        "flow": flow_name(graphs.flow),
        **{name: getattr(graphs.geometry, name) for name in ("page_size", "head_dim", "v_head_dim", "group")},
        "dtype": torch_name(dtype),
        "summary": {name: describe(spec) for name, spec in graphs.summary_fields.items()},
        "state": {name: describe(spec) for name, spec in graphs.state_fields.items()},
        "score_bytes_per_page": graphs.score_bytes_by_field(dtype) if graphs.score else None,
    }


def overview(graphs: FlowGraphs, dtype: torch.dtype) -> str:
    """Sizes, fields, and bytes per window page, KV head and step."""
    shape = graphs.geometry
    lines = [
        f"{flow_name(graphs.flow)}: page {shape.page_size}, head_dim {shape.head_dim}, V {shape.v_head_dim}, "
        f"{shape.group} query heads per KV head, K and V in {torch_name(dtype)}"
    ]
    for what, fields in (("summary", graphs.summary_fields), ("state", graphs.state_fields)):
        listed = ", ".join(f"{name} {describe(spec)}" for name, spec in fields.items())
        lines.append(f"{what} fields: {listed or 'none'}")
    if graphs.score is None:
        return "\n".join([*lines, "no score: sink and recent pages only"])
    unread = [name for name in graphs.summary_fields if name not in graphs.score_reads]
    if unread:
        lines.append(f"score does not read: {', '.join(unread)}")
    unwritten = [name for name in graphs.user_state_fields if name not in graphs.state_writes]
    if unwritten:
        lines.append(f"score does not return, so it never changes: {', '.join(unwritten)}")
    parts = [f"{name} {size}" for name, size in graphs.score_bytes_by_field(dtype).items()]
    total = graphs.score_bytes_per_page(dtype)
    return "\n".join(
        [*lines, f"score moves {total} bytes per window page and KV head: {', '.join(parts) or 'nothing'}"]
    )


def graph_text(graphs: FlowGraphs, method: str, graph: SegmentGraph) -> str:
    """One line a value: name, op, operands, shape."""
    names = {node: name for name, node in graph.trace.inputs.items()}
    names |= {node: node.name.removeprefix("c_") for node in graph.trace.constants}
    taken = set(names.values())
    for node in graph.nodes:
        if node not in names:
            names[node] = next(name for name in _numbered(node.name) if name not in taken)
            taken.add(names[node])
    lines = [f"{method}({', '.join(graph.reads)}):"]
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or is_symbolic(node) or not isinstance(value, (torch.Tensor, tuple, list)):
            continue
        line = f"{INDENT}{names[node]} = {op_name(node.target) or 'getitem'}({_arguments(node, names)})"
        if isinstance(value, torch.Tensor):  # several values have their shapes where they are taken apart
            kind = "" if value.dtype is torch.float32 else f" {torch_name(value.dtype)}"
            line += f"  # {show(graph.shape_of(node))}{kind}"
        lines.append(line)
    results = ", ".join(f"{name}: {names[node]}" for name, node in graph.outputs.items())
    return "\n".join([*lines, f"{INDENT}return {{{results}}}"])


def _numbered(name: str) -> Iterator[str]:
    """``mean``, ``mean_1``, ...: torch's names of values may be a flow's names of fields."""
    yield name
    for number in itertools.count(1):
        yield f"{name}_{number}"


def _arguments(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    def text(value: object) -> str:
        if isinstance(value, fx.Node):
            return "W" if is_symbolic(value) else names[value]
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(text, value)) + "]"
        return torch_name(value) if isinstance(value, torch.dtype) else repr(value)

    given = [text(value) for value in node.args]
    return ", ".join([*given, *(f"{key}={text(value)}" for key, value in node.kwargs.items())])


def lowered_text(graphs: FlowGraphs, method: str, graph: SegmentGraph) -> str:
    """The batched ragged graph as Python."""
    program = lower(graph)
    code = re.sub(r";\s+(\w+ = )+None", "", program.module.code.strip())
    return f"# {method}: N segments side by side, the page axis padded to W, valid [N, W]\n{code}"


def kernel_text(graphs: FlowGraphs, method: str, graph: SegmentGraph) -> str:
    """Generated Triton source.

    Raises:
        ConfigError: the flow is refused, or triton is not installed.
    """
    try:
        from kvsieve.backends.triton.generate import Refused, generate_score, generate_summarize
    except ImportError as error:
        raise ConfigError(
            f"--kernel: expected triton to be installed, received {error}; pip install triton, or use --lowered"
        ) from error
    try:
        return (generate_score if method == "score" else generate_summarize)(graphs).source.strip()
    except Refused as refusal:
        raise ConfigError(
            f"{flow_name(graphs.flow)}: no kernel is generated: {refusal.reason}; backend triton+compiled runs it"
        ) from refusal
