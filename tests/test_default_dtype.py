"""A program's default dtype is its own affair: what the runtime stores, chooses and returns does not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvsieve.backends import backend_names
from kvsieve.budget import Budget
from kvsieve.dtypes import default_dtype
from kvsieve.flow import build_flow, list_flows
from kvsieve.runtime import Runtime
from kvsieve.verify.data import BulkData, LayerShape

SHAPE = LayerShape(2, 3, 20, 20)
LENGTHS, STEPS = (67, 9, 26), 4
OTHER = (torch.float64, torch.bfloat16)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def life(flow: str, backend: str, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """All that prompts in two chunks and sparse steps return, and what the pool holds at the end."""
    data = BulkData(7)
    with default_dtype(torch.float32):
        draws = [
            [data.tokens(SHAPE, 0, row, start, count, (0, 0)) for row, start, count in rows]
            for rows in (
                [(row, 0, length - 3) for row, length in enumerate(LENGTHS)],
                [(row, length - 3, 3) for row, length in enumerate(LENGTHS)],
                *([(row, length + step, 1) for row, length in enumerate(LENGTHS)] for step in range(STEPS)),
            )
        ]
    with default_dtype(dtype):
        built = build_flow(flow)
        budget = Budget(2, 1, 1) if built.score else Budget(0, 1, 2)
        runtime = Runtime(built, budget, page_size=built.page_size or 5, backend=backend)
        requests, seen = [runtime.admit() for _ in LENGTHS], []
        for parts in draws:
            counts = [len(q) for q, _, _ in parts]
            call = runtime.step(requests) if max(counts) == 1 else runtime.extend(requests, counts)
            attended = call.attend(0, *(torch.cat(part) for part in zip(*parts, strict=True)))
            seen.append(_tensors(attended))
        assert int(seen[-1]["count"].max()) * runtime.page_size < max(LENGTHS), "sparse"
        pool = runtime.layers[0].pool
        used = runtime.tables[requests[0]]
        seen.append({name: field[:, used.rows] for name, field in pool.state.items()})
        full = used.blocks[: used.length // pool.page_size]
        seen.append({name: field[:, full] for name, field in pool.summaries.items()})
        assert torch.get_default_dtype() is dtype, "the program's own default stays"
    return seen


def _tensors(attended: Any) -> dict[str, torch.Tensor]:
    found = {"out": attended.out, "lse": attended.lse, "scores": attended.scores}
    if attended.selection is not None:
        found |= {"pages": attended.selection.pages, "count": attended.selection.count}
    return {name: value for name, value in found.items() if value is not None}


QUICK = ("gqa_quest_sparse_attention", "h2o")
CASES = [
    pytest.param(flow, backend, marks=[pytest.mark.slow] if backend != "eager" and flow not in QUICK else [])
    for backend in backend_names()
    for flow in list_flows()
]


@pytest.mark.parametrize(("flow", "backend"), CASES)
def test_every_flow_is_the_same_to_the_bit(flow: str, backend: str) -> None:
    expected = life(flow, backend, torch.float32)
    for dtype in OTHER:
        received = life(flow, backend, dtype)
        assert len(received) == len(expected)
        for place, (one, other) in enumerate(zip(expected, received, strict=True)):
            assert one.keys() == other.keys()
            for name, value in one.items():
                assert other[name].dtype is value.dtype, (dtype, place, name)
                assert torch.equal(_bits(other[name]), _bits(value)), (dtype, place, name)


def _bits(value: torch.Tensor) -> torch.Tensor:
    """NaN equals itself where bits are compared."""
    return value.contiguous().flatten().view(torch.uint8)
