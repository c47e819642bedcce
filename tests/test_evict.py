"""Eviction: Evict's values, what a runtime refuses, and what stays and is attended beside the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evict_pair import EVICTABLE, SHAPE, Pair, evict
from kvsieve import Budget, ConfigError, Evict, Keep, Runtime, build_flow
from kvsieve.flow import Flow
from kvsieve.mass import AttentionMass
from kvsieve.paging.slots import POSITION
from kvsieve.reference import EvictingSegment
from kvsieve.verify.checks import Numbers
from kvsieve.verify.data import IidData, LayerShape
from kvsieve.verify.eviction import EVICTION, GROUPS, Simulation
from kvsieve.verify.programs import Program, run_program
from kvsieve.verify.subject import Subject

pytestmark = pytest.mark.usefixtures("shared_traces")

# Values and refusals


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"capacity": 35}, r"capacity=\): expected at least sink \+ recent = 36 tokens, received 35; raise it"),
        ({"capacity": 0, "sink": 0}, r"Evict\(capacity=\): expected an integer >= 1, received 0"),
        ({"capacity": 8.0}, r"Evict\(capacity=\): expected an integer >= 1, received 8.0"),
        ({"capacity": True}, r"Evict\(capacity=\): expected an integer >= 1, received True"),
        ({"capacity": 99, "sink": -1}, r"Evict\(sink=\): expected an integer >= 0, received -1"),
        ({"capacity": 99, "recent": 0}, r"Evict\(recent=\): expected an integer >= 1, received 0"),
        ({"capacity": 99, "recent": "4"}, r"Evict\(recent=\): expected an integer >= 1, received '4'"),
    ],
)
def test_wrong_values_are_refused(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Evict(**arguments)


def test_values() -> None:
    assert (Evict(36).sink, Evict(36).recent) == (4, 32)
    assert Evict(1, 0, 1) == Evict(capacity=1, sink=0, recent=1)
    assert EVICTABLE == ["h2o", "snapkv", "streaming_llm", "tova"]


class Rigid(Flow):
    """Evictable, at one page size only."""

    page_size, evictable = 4, True
    mass = AttentionMass(1.0)


@pytest.mark.parametrize(
    ("flow", "options", "expected"),
    [
        ("h2o", {"budget": Budget(3), "retention": Evict(64)}, r"expected a budget or retention=Evict.*received both"),
        ("h2o", {}, r"budget: expected a Budget, or a mapping .* received None"),
        ("h2o", {"retention": 64}, r"retention: expected Keep\(\) or Evict\(capacity\), received 64"),
        ("h2o", {"budget": Budget(3), "retention": Evict}, r"retention: expected Keep\(\) or Evict"),
        (
            "gqa_quest_sparse_attention",
            {"retention": Evict(64)},
            r"flow gqa_quest_sparse_attention: expected one that may evict .*\(h2o, snapkv, streaming_llm, tova, or .*"
            r"use retention Keep\(\)",
        ),
        (
            "streaming_llm",
            {"retention": Evict(64)},
            r"no attention mass .* expected capacity = sink \+ recent, received Evict.*; set recent=60",
        ),
        ("h2o", {"retention": Evict(64), "dense_layers": [2, 0]}, r"expected no dense layers .*received \[0, 2\]"),
        ("h2o", {"retention": Evict(64), "page_size": 0}, r"page_size: expected an integer >= 1, received 0"),
        (Rigid(), {"retention": Evict(64), "page_size": 5}, r"requires page_size 4, received 5"),
    ],
)
def test_what_a_runtime_refuses(flow: str | Flow, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Runtime(flow, **options)


def test_a_flow_of_ones_own_evicts_at_its_page_size() -> None:
    assert Runtime(Rigid(), retention=Evict(64)).page_size == 4
    assert Runtime("h2o", Budget(3), retention=Keep()).eviction is None


# Against the reference


@pytest.mark.parametrize("flow", EVICTABLE)
@pytest.mark.parametrize(
    ("page_size", "shape"),
    [
        (1, LayerShape(2, 1, 20, 12)),
        (5, LayerShape(1, 3, 80, 80)),
        (33, LayerShape(2, 7, 20, 20)),
        (5, LayerShape(1, 24, 20, 4)),
    ],
)
def test_what_stays_and_is_attended_is_the_references(flow: str, page_size: int, shape: LayerShape) -> None:
    """Ragged prompts, steps, a second turn in two chunks, a fork, a crop, preemption."""
    pair = Pair(flow, evict(flow, 17), page_size, shape)
    first, second, third = (pair.admit() for _ in range(3))
    pair.extend([first, second, third], [43, 1, 16])
    pair.step([first, second, third], 8)
    pair.extend([third, first], [9, 0])
    pair.extend([first, third], [4, 3])
    fork = pair.fork(third)
    pair.crop(third, pair.runtime.length(third) - 2)
    pair.step([third, second, fork, first], 3)
    pair.runtime.preempt(fork)
    pair.step([first], 2)
    pair.runtime.resume(fork)
    pair.step([fork, second], 10)
    assert len(pair.stored(fork, 0)) == 18 and pair.runtime.length(fork) == 16 + 8 + 9 + 3 + 13


@pytest.mark.parametrize("flow", EVICTABLE)
def test_bfloat16_is_evicted_as_its_rounded_values_say(flow: str) -> None:
    pair = Pair(flow, evict(flow, 19, 3, 5), 5, dtype=torch.bfloat16)
    requests = [pair.admit(), pair.admit()]
    pair.extend(requests, [31, 7])
    pair.step(requests, 20)
    assert pair.runtime.layers[0].pool.k.dtype is torch.bfloat16
    assert pair.runtime.tables[requests[0]].evicted == 31 + 20 - 20


@pytest.mark.parametrize("flow", EVICTABLE)
@pytest.mark.parametrize("page_size", [1, 5, 33])
def test_around_the_capacity(flow: str, page_size: int) -> None:
    """With capacity or fewer tokens stored a step evicts nothing; with one more it evicts one."""
    pair = Pair(flow, evict(flow, 12), page_size)
    requests = [pair.admit() for _ in range(3)]
    tables = pair.runtime.tables
    pair.extend(requests, [11, 12, 13])
    assert [tables[one].evicted for one in requests] == [0, 0, 0]  # a prompt is attended whole
    pair.step(requests)
    assert [(tables[one].stored, tables[one].evicted) for one in requests] == [(12, 0), (13, 0), (13, 1)]
    pair.step(requests)
    assert [(tables[one].stored, tables[one].evicted) for one in requests] == [(13, 0), (13, 1), (13, 2)]
    pair.step(requests)
    assert [tables[one].evicted for one in requests] == [1, 2, 3]
    pair.extend(requests, [1, 2, 3])  # what the last step left is trimmed first, the new tokens all stay
    assert [(tables[one].stored, tables[one].evicted) for one in requests] == [(13, 2), (14, 3), (15, 4)]
    assert all(len(tables[one].blocks) == tables.pages(tables[one].stored) for one in requests)


def test_no_room_beside_sinks_and_recent_tokens_is_streaming() -> None:
    pair = Pair("h2o", Evict(9, 4, 5), 5)
    request = pair.admit()
    pair.extend([request], [30])
    pair.step([request], 4)
    assert pair.stored(request, 0) == pair.stored(request, 1) == [0, 1, 2, 3, *range(28, 34)]


def test_where_mass_means_nothing_the_older_tokens_stay() -> None:
    retention = Evict(11, 2, 4)
    runtime, segment = Runtime("h2o", page_size=5, retention=retention), EvictingSegment(build_flow("h2o"), retention)
    q, k, v = IidData(3).tokens(LayerShape(1, 3, 20, 12), 0, 0, 0, 31, (0, 0))
    k[5] = float("nan")  # of every query from here on, each probability is NaN
    request = runtime.admit()
    runtime.extend([request], [30]).attend(0, q[:30], k[:30], v[:30])
    runtime.step([request]).attend(0, q[30:], k[30:], v[30:])
    segment.extend(q[:30], k[:30, 0], v[:30, 0])
    segment.step(q[30], k[30, 0], v[30, 0])
    rows = runtime.tables[request].rows
    stored = runtime.layers[0].pool.state[POSITION][0, rows].flatten()[:12].sort().values.tolist()
    assert stored == segment.alive == [*range(7), *range(26, 31)]


def test_a_mass_that_is_not_a_number_is_less_than_none() -> None:
    """SnapKV's steps add nothing: generated tokens have no mass, those of a broken prompt NaN, and these go first."""
    retention = Evict(11, 2, 4)
    runtime, segment = (
        Runtime("snapkv", page_size=5, retention=retention),
        EvictingSegment(build_flow("snapkv"), retention),
    )
    q, k, v = IidData(3).tokens(LayerShape(1, 3, 20, 12), 0, 0, 0, 28, (0, 0))
    k[9] = float("nan")
    request = runtime.admit()
    runtime.extend([request], [10]).attend(0, q[:10], k[:10], v[:10])
    segment.extend(q[:10], k[:10, 0], v[:10, 0])
    for token in range(10, 28):
        here = slice(token, token + 1)
        runtime.step([request]).attend(0, q[here], k[here], v[here])
        segment.step(q[token], k[token, 0], v[token, 0])
    rows = runtime.tables[request].rows
    stored = runtime.layers[0].pool.state[POSITION][0, rows].flatten()[:12].sort().values.tolist()
    assert stored == segment.alive == [0, 1, *range(10, 15), *range(23, 28)]


