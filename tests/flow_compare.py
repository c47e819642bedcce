"""A lowered flow against its own code: batched and ragged in float32, segment by segment in float64.

Errors are relative to the largest value of an output.
"""

from __future__ import annotations

import torch

from kvsieve.flow import DoublePrecision, Flow, PageFields, extra_parameters, with_dtype
from kvsieve.graph import FlowGraphs, Geometry
from kvsieve.lower import Program, lower
from kvsieve.verify.poison import garbage

F64 = torch.float64
BOUND = 1e-5
SMALL = 0.1
WIDTHS = (1, 6, 3, 9, 2)


def compare(graphs: FlowGraphs, seed: int = 0) -> float:
    """Both methods of a flow, batched and ragged, against its own code segment by segment; the worst error."""
    geometry, exact = graphs.geometry, with_dtype(graphs.flow, F64)
    torch.manual_seed(seed)
    pages = _page_fields(graphs, geometry)
    error = 0.0
    if graphs.summarize:
        summaries = _summaries(exact, pages)
        results = run(lower(graphs.summarize), torch.ones(len(pages["k"]), 1, dtype=torch.bool), pages)
        for name, result in results.items():
            error = max(error, check(name, result, summaries[name]))
        pages |= {name: value.float() if value.is_floating_point() else value for name, value in summaries.items()}
    assert graphs.score is not None
    queries = torch.randn(len(WIDTHS), geometry.group, geometry.head_dim)
    program = lower(graphs.score)
    width = max(WIDTHS)
    valid = torch.arange(width) < torch.tensor(WIDTHS)[:, None]
    batch = {name: _padded(value, valid) for name, value in pages.items()}
    results = run(program, valid, {**batch, "q": queries})
    for i, own in enumerate(pages["k"].split(WIDTHS)):
        first = sum(WIDTHS[:i])
        fields = {name: value[first : first + len(own)] for name, value in pages.items()}
        expected = _score(exact, geometry, queries[i], fields)
        for name, result in results.items():
            error = max(error, check(f"{name}, W = {len(own)}", result[i, : len(own)], expected[name]))
    return error


def check(what: str, result: torch.Tensor, expected: torch.Tensor) -> float:
    """The error relative to the largest value (or to ``SMALL``: means may cancel); integers must be equal."""
    assert result.shape == expected.shape, f"{what}: {tuple(result.shape)} for {tuple(expected.shape)}"
    if not expected.is_floating_point():
        assert torch.equal(result, expected), what
        return 0.0
    error = float((result.to(F64) - expected).abs().max() / expected.abs().max().clamp(min=SMALL))
    assert error <= BOUND, f"{what}: relative error {error:.1e}"
    return error


def run(program: Program, valid: torch.Tensor, fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    values = program.module(valid, *(fields[name] for name in program.inputs))
    return dict(zip(program.outputs, values, strict=True))


def _page_fields(graphs: FlowGraphs, geometry: Geometry) -> dict[str, torch.Tensor]:
    """Random pages of all segments, one after the other."""
    count, p = sum(WIDTHS), geometry.page_size
    position = torch.cat([torch.arange(width) * p + 1 for width in WIDTHS]).float()
    pages = {
        "k": torch.randn(count, p, geometry.head_dim),
        "v": torch.randn(count, p, geometry.v_head_dim),
        "position": position,
        "age": 9 * p - position,
    }
    for name, spec in graphs.state_fields.items():
        floating = spec.dtype is None or spec.dtype.is_floating_point
        shape = (count, *spec.shape)
        pages[name] = torch.randn(shape) if floating else torch.randint(0, 7, shape, dtype=spec.dtype)
    return pages


def _summaries(exact: Flow, pages: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    assert exact.summarize is not None
    with DoublePrecision():
        rows = [exact.summarize(k.to(F64), v.to(F64)) for k, v in zip(pages["k"], pages["v"], strict=True)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _padded(value: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Rows of all segments as [N, W, ...] with garbage behind each segment's own."""
    batch = torch.full((*valid.shape, *value.shape[1:]), garbage(value.dtype), dtype=value.dtype)
    batch[valid] = value
    return batch


def _score(flow: Flow, geometry: Geometry, q: torch.Tensor, fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    assert flow.score is not None
    wide = {name: value.to(F64) if value.is_floating_point() else value for name, value in fields.items()}
    numbers = {"layer": geometry.layer, "scale": geometry.attention_scale}
    with DoublePrecision():
        result = flow.score(q.to(F64), PageFields(wide), **{name: numbers[name] for name in extra_parameters(flow)})
    scores, state = result if isinstance(result, tuple) else (result, {})
    return {"scores": scores, **state}
