"""Eviction: bytes read, blocks held, and what forks, crops, adoption and a full pool do to requests that evict."""

from __future__ import annotations

import copy

import pytest
import torch

from evict_pair import EVICTABLE, SHAPE, Pair, evict
from kvsieve import Budget, ConfigError, Evict, NotCroppable, OutOfPages, Runtime
from kvsieve.paging.slots import POSITION
from kvsieve.verify.data import IidData, LayerShape


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
    first = pair.admit(["a", "b", "c"])
    pair.extend([first], [17])
    pair.step([first], 2)
    second = pair.admit(["a", "b", "c"])
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
    pair.segments[heir] = pair.fresh()
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
    pair.runtime.finish([twin])
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
