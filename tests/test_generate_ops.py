"""Every row of the op table as a generated kernel, on poisoned pages, beside torch itself; and as data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kvsieve.backends.triton.generate.__main__ import page
from kvsieve.backends.triton.generate.ir import Op
from kvsieve.backends.triton.generate.program import Generated, Variant
from kvsieve.backends.triton.generate.table import ROWS
from kvsieve.backends.triton.generate.translate import Translated, translate
from kvsieve.flow import Flow
from kvsieve.ops import table
from kvsieve.verify.poison import garbage
from op_cases import CASES
from test_ops import PER_PAGE, call, inputs, traced
from triton_device import DEVICE, NEEDS_GPU_OR_INTERPRETER

pytestmark = NEEDS_GPU_OR_INTERPRETER
WIDTHS, HEADS = (3, 1, 0, 7, 2), 2


def test_the_table_is_whole() -> None:
    assert set(ROWS) == set(table)
    for name, row in ROWS.items():
        assert row.prints and row.error, name


def by_page(translated: Translated) -> Op:
    """The result as a state field would take it: the page axis first, or the same for every page."""
    b, (out,) = translated.builder, translated.outputs.values()
    if out.page_axis is None:
        return b.expand(b.regroup(out, (1, *out.shape)), (None, *out.shape))
    return b.permute(out, [out.page_axis, *(axis for axis in range(len(out.shape)) if axis != out.page_axis)])


def stored(parts: list[list[torch.Tensor]], places: torch.Tensor) -> torch.Tensor:
    """[H, blocks, ...] of the segments' pages at their places, and garbage elsewhere."""
    shape, dtype = parts[0][0].shape[1:], parts[0][0].dtype
    field = torch.full((int(places.max()) + 3, HEADS, *shape), garbage(dtype), dtype=dtype).transpose(0, 1)
    for head in range(HEADS):
        field[head, places] = torch.cat([row[head] for row in parts])
    return field.to(DEVICE)


def run_case(expression: str) -> None:
    torch.manual_seed(1)
    graph = traced(expression)
    result = by_page(translate(Flow(), "score", graph))
    program = Generated("case score", {"out": result}, {"out": None})
    segments = [[inputs(width) for _ in range(HEADS)] for width in WIDTHS]
    total = sum(WIDTHS)
    places = torch.randperm(total + 2)[:total] + 1
    fields = {name: stored([[one[name] for one in row] for row in segments], places) for name in PER_PAGE}
    statics = tuple(size for size in result.shape if size is not None)
    out = torch.zeros(HEADS, int(places.max()) + 3, *statics, dtype=result.dtype, device=DEVICE)
    table_of = torch.zeros(len(WIDTHS), max(WIDTHS) + 1, dtype=torch.int64)
    first = 0
    for place, width in enumerate(WIDTHS):
        table_of[place, 1 : width + 1] = places[first : first + width]
        first += width
    call_inputs = window_inputs(table_of, torch.stack([torch.stack([one["q"] for one in row]) for row in segments]))
    pool: Any = SimpleNamespace(k=out, v=out, summaries=fields, state={"out": out})
    program.launch(Variant(HEADS, None, False), len(WIDTHS), max(WIDTHS), call_inputs, pool)
    shape = graph.shape_of(graph.outputs["out"])
    for place, width in enumerate(WIDTHS):
        for head in range(HEADS if width else 0):
            expected = call(expression, segments[place][head])
            if None in shape:
                expected = expected.movedim(shape.index(None), 0)
            else:
                expected = expected.expand(width, *expected.shape)
            received = out[head, table_of[place, 1 : width + 1].to(DEVICE)].cpu()
            torch.testing.assert_close(received, expected, rtol=4e-6, atol=1e-6, equal_nan=True)


def window_inputs(table_of: torch.Tensor, q: torch.Tensor) -> dict[str, Any]:
    q, table_of = q.to(DEVICE), table_of.to(DEVICE)
    return {
        "q_ptr": q, "q_request": q.stride(0), "q_head": q.stride(1), "q_group": q.stride(2),
        "requests_ptr": torch.arange(len(WIDTHS), device=DEVICE), "widths_ptr": torch.tensor(WIDTHS, device=DEVICE),
        "table_ptr": table_of, "table_stride": table_of.stride(0),
        "row_table_ptr": table_of, "row_table_stride": table_of.stride(0),
        "width_bound": max(WIDTHS), "most_pages": sum(WIDTHS), "sink": 1, "page_size": 2,
    }  # fmt: skip


QUICK = 9
"""Every so many cases are run in the quick suite."""


@pytest.mark.parametrize(
    ("row", "expression"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (number % QUICK > 0)) for number, case in enumerate(CASES)],
)
def test_row(row: str, expression: str) -> None:
    run_case(expression)


def test_the_documented_table_is_current() -> None:
    documented = Path(__file__).parents[1] / "docs" / "kernels.md"
    assert documented.read_text() == page(), "run: python -m kvsieve.backends.triton.generate > docs/kernels.md"
