"""Eviction: Evict's values, what a runtime refuses, and what stays and is attended beside the float64 reference."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvsieve import Budget, ConfigError, Evict, Keep, NotCroppable, OutOfPages, Runtime, build_flow
from kvsieve.flow import Flow, list_flows
from kvsieve.mass import AttentionMass
from kvsieve.paging.slots import POSITION
from kvsieve.reference import EvictingSegment
from kvsieve.runtime import RequestId
from kvsieve.verify.checks import Numbers
from kvsieve.verify.data import IidData, LayerShape
from kvsieve.verify.eviction import EVICTION, GROUPS, Simulation
from kvsieve.verify.poison import spoil_free_memory
from kvsieve.verify.rounding import unit_roundoff
from kvsieve.verify.subject import Subject

EVICTABLE = [name for name, flow in list_flows().items() if flow.evictable]
SHAPE = LayerShape(2, 3, 20, 12)


def evict(flow: str | Flow, capacity: int, sink: int = 2, recent: int = 4) -> Evict:
    """A retention that the flow can honour."""
    flow = build_flow(flow) if isinstance(flow, str) else flow
    return Evict(capacity, sink, recent if flow.mass else capacity - sink)


class Pair:
    """A runtime that evicts beside one reference segment per (request, KV head); after every call both hold the same
    tokens, and steps give the same outputs."""

    def __init__(
        self,
        flow: str,
        retention: Evict,
        page_size: int = 5,
        shape: LayerShape = SHAPE,
        dtype: torch.dtype = torch.float32,
        num_blocks: int | None = None,
    ) -> None:
        self.flow, self.retention, self.shape, self.dtype = build_flow(flow), retention, shape, dtype
        self.runtime = Runtime(self.flow, page_size=page_size, num_blocks=num_blocks, retention=retention)
        self.data = IidData(5, q_scale=1.5)
        self.segments: dict[RequestId, list[EvictingSegment]] = {}

    def admit(self) -> RequestId:
        request = self.runtime.admit()
        self.segments[request] = [EvictingSegment(self.flow, self.retention) for _ in range(self.shape.heads)]
        return request

    def fork(self, source: RequestId) -> RequestId:
        twin = self.runtime.fork(source)
        self.segments[twin] = copy.deepcopy(self.segments[source])
        return twin

    def extend(self, requests: Sequence[RequestId], counts: Sequence[int]) -> torch.Tensor:
        return self._call(requests, counts, decode=False)

    def step(self, requests: Sequence[RequestId], times: int = 1) -> torch.Tensor:
        for _ in range(times):
            out = self._call(requests, [1] * len(requests), decode=True)
        return out

    def crop(self, request: RequestId, length: int) -> None:
        self.runtime.crop([request], [length])
        for segment in self.segments[request]:
            segment.crop(length)

    def stored(self, request: RequestId, head: int) -> list[int]:
        """Positions of the tokens that are stored."""
        entry = self.runtime.tables[request]
        field = self.runtime.layers[0].pool.state[POSITION]
        return sorted(field[head, entry.rows].flatten()[: entry.stored].tolist())

    def _call(self, requests: Sequence[RequestId], counts: Sequence[int], decode: bool) -> torch.Tensor:
        draws = [
            self.data.tokens(self.shape, 0, request, self.runtime.length(request), count, (0, 0))
            for request, count in zip(requests, counts, strict=True)
        ]
        q, k, v = (torch.cat(part).to(self.dtype) for part in zip(*draws, strict=True))
        call = self.runtime.step(requests) if decode else self.runtime.extend(requests, counts)
        out = call.attend(0, q, k, v).out
        spoil_free_memory(self.runtime)
        first = 0
        for request, count in zip(requests, counts, strict=True):
            rows = slice(first, first + count)
            first += count
            for head, segment in enumerate(self.segments[request] if count else ()):
                mine = slice(head * self.shape.group, (head + 1) * self.shape.group)
                queries, keys, values = q[rows, mine], k[rows, head], v[rows, head]
                if decode:
                    expected = segment.step(queries[0], keys[0], values[0]).out[None]
                else:
                    expected, _ = segment.extend(queries, keys, values)
                assert self.stored(request, head) == segment.alive
                self._close(out[rows, mine], expected, decode)
        return out

    def _close(self, received: torch.Tensor, expected: torch.Tensor, decode: bool) -> None:
        u = unit_roundoff(self.dtype)
        allowed = (
            1e-5 if self.dtype is torch.float32 else 2 * u if decode else 8 * u
        )  # a dense kernel rounds on its way
        error = (received.double() - expected).abs().amax() / expected.abs().amax()
        assert error <= allowed, float(error)


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
        if name in ("evicting lives", "second turns", "kept twin"):
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


# Memory, requests, bytes


def test_bytes_are_those_of_capacity_and_one_token() -> None:
    runtime = Runtime("h2o", page_size=5, retention=Evict(12, 2, 4))
    requests = [runtime.admit(), runtime.admit()]
    data, lengths = IidData(1), [40, 3]
    draws = [data.tokens(SHAPE, 0, i, 0, n, (0, 0)) for i, n in enumerate(lengths)]
    runtime.extend(requests, lengths).attend(0, *(torch.cat(part) for part in zip(*draws, strict=True)))
    for step in range(20):
        draws = [data.tokens(SHAPE, 0, i, n + step, 1, (0, 0)) for i, n in enumerate(lengths)]
        runtime.step(requests).attend(0, *(torch.cat(part) for part in zip(*draws, strict=True)))
    token = 2 * (20 + 12) * 4  # KV heads, K and V, float32
    short = sum(min(3 + step, 13) for step in range(1, 21))
    assert runtime.stats.steps == 20 and runtime.stats.field_bytes == 0
    assert runtime.stats.kv_bytes == (20 * 13 + short) * token
    assert runtime.stats.dense_bytes == sum(40 + 3 + 2 * step for step in range(1, 21)) * token


def test_prefix_keys_share_nothing() -> None:
    pair = Pair("streaming_llm", Evict(12, 2, 10))
    runtime = pair.runtime
    first = runtime.admit(["a", "b", "c"])
    pair.segments[first] = [EvictingSegment(pair.flow, pair.retention) for _ in range(2)]
    pair.extend([first], [17])
    pair.step([first], 2)
    second = runtime.admit(["a", "b", "c"])
    pair.segments[second] = [EvictingSegment(pair.flow, pair.retention) for _ in range(2)]
    assert runtime.length(second) == 0 and runtime.tables.prefixes.evictable == 0
    pair.extend([second], [17])
    assert not set(runtime.tables[first].blocks) & set(runtime.tables[second].blocks)
    pair.step([first, second], 3)
    runtime.finish([first, second])
    assert runtime.tables.block_allocator.used_blocks == runtime.tables.row_allocator.used_blocks == 0


def test_tokens_that_lost_others_are_not_adopted() -> None:
    pair = Pair("streaming_llm", Evict(12, 2, 10))
    lost, whole = pair.admit(), pair.admit()
    pair.extend([lost, whole], [17, 4])
    pair.step([lost, whole])
    heir = Runtime("streaming_llm", Budget(0, 1, 2), page_size=3)
    with pytest.raises(ConfigError, match="expected requests all of whose tokens are stored, received some that lost"):
        heir.adopt(pair.runtime, [whole, lost])
    assert not len(heir.tables) and not set(heir.layers) and not heir.tables.block_allocator.used_blocks
    (adopted,) = heir.adopt(pair.runtime, [whole])
    assert heir.length(adopted) == 5
    pair.step([lost, whole], 2)


def test_a_runtime_that_evicts_adopts_what_another_keeps() -> None:
    data = IidData(5, q_scale=1.5)
    keeper = Runtime("gqa_quest_sparse_attention", Budget(2), page_size=4)
    request = keeper.admit()
    prompt = data.tokens(SHAPE, 0, 0, 0, 30, (0, 0))
    keeper.extend([request], [30]).attend(0, *prompt)
    pair = Pair("streaming_llm", Evict(12, 2, 10), 5)
    (heir,) = pair.runtime.adopt(keeper, [request])
    pair.segments[heir] = [EvictingSegment(pair.flow, pair.retention) for _ in range(2)]
    for head, segment in enumerate(pair.segments[heir]):
        segment.extend(prompt[0][:, 3 * head : 3 * head + 3], prompt[1][:, head], prompt[2][:, head])
    pair.step([heir], 5)
    with pytest.raises(ConfigError, match="prompt-seeded attention mass"):
        Runtime("h2o", retention=Evict(40)).adopt(keeper, [request])


def test_out_of_pages_in_a_step_that_would_trim_shared_blocks_changes_nothing() -> None:
    pair = Pair("h2o", Evict(11, 2, 4), 5, num_blocks=8)
    first = pair.admit()
    pair.extend([first], [30])  # 6 of 8 blocks
    twin = pair.fork(first)
    tables = pair.runtime.tables
    entries = [copy.deepcopy(vars(tables[one])) for one in (first, twin)]
    used = tables.block_allocator.used_blocks, tables.row_allocator.used_blocks
    memory = [field.clone() for field in (pair.runtime.layers[0].pool.k, *pair.runtime.layers[0].pool.state.values())]
    with pytest.raises(OutOfPages, match="needs 3 free blocks, the pool has 2"):
        pair.runtime.step([twin])  # 11 tokens stay in three blocks, all of them shared
    assert entries == [vars(tables[one]) for one in (first, twin)]
    assert used == (tables.block_allocator.used_blocks, tables.row_allocator.used_blocks)
    pool = pair.runtime.layers[0].pool
    assert all(map(_same_bits, memory, (pool.k, *pool.state.values())))
    pair.runtime.finish([pair.segments and twin])
    del pair.segments[twin]
    pair.step([first], 6)
    assert tables.block_allocator.used_blocks == 3


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a, nan=7.0), torch.nan_to_num(b, nan=7.0))


def test_forks_of_a_prompt_trim_blocks_of_their_own() -> None:
    pair = Pair("tova", Evict(11, 2, 4), 5)
    first = pair.admit()
    pair.extend([first], [38])
    twins = [pair.fork(first), pair.fork(first)]
    pair.step(twins, 3)
    pair.step([first, *twins], 3)
    held = [set(pair.runtime.tables[one].blocks) for one in (first, *twins)]
    assert [len(blocks) for blocks in held] == [3, 3, 3] and len(set.union(*held)) == 9
    pair.runtime.finish([first, *twins])
    tables = pair.runtime.tables
    assert tables.block_allocator.used_blocks == tables.row_allocator.used_blocks == 0


def test_copies_of_shared_blocks_spare_what_a_trim_has_yet_to_read() -> None:
    """A long prompt is trimmed in the call in which a fork needs blocks of its own: not those that become free."""
    pair = Pair("tova", Evict(11, 0, 1), 5)
    long, short = pair.admit(), pair.admit()
    pair.extend([long, short], [60, 18])
    fork = pair.fork(short)
    pair.step([long, fork, short], 2)


@pytest.mark.parametrize("flow", EVICTABLE)
def test_a_turn_after_a_fork_or_a_preemption_is_trimmed_first(flow: str) -> None:
    pair = Pair(flow, evict(flow, 11))
    request = pair.admit()
    pair.extend([request], [18])
    pair.step([request], 2)
    fork = pair.fork(request)
    pair.runtime.preempt(request)
    pair.extend([fork], [3])
    pair.runtime.resume(request)
    pair.extend([request], [4])
    assert [len(pair.stored(one, 0)) for one in (fork, request)] == [14, 15]
    pair.step([request, fork], 2)


@pytest.mark.parametrize("flow", EVICTABLE)
def test_a_crop_reaches_the_last_short_call_and_no_further(flow: str) -> None:
    pair = Pair(flow, evict(flow, 15))
    request = pair.admit()
    pair.extend([request], [40])
    pair.crop(request, 0)  # 40 rows can be taken back
    pair.extend([request], [70])
    with pytest.raises(NotCroppable, match=r"to 69 tokens: what Evict leaves of flow .* is exact down to 70 only"):
        pair.runtime.crop([request], [69])
    pair.step([request], 3)
    with pytest.raises(NotCroppable, match="exact down to 73 only"):
        pair.runtime.crop([request], [72])
    pair.extend([request], [9])
    with pytest.raises(NotCroppable, match="exact down to 73 only"):
        pair.runtime.crop([request], [72])
    pair.crop(request, 73)  # the call is taken back; what it trimmed stays lost
    pair.step([request])
    pair.extend([request], [9])
    pair.crop(request, 76)
    pair.step([request], 12)


def test_reordered_requests_go_on_as_copies() -> None:
    pair = Pair("h2o", Evict(15, 2, 4))
    requests = [pair.admit() for _ in range(3)]
    pair.extend(requests, [33, 8, 20])
    pair.step(requests, 4)
    old = dict(pair.segments)
    order = [2, 0, 2]
    after = pair.runtime.reorder(requests, order)
    pair.segments = {one: copy.deepcopy(old[requests[i]]) for one, i in zip(after, order, strict=True)}
    pair.step(after, 9)


def test_the_pool_stays_as_large_as_the_prompt_and_the_capacity_need() -> None:
    pair = Pair("h2o", Evict(20, 2, 4), 5, LayerShape(1, 2, 4, 4))
    request = pair.admit()
    pair.extend([request], [40])
    pair.step([request], 30)
    pool, tables = pair.runtime.layers[0].pool, pair.runtime.tables
    sizes = pool.k.shape, pool.v.shape, {name: field.shape for name, field in pool.state.items()}
    used, table = tables.block_allocator.used_blocks, tables.blocks.shape
    assert used == 5 and len(tables[request].blocks) == 5  # 21 tokens
    pair.step([request], 300)
    assert sizes == (pool.k.shape, pool.v.shape, {name: field.shape for name, field in pool.state.items()})
    assert (tables.block_allocator.used_blocks, tables.blocks.shape) == (used, table)
    assert tables.row_allocator.used_blocks == 5 and pair.runtime.length(request) == 370


def test_a_pool_of_capacity_and_one_token_is_enough() -> None:
    pair = Pair("h2o", Evict(20, 2, 4), 5, num_blocks=5 + 5)
    requests = [pair.admit(), pair.admit()]
    pair.extend(requests, [9, 23])
    pair.step(requests, 20)
    assert pair.runtime.tables.block_allocator.idle_blocks == 0
    blocks = [list(pair.runtime.tables[one].blocks) for one in requests]
    pair.step(requests, 20)
    assert blocks == [pair.runtime.tables[one].blocks for one in requests]


@pytest.mark.slow
def test_twenty_thousand_tokens_in_the_memory_of_the_capacity() -> None:
    shape, capacity = LayerShape(2, 2, 16, 16), 64
    runtime = Runtime("h2o", page_size=16, retention=Evict(capacity), num_blocks=5 + 4)
    request, data = runtime.admit(), IidData(1)
    runtime.extend([request], [100]).attend(0, *data.tokens(shape, 0, 0, 0, 100, (0, 0)))
    sizes = set()
    for step in range(20_000):
        runtime.step([request]).attend(0, *data.tokens(shape, 0, 0, 100 + step, 1, (0, 0)))
        pool = runtime.layers[0].pool
        sizes.add((pool.k.shape, pool.state["mass"].shape, runtime.tables.blocks.shape, runtime.tables[request].stored))
    assert {stored for *_, stored in sizes} == {capacity + 1} and len(sizes) == 1
    assert runtime.length(request) == 20_100 and runtime.tables[request].evicted == 20_100 - 65
    position = pool.state[POSITION][:, runtime.tables[request].rows].flatten(1)[:, : capacity + 1].sort().values
    assert position[:, :4].tolist() == [[0, 1, 2, 3]] * 2
    assert position[:, -33:].tolist() == [list(range(20_067, 20_100))] * 2
    assert torch.isfinite(pool.state["mass"][:, runtime.tables[request].rows].flatten(1)[:, : capacity + 1]).all()
