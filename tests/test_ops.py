"""Every row of the op table: batched over ragged windows, with garbage in the padding, equal to torch itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvsieve.flow import Flow
from kvsieve.lower import lower
from kvsieve.ops import row_of, table
from kvsieve.ops.__main__ import page
from kvsieve.segment import SegmentGraph, checked_graph
from kvsieve.tracing import export
from kvsieve.verify.poison import garbage
from kvsieve.watch import FlowMethod
from op_cases import CASES

WIDTHS = (3, 1, 7, 2)
PER_PAGE = {"x": (2, 3), "y": (3,), "s": (), "i": (), "b": ()}
CONSTANTS = {"c": torch.tensor([[1.0, -2.0, 3.0], [0.0, 2.0, -1.0]]), "k": torch.tensor([2, 0, 2])}
NAMES = {"torch": torch, "F": torch.nn.functional, "A": torch.ops.aten}


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numbers = torch.randint(-3, 4, shape)
    return numbers > 0 if dtype is torch.bool else numbers.to(dtype)


def inputs(width: int) -> dict[str, torch.Tensor]:
    """One segment."""
    dtypes = {"i": torch.int64, "b": torch.bool}
    pages = {name: values(width, *shape, dtype=dtypes.get(name, torch.float32)) for name, shape in PER_PAGE.items()}
    return {**pages, "q": values(2, 3)}


def call(expression: str, named: dict[str, torch.Tensor]) -> torch.Tensor:
    result = eval(expression, {**NAMES, **CONSTANTS, **named})
    assert isinstance(result, torch.Tensor)
    return result


def traced(expression: str) -> SegmentGraph:
    method = FlowMethod(Flow(), "score")
    trace = export(method, lambda named: [call(expression, dict(named)).clone()], inputs(41), frozenset(PER_PAGE))
    return checked_graph(method, trace, ["out"])


def padded(parts: list[torch.Tensor], width: int) -> torch.Tensor:
    batch = torch.full((len(parts), width, *parts[0].shape[1:]), garbage(parts[0].dtype), dtype=parts[0].dtype)
    for row, part in zip(batch, parts, strict=True):
        row[: len(part)] = part
    return batch


@pytest.mark.parametrize(("row", "expression"), CASES)
def test_row(row: str, expression: str) -> None:
    torch.manual_seed(1)
    graph = traced(expression)
    assert row in {row_of(node.target) for node in graph.nodes}, "the expression does not use the op"
    segments = [inputs(width) for width in WIDTHS]
    width = max(WIDTHS)
    batch = {name: padded([segment[name] for segment in segments], width) for name in PER_PAGE}
    batch["q"] = torch.stack([segment["q"] for segment in segments])
    program = lower(graph)
    valid = torch.arange(width) < torch.tensor(WIDTHS)[:, None]
    (out,) = program.module(valid, *(batch[name] for name in program.inputs))
    shape = graph.shape_of(graph.outputs["out"])
    for result, segment, own in zip(out, segments, WIDTHS, strict=True):
        if None in shape:
            result = result.narrow(shape.index(None), 0, own)
        torch.testing.assert_close(result, call(expression, segment), rtol=2e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("name", "bound"), [("softmax", 1e-6), ("log_softmax", 2e-7)])
def test_shares_in_a_long_window(name: str, bound: float) -> None:
    """However the flow orders its axes, they are as exact as along the last one."""
    torch.manual_seed(0)
    x = torch.randn(1, 33000, 2, 3)
    program = lower(traced(f"x.{name}(0)"))
    (out,) = program.module(torch.ones(1, 33000, dtype=torch.bool), x)
    exact = getattr(torch, name)(x.double(), 1)
    assert ((out - exact).abs() <= bound * exact.abs()).all()


def test_median_of_an_expanded_tensor() -> None:
    """torch.median itself reads foreign memory here (torch 2.13, CPU), so that it cannot be the expectation."""
    q = torch.stack([values(2, 3) for _ in range(3)])
    program = lower(traced("q[None].expand(3, -1, -1).median(0).values"))
    assert program.inputs == ("q",)
    (out,) = program.module(torch.ones(3, 1, dtype=torch.bool), q)
    assert torch.equal(out, q)


def test_every_row_has_a_case() -> None:
    assert {row for row, _ in CASES} == set(table)


def test_the_documented_op_set_is_current() -> None:
    documented = Path(__file__).parents[1] / "docs" / "ops.md"
    assert documented.read_text() == page(), "run: python -m kvsieve.ops > docs/ops.md"