@pytest.mark.parametrize("flow", EVICTABLE)
def test_within_the_capacity_every_bit_is_that_of_dense_attention(flow: str) -> None:
    draws = [IidData(2).tokens(SHAPE, 0, 0, *part, (0, 0)) for part in ((0, 11), *((i, 1) for i in range(11, 21)))]
    outs = []
    for options in ({"retention": evict(flow, 21)}, {"budget": Budget(50 * bool(build_flow(flow).score), 1, 9)}):
        runtime = Runtime(flow, page_size=5, **options)  # type: ignore[arg-type]
        request = runtime.admit()
        calls = [runtime.extend([request], [11]).attend(0, *draws[0])]
        calls += [runtime.step([request]).attend(0, *draw) for draw in draws[1:]]
        outs.append(torch.cat([call.out for call in calls]))
    assert torch.equal(*outs)


# What the checks of kvsieve verify say


@pytest.mark.parametrize("flow", EVICTABLE)
def test_the_checks_of_eviction_pass(flow: str) -> None:
    """All but the two long ones, of which the last runs for few steps."""
    subject, seen = Subject(build_flow(flow)), Numbers()
    for name, _, check in EVICTION:
        if name in ("eviction order", "evicting lives", "second turns", "kept twin"):
            seen.merge(check(subject))
    assert seen.checked["selection"] > 150 and seen.checked["output"] > 150
    assert ("mass" in seen.checked) == (subject.flow.mass is not None)
    few = Numbers()
    Simulation(subject, subject.flow, GROUPS).run(few, 100)
    assert few.checked["selection"] == 3 * (2 * 100 + 10) and few.agreed >= 0.99 * few.selections


@pytest.mark.slow
@pytest.mark.parametrize("flow", EVICTABLE)
@pytest.mark.parametrize("check", ["eviction", "algorithm 1"])
def test_the_long_checks_of_eviction_pass(flow: str, check: str) -> None:
    (run,) = [run for name, _, run in EVICTION if name == check]
    seen = run(Subject(build_flow(flow)))
    assert seen.checked["selection"] > 500 and seen.agreed >= 0.99 * seen.selections


def test_flows_that_cannot_evict_are_left_out_of_them() -> None:
    for _, _, check in EVICTION:
        assert check(Subject(build_flow("gqa_quest_sparse_attention"))) == Numbers()


def test_a_fork_that_is_cropped_is_checked_by_itself() -> None:
    events = (("admit", 1, 1, 1), ("fork", 1, 1, 1), ("extend", 2, 1, 0), ("crop", 2, 0, 1), ("step", 0, 1, 1))
    shapes, budget = (LayerShape(2, 1, 4, 4),), Budget(0, 2, 2)
    numbers = run_program(
        Program("streaming_llm", 5, shapes, budget, "ties", 237, 8, (), events, retention=Evict(2, 1, 1))
    )
    assert numbers.checked["selection"] == 2
