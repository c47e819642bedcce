"""Fork, crop, reorder, preempt, resume and prefix sharing: what is shared, what is copied, what is refused.

Values are judged by the oracle's twin after every event; these tests pin down the memory and the errors.
"""

from __future__ import annotations

import pytest

from kvsieve import Budget, ConfigError, NotCroppable, OutOfPages, build_flow
from kvsieve.call import Call
from kvsieve.verify.data import IidData, LayerShape
from kvsieve.verify.poison import poisoned_pools
from kvsieve.verify.twin import Twin, TwinOptions

pytestmark = pytest.mark.usefixtures("shared_traces")

P = 4
SHAPES = (LayerShape(2, 3, 8, 6), LayerShape(1, 7, 5, 5))
STATELESS, STATEFUL = "gqa_quest_sparse_attention", "gqa_h2o_token_sparse_attention"


def twin(flow: str = STATELESS, num_blocks: int | None = None) -> Twin:
    built = build_flow(flow)
    options = TwinOptions(built.page_size or P, SHAPES, num_blocks=num_blocks)
    with poisoned_pools():
        return Twin(built, Budget(1, 1, 1), options, IidData(3))


def blocks(pair: Twin, request: int) -> list[int]:
    return list(pair.runtime.tables[request].blocks)


def test_a_fork_shares_full_pages_and_copies_the_partial_one_on_write() -> None:
    pair = twin()
    first = pair.admit()
    pair.extend([first], [3 * P + 2])
    second = pair.fork(first)
    assert blocks(pair, second) == blocks(pair, first)
    assert pair.runtime.tables.block_allocator.used_blocks == 4
    pair.step([second])
    assert blocks(pair, second)[:3] == blocks(pair, first)[:3]
    assert blocks(pair, second)[3] != blocks(pair, first)[3]
    assert pair.runtime.tables.block_allocator.used_blocks == 5
    pair.step([first, second])  # the first is alone on its partial page again: no further copy
    assert pair.runtime.tables.block_allocator.used_blocks == 5
    pair.finish([first])
    pair.step([second])
    pair.finish([second])
    assert pair.runtime.tables.block_allocator.used_blocks == 0


def test_forks_have_state_of_their_own() -> None:
    pair = twin(STATEFUL)
    first = pair.admit()
    pair.extend([first], [9])
    pair.step([first])
    second = pair.fork(first)
    assert set(pair.runtime.tables[first].rows).isdisjoint(pair.runtime.tables[second].rows)
    pair.step([second])
    pair.step([first])
    pair.step([second, first])


def test_requests_with_equal_keys_share_their_first_pages() -> None:
    pair = twin()
    first = pair.admit(family=1, family_pages=3)
    pair.extend([first], [3 * P + 1])
    second = pair.admit(family=1, family_pages=2)
    assert pair.requests[second] == 2 * P and blocks(pair, second) == blocks(pair, first)[:2]
    other = pair.admit(family=2, family_pages=2)
    assert pair.requests[other] == 0
    pair.extend([second, other], [3, 3 * P])
    pair.step([first, second, other])
    pair.finish([first, second])
    third = pair.admit(family=1, family_pages=3)
    assert pair.requests[third] == 3 * P, "the pages outlive the requests that stored them"
    pair.extend([third], [1])
    pair.step([third])


def test_pages_of_a_call_that_layers_have_not_attended_are_not_shared() -> None:
    pair = twin()
    first = pair.runtime.admit(["a"])
    pair.runtime.extend([first], [P])
    assert pair.runtime.length(pair.runtime.admit(["a"])) == 0


def test_a_first_call_that_ends_early_offers_no_prefix() -> None:
    """Until a second call nobody knows how many layers there are: the first may have been left half way."""
    pair = twin()
    pair.abandon(pair.admit(family=1, family_pages=3), 3 * P)
    second = pair.admit(family=1, family_pages=3)
    assert pair.requests[second] == 0
    pair.extend([second], [3 * P + 1])
    pair.step([second])
    third = pair.admit(family=1, family_pages=3)
    assert pair.requests[third] == 3 * P
    pair.extend([third], [1])


def test_cached_prefixes_give_way_when_the_pool_runs_short() -> None:
    pair = twin(num_blocks=5)
    first = pair.admit(family=1, family_pages=4)
    pair.extend([first], [3 * P])
    pair.extend([first], [P])
    pair.finish([first])
    assert len(pair.runtime.tables.prefixes) == 4
    second = pair.admit()
    pair.extend([second], [3 * P])
    assert len(pair.runtime.tables.prefixes) == 2
    with pytest.raises(OutOfPages, match="needs 3 free blocks, the pool has 2"):
        pair.extend([second], [3 * P])
    pair.check_storage()


