"""The table of flows: fields, cost relative to dense attention, and what each backend makes of a flow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvsieve.backends import backend_names, get_backend
from kvsieve.budget import Budget
from kvsieve.dtypes import torch_name
from kvsieve.errors import KvsieveError
from kvsieve.flow import Flow, instantiate, list_flows
from kvsieve.graph import FieldSpec, FlowGraphs, Geometry, trace_flow

HEAD_DIM, GROUP, DTYPE = 128, 4, torch.bfloat16
PAGE_SIZE, CONTEXT, BUDGET_TOKENS = 16, 32_768, 1024
SETTING = (
    f"bytes per step: K/V attended plus fields scored, relative to dense attention, at head_dim {HEAD_DIM}, "
    f"{GROUP} query heads per KV head, bf16, context {CONTEXT:,}, budget {BUDGET_TOKENS:,} tokens, "
    f"page {PAGE_SIZE} or the flow's own"
)


@dataclass(frozen=True)
class FlowRow:
    """One flow of the table.

    Attributes:
        name: registered name.
        page_size: page size that the flow requires; None: any.
        summary: summary fields, name to ``shape`` or ``shape dtype``.
        state: state fields, likewise.
        reads: fields that ``score`` reads.
        relative_bytes: bytes per step divided by those of dense attention; None: the flow does not trace.
        backends: backend name to ``generated`` or ``refused: reason``.
    """

    name: str
    page_size: int | None
    summary: Mapping[str, str]
    state: Mapping[str, str]
    reads: tuple[str, ...]
    relative_bytes: float | None
    backends: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        return {**vars(self), "summary": dict(self.summary), "state": dict(self.state), "reads": list(self.reads)}


def flow_rows() -> list[FlowRow]:
    """A row per registered flow, by name."""
    return [flow_row(name, cls) for name, cls in list_flows().items()]


def flow_row(name: str, cls: type[Flow]) -> FlowRow:
    """The row of one flow, built with its default arguments; one that fails is refused with the reason."""
    page_size = cls.page_size or PAGE_SIZE
    try:
        flow = instantiate(cls, {})
        graphs = trace_flow(flow, Geometry(page_size, HEAD_DIM, HEAD_DIM, GROUP))
    except KvsieveError as error:
        refused = dict.fromkeys(backend_names(), f"refused: {error}")
        return FlowRow(name, cls.page_size, {}, {}, (), None, refused)
    return FlowRow(
        name,
        cls.page_size,
        {field: describe(spec) for field, spec in graphs.summary_fields.items()},
        {field: describe(spec) for field, spec in graphs.state_fields.items()},
        tuple(graphs.score_reads),
        relative_bytes(graphs, page_size),
        {backend: verdict(backend, graphs) for backend in backend_names()},
    )


def relative_bytes(graphs: FlowGraphs, page_size: int) -> float:
    """Bytes a step moves per KV head, divided by those of dense attention, at the table's setting."""
    budget = Budget.tokens(BUDGET_TOKENS, page_size, selects=graphs.flow.score is not None)
    pages = -(-CONTEXT // page_size)
    token_bytes = 2 * HEAD_DIM * DTYPE.itemsize
    attended = min(pages, budget.kept(pages)) * page_size * token_bytes
    scored = budget.window(pages) * graphs.score_bytes_per_page(DTYPE)
    return (attended + scored) / (CONTEXT * token_bytes)


def describe(spec: FieldSpec) -> str:
    """Shape per page, and the storage dtype unless it is K's: ``[128]``, ``[] float32``."""
    shape = f"[{', '.join(map(str, spec.shape))}]"
    return shape if spec.dtype is None else f"{shape} {torch_name(spec.dtype)}"


def verdict(backend: str, graphs: FlowGraphs) -> str:
    """``generated``, ``refused: reason``, or why the backend is not there."""
    try:
        reason = get_backend(backend).refusal(graphs)
    except KvsieveError as error:
        return f"unavailable: {error}"
    return "generated" if reason is None else f"refused: {reason}"
