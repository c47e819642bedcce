"""A program's default dtype is its own affair: what the runtime stores, chooses and returns does not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvsieve.backends import backend_names
from kvsieve.budget import Budget
from kvsieve.dtypes import default_dtype
from kvsieve.flow import Flow, PageFields, build_flow, list_flows
from kvsieve.reference import ReferenceSegment
from kvsieve.retention import KEEP, Evict, Retention
from kvsieve.runtime import Runtime
from kvsieve.verify import verify_flow
from kvsieve.verify.accumulator import run_accumulator
from kvsieve.verify.accumulator_options import AccumulatorOptions
from kvsieve.verify.checks import Numbers
from kvsieve.verify.data import BulkData, LayerShape, PlantedData
from kvsieve.verify.report import FlowReport
from kvsieve.verify.subject import Subject
from kvsieve.verify.suite import CHECKS, Check, drive

SHAPE = LayerShape(2, 3, 20, 20)
LENGTHS, STEPS = (67, 9, 26), 4
OTHER = (torch.float64, torch.bfloat16)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.use_deterministic_algorithms(True)  # memory that nobody wrote, such as padding of scores, is always the same
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(before)


def life(
    build: Callable[[], Flow], backend: str, dtype: torch.dtype, retention: Retention = KEEP
) -> list[dict[str, torch.Tensor]]:
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
        built = build()
        budget = Budget(2, 1, 1) if built.score else Budget(0, 1, 2)
        runtime = Runtime(
            built,
            budget if retention is KEEP else None,
            page_size=built.page_size or 5,
            backend=backend,
            retention=retention,
        )
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
        chosen = attended.selection
        found |= {"pages": torch.where(chosen.listed(), chosen.pages, -1), "count": chosen.count}
    return {name: value for name, value in found.items() if value is not None}


QUICK = ("gqa_quest_sparse_attention", "h2o")
CASES = [
    pytest.param(flow, backend, marks=[pytest.mark.slow] if backend != "eager" and flow not in QUICK else [])
    for backend in backend_names()
    for flow in list_flows()
]


@pytest.mark.parametrize(("flow", "backend"), CASES)
def test_every_flow_is_the_same_to_the_bit(flow: str, backend: str) -> None:
    def build() -> Flow:
        return build_flow(flow)

    same(life(build, backend, torch.float32), [life(build, backend, dtype) for dtype in OTHER])


def same(expected: list[dict[str, torch.Tensor]], others: list[list[dict[str, torch.Tensor]]]) -> None:
    """To the bit, dtypes included."""
    for received in others:
        assert len(received) == len(expected)
        for place, (one, other) in enumerate(zip(expected, received, strict=True)):
            assert one.keys() == other.keys()
            for name, value in one.items():
                assert other[name].dtype is value.dtype, (place, name)
                assert torch.equal(_bits(other[name]), _bits(value)), (place, name)


def _bits(value: torch.Tensor) -> torch.Tensor:
    """NaN equals itself where bits are compared."""
    return value.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("flow", ["h2o", "tova"])
def test_eviction(flow: str) -> None:
    expected, *received = (
        life(lambda: build_flow(flow), "eager", dtype, Evict(20, 2, 5)) for dtype in (torch.float32, *OTHER)
    )
    same(expected, received)


class MadeNumbers(Flow):
    """Makes numbers in every way that takes its dtype from the default: new tensors, masks, quotients of integers."""

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        positive = (k > 0).sum()
        third = torch.full((3,), 1 / 3)
        return {"share": positive / 7, "third": third * k.mean(), "root": torch.sqrt(positive), "count": positive}

    def init_state(self, page_size: int, head_dim: int) -> dict[str, torch.Tensor]:
        return {"seen": torch.full((), 1 / 3), "steps": torch.zeros((), dtype=torch.int64)}

    def score(self, q: torch.Tensor, pages: PageFields) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        steps = pages["steps"] + 1
        near = torch.where(pages["age"] < 21, 0.1, 0.7)
        weights = torch.linspace(0.1, 0.9, q.shape[-1])
        level = (pages["k"].mean(1) * weights).sum(-1) * near + pages["share"] / 3 + pages["third"].sum(-1)
        seen = 0.9 * pages["seen"] + pages["count"] / 11 + 0.1 * (level > 0)
        return level + pages["root"] / steps + seen * torch.ones(1) * 0.3, {"seen": seen, "steps": steps}


@pytest.mark.parametrize("backend", backend_names())
def test_numbers_that_a_flow_makes(backend: str) -> None:
    same(life(MadeNumbers, backend, torch.float32), [life(MadeNumbers, backend, dtype) for dtype in OTHER])


def test_flows_of_vortex() -> None:
    for name in ("vortex:gqa_h2o_token_sparse_attention", "vortex:h2o_sparse_attention"):
        expected, *received = (life(lambda: build_flow(name), "eager", one) for one in (torch.float32, *OTHER))  # noqa: B023
        same(expected, received)


def test_the_reference_starts_from_what_is_stored() -> None:
    rows = []
    for dtype in (torch.float32, *OTHER):
        with default_dtype(dtype):
            segment = ReferenceSegment(MadeNumbers(), Budget(1), 5)
            for _ in range(6):
                segment.write(torch.ones(4), torch.ones(4))
            rows.append(segment)
    for other in rows[1:]:
        assert other.state == rows[0].state
        same([dict(page) for page in rows[0].summaries], [[dict(page) for page in other.summaries]])
    assert float(rows[0].state[0]["seen"]) == float(torch.tensor(1 / 3, dtype=torch.float32))


def _few(subject: Subject) -> Numbers:
    """Sink logits, soft-cap, planted hitters and every bound derived, in few steps."""
    p = subject.page_size
    shapes, data = [LayerShape(2, 3, 12, 12)], PlantedData(subject.seed)
    return drive(subject, shapes, data, [8 * p + 1, 2], 4, scale=0.4, softcap=2.5, sinks=True)


def test_the_verdict() -> None:
    """The same draws, bounds and numbers, and no check that fails by itself."""
    checks = [Check("few", "a little of everything", _few), *(check for check in CHECKS if check.name == "order")]
    expected, *received = (verdict(dtype, checks) for dtype in (torch.float32, *OTHER))
    assert all(report.passed for report in received), [report.text() for report in received]
    for report in received:
        for one, other in zip(expected.outcomes, report.outcomes, strict=True):
            assert vars(one.numbers) == vars(other.numbers), one.check


def verdict(dtype: torch.dtype, checks: list[Check]) -> FlowReport:
    with default_dtype(dtype):
        return verify_flow(MadeNumbers(), checks)


def test_the_verdict_in_transformers() -> None:
    pytest.importorskip("transformers")
    from kvsieve.verify.transformers import TRANSFORMERS

    with default_dtype(torch.bfloat16):
        report = verify_flow("gqa_quest_sparse_attention", TRANSFORMERS)
    assert report.passed, report.text()


def test_the_accumulator_report() -> None:
    """The harness draws its windows, finds the recurrence and reports the same numbers."""
    options = AccumulatorOptions(seq_len=48, steps=12, head_dim=20, topk=8)
    reports = []
    for dtype in (torch.float32, *OTHER):
        with default_dtype(dtype):
            reports.append(run_accumulator(build_flow("gqa_h2o_token_sparse_attention"), options).as_json())
    assert reports[0] == reports[1] == reports[2]