def test_keys_end_where_a_crop_begins() -> None:
    pair = twin()
    first = pair.admit(family=1, family_pages=3)
    pair.extend([first], [P + 2])
    pair.crop([first], [P - 1])
    pair.extend([first], [2 * P + 3])  # other tokens than the family's from here on
    second = pair.admit(family=1, family_pages=3)
    assert pair.requests[second] == P, "the page stored before the crop is still the family's"
    pair.step([first])
    pair.extend([second], [2])
    pair.step([second])


def test_state_is_exact_within_the_last_short_call_only() -> None:
    pair = twin(STATEFUL)
    first = pair.admit()
    pair.extend([first], [65])
    with pytest.raises(NotCroppable, match="exact down to 65"):
        pair.crop([first], [64])
    pair.extend([first], [64])
    pair.crop([first], [65])
    pair.extend([first], [4])
    pair.step([first])
    with pytest.raises(NotCroppable, match="exact down to 70"):
        pair.crop([first], [69])
    pair.check_storage()
    stateless = twin()
    second = stateless.admit()
    stateless.extend([second], [100])
    stateless.step([second])
    stateless.crop([second], [0])
    stateless.extend([second], [5])


def test_crop_of_several_requests_is_all_or_nothing() -> None:
    pair = twin(STATEFUL)
    first, second = pair.admit(), pair.admit()
    pair.extend([first, second], [8, 8])
    pair.step([second])
    with pytest.raises(NotCroppable):
        pair.crop([first, second], [3, 3])
    with pytest.raises(ConfigError, match=r"length in \[0, 8\]"):
        pair.crop([first], [9])
    pair.check_storage()


def test_reorder_moves_copies_and_ends() -> None:
    pair = twin(STATEFUL)
    requests = [pair.admit() for _ in range(3)]
    pair.extend(requests, [5, 9, 13])
    pair.step(requests)
    result = pair.reorder(requests, [1, 1, 0])
    assert result[0] == requests[1] and result[2] == requests[0] and result[1] not in requests
    assert [pair.requests[request] for request in result] == [10, 10, 6]
    pair.step(result)
    with pytest.raises(ConfigError, match="places in"):
        pair.runtime.reorder(result, [3])


@pytest.mark.parametrize("flow", [STATELESS, STATEFUL])
def test_a_preempted_request_frees_its_pages_and_comes_back(flow: str) -> None:
    p = build_flow(flow).page_size or P
    pair = twin(flow, num_blocks=5)
    first = pair.admit()
    pair.extend([first], [4 * p - 1] if p > 1 else [4])
    pair.step([first])
    pair.preempt(first)
    assert pair.runtime.tables.block_allocator.used_blocks == 0
    with pytest.raises(ConfigError, match="resume them first"):
        pair.runtime.step([first])
    second = pair.admit()
    pair.extend([second], [2 * p])
    with pytest.raises(OutOfPages):
        pair.resume(first)
    pair.check_storage()
    pair.finish([second])
    pair.resume(first)
    with pytest.raises(ConfigError, match="expected a preempted request"):
        pair.runtime.resume(first)
    pair.finish([first])


def test_finishing_a_preempted_request_forgets_what_was_saved() -> None:
    pair = twin()
    first = pair.admit()
    pair.extend([first], [6])
    pair.preempt(first)
    pair.finish([first])
    with pytest.raises(ConfigError, match="expected a preempted request"):
        pair.runtime.resume(first)


def test_a_layer_that_was_left_out_voids_the_prefixes_that_others_share() -> None:
    """The first call ends after one of two layers; a second request has begun with its pages before that shows."""
    pair = twin()
    runtime, keys = pair.runtime, [(1, page) for page in range(3)]

    def attend(call: Call, layer: int, start: int, count: int) -> None:
        call.attend(layer, *pair.data.tokens(SHAPES[layer], layer, 0, start, count, (1, 3 * P)))

    first = runtime.admit(keys)
    attend(runtime.extend([first], [3 * P]), 0, 0, 3 * P)
    second = runtime.admit(keys)
    assert runtime.length(second) == 3 * P, "as far as anybody knows there is one layer"
    call = runtime.extend([second], [2])
    attend(call, 0, 3 * P, 2)
    with pytest.raises(ConfigError, match="layer 1: expected its first attend in the first call"):
        attend(call, 1, 3 * P, 2)
    runtime.finish([first, second])
    assert runtime.tables.block_allocator.used_blocks == 0
    third = pair.admit(family=1, family_pages=3)
    assert pair.requests[third] == 0
    pair.extend([third], [3 * P + 1])
    pair.step([third])
    fourth = pair.admit(family=1, family_pages=3)
    assert pair.requests[fourth] == 3 * P
    pair.extend([fourth], [2])
    pair.step([third, fourth])
