"""SparseCache with ``Evict`` inside generate: dense within the capacity, the reference above it, in flat memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers import DynamicCache, PreTrainedModel

from kvsieve import Budget, ConfigError, Evict, NotCroppable, SparseCache, build_flow
from kvsieve.reference import EvictingSegment
from kvsieve.runtime import Call, Runtime
from test_transformers import generate, own_attention, padded, prompt
from tiny_models import build

pytestmark = pytest.mark.usefixtures("shared_traces")

AMPLE = Evict(64)
TIGHT = Evict(14, sink=2, recent=4)


def evicting(model: PreTrainedModel, retention: Evict = TIGHT, flow: str = "h2o", **options: Any) -> SparseCache:
    return SparseCache(model.config, flow, page_size=5, retention=retention, **options)


class Recorder:
    """Everything that a runtime is asked to attend or to forget, and what it answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, Any]] = []
        attend, crop = Call.attend, Runtime.crop

        def attending(call: Call, layer: int, *qkv: torch.Tensor, **options: Any) -> Any:
            result = attend(call, layer, *qkv, **options)
            self.events.append(("attend", (call, layer, [x.clone() for x in qkv], options, result.out)))
            return result

        def cropping(runtime: Runtime, requests: Any, lengths: Any) -> None:
            crop(runtime, requests, lengths)
            self.events.append(("crop", (list(requests), list(lengths))))

        monkeypatch.setattr(Call, "attend", attending)
        monkeypatch.setattr(Runtime, "crop", cropping)

    def replay(self, flow: str, retention: Evict) -> dict[str, int]:
        """Compare every row and head with the reference; returns how many steps, steps that evict, and crops."""
        segments: dict[tuple[int, int, int], EvictingSegment] = {}
        seen = {"steps": 0, "evicting": 0, "crops": 0}
        for verb, event in self.events:
            if verb == "crop":
                for request, length in zip(*event, strict=True):
                    for key in [key for key in segments if key[1] == request]:
                        seen["crops"] += length < len(segments[key].k)
                        segments[key].crop(length)
                continue
            call, layer, (q, k, v), options, out = event
            first = 0
            for request, count in zip(call.requests, call.counts, strict=True):
                rows = slice(first, first + count)
                first += count
                for head in range(k.shape[1] if count else 0):
                    mine = slice(head * (q.shape[1] // k.shape[1]), (head + 1) * (q.shape[1] // k.shape[1]))
                    key = layer, request, head
                    if key not in segments:
                        sinks = options["sinks"][mine] if options["sinks"] is not None else None
                        segments[key] = EvictingSegment(
                            build_flow(flow),
                            retention,
                            scale=options["scale"],
                            softcap=options["softcap"],
                            sinks=sinks,
                        )
                    segment = segments[key]
                    if call.decode:
                        seen["steps"] += 1
                        seen["evicting"] += len(segment.alive) > retention.capacity
                        expected = segment.step(q[rows][0, mine], k[rows][0, head], v[rows][0, head]).out[None]
                    else:
                        expected, _ = segment.extend(q[rows, mine], k[rows, head], v[rows, head])
                    torch.testing.assert_close(out[rows, mine].double(), expected, rtol=1e-5, atol=1e-5)
        return seen


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.mark.parametrize("architecture", ["llama", "llama_mha_d20", "qwen2", "qwen2_mixed", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("lengths", [[1], [5, 1, 23, 16]])
def test_within_the_capacity_it_writes_what_the_model_writes(architecture: str, lengths: list[int]) -> None:
    model = build(architecture)
    ids, mask = padded(lengths)
    own = own_attention(model, architecture)
    tokens, logits = generate(own, ids, DynamicCache(config=model.config), attention_mask=mask)
    ours, our_logits = generate(model, ids, evicting(model, AMPLE), attention_mask=mask)
    assert torch.equal(ours, tokens)
    torch.testing.assert_close(our_logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("flow", ["h2o", "tova", "snapkv", "streaming_llm"])
def test_above_the_capacity_it_is_the_reference(architecture: str, flow: str, recorder: Recorder) -> None:
    model = build(architecture)
    ids, mask = padded([40, 9, 1, 13])
    retention = TIGHT if build_flow(flow).mass else Evict(14, 2, 12)
    cache = evicting(model, retention, flow)
    generate(model, ids, cache, attention_mask=mask, new=20)
    assert recorder.replay(flow, retention)["evicting"] > 50
    assert cache.lengths == [59, 28, 20, 32]


def test_a_padded_row_equals_the_row_alone_over_hundreds_of_tokens() -> None:
    model, lengths, new = build("llama"), [30, 7, 19], 250
    ids, mask = padded(lengths)
    cache = evicting(model)
    tokens, _ = generate(model, ids, cache, attention_mask=mask, new=new)
    assert cache.lengths == [length + new - 1 for length in lengths]
    early = evicting(model)
    generate(model, ids, early, attention_mask=mask, new=30)
    assert cache.runtime.layers[0].pool.k.shape == early.runtime.layers[0].pool.k.shape
    assert cache.runtime.tables.block_allocator.used_blocks == 3 * 3  # 15 tokens
    for row, length in enumerate(lengths):
        one, _ = generate(model, ids[row : row + 1, -length:], evicting(model), new=new)
        assert torch.equal(one[0], tokens[row])
    dense, _ = generate(own_attention(model, "llama"), ids, DynamicCache(config=model.config), attention_mask=mask)
    assert not torch.equal(dense, tokens[:, : dense.shape[1]])  # something was lost


def test_a_second_padded_turn(recorder: Recorder) -> None:
    model = build("llama")
    first, first_mask = padded([22, 6])
    second, second_mask = padded([3, 8], seed=5)
    cache = evicting(model)
    said, _ = generate(model, first, cache, new=10, attention_mask=first_mask)
    ids = torch.cat([first, said, second], 1)
    mask = torch.cat([first_mask, torch.ones_like(said), second_mask], 1)
    _, logits = generate(model, ids, cache, new=10, attention_mask=mask)
    assert recorder.replay("h2o", TIGHT)["evicting"] > 80
    assert cache.lengths == [22 + 10 + 3 + 9, 6 + 10 + 8 + 9]
    alone = evicting(model)
    one = first[1, first_mask[1].bool()][None]
    generate(model, one, alone, new=10)
    turn = torch.cat([one, said[1:], second[1:]], 1)
    _, alone_logits = generate(model, turn, alone, new=10)
    torch.testing.assert_close(alone_logits[0], logits[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [2, 3, 16])
def test_a_prompt_in_chunks_is_the_whole_prompt(chunk: int) -> None:
    model, ids = build("llama"), prompt(2, 50)
    whole, chunked = evicting(model), evicting(model)
    expected = generate(model, ids, whole)
    received = generate(model, ids, chunked, prefill_chunk_size=chunk)
    assert torch.equal(received[0], expected[0])
    torch.testing.assert_close(received[1], expected[1], rtol=1e-4, atol=1e-4)


def test_beam_search_within_the_capacity_is_the_models_own() -> None:
    model = build("llama")
    ids, mask = padded([17, 6])
    ours = generate(model, ids, evicting(model, AMPLE), attention_mask=mask, num_beams=3, new=9)[0]
    own = own_attention(model, "llama")
    dense = DynamicCache(config=model.config)
    assert torch.equal(ours, generate(own, ids, dense, attention_mask=mask, num_beams=3, new=9)[0])


def test_beams_above_the_capacity_are_those_of_the_row_alone() -> None:
    model = build("llama")
    ids, mask = padded([25, 11])
    cache = evicting(model)
    both = generate(model, ids, cache, attention_mask=mask, num_beams=3, new=20)[0]
    for row, length in enumerate([25, 11]):
        alone = generate(model, ids[row : row + 1, -length:], evicting(model), num_beams=3, new=20)[0]
        assert torch.equal(alone[0], both[row])
    cache.reset()
    tables = cache.runtime.tables
    assert tables.block_allocator.used_blocks == tables.row_allocator.used_blocks == 0


def test_reordered_rows_go_on_as_copies() -> None:
    model = build("llama")
    ids, mask = padded([33, 12, 21])
    step = prompt(3, 1, seed=6)
    order = torch.tensor([2, 0, 2])

    def filled(rows: list[int]) -> SparseCache:
        cache = evicting(model)
        model(ids[rows], attention_mask=mask[rows], past_key_values=cache)
        model(step[rows], past_key_values=cache)
        return cache

    def go_on(cache: SparseCache) -> torch.Tensor:
        calls = [prompt(3, 2 if seed == 7 else 1, seed) for seed in range(7, 13)]  # of two tokens: trimmed before it
        return torch.cat([model(ids, past_key_values=cache).logits for ids in calls], 1)

    reordered, copied = filled([0, 1, 2]), copy.deepcopy(filled([2, 0, 2]))
    reordered.reorder_cache(order)
    torch.testing.assert_close(go_on(reordered), go_on(filled([2, 0, 2])), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(go_on(copied), go_on(filled([2, 0, 2])), rtol=1e-4, atol=1e-4)


def test_assisted_decoding_within_the_capacity_is_the_models_own() -> None:
    model, ids = build("llama"), prompt(1, 9).repeat(1, 3)
    ours = generate(model, ids, evicting(model, AMPLE), prompt_lookup_num_tokens=3)[0]
    own = own_attention(model, "llama")
    assert torch.equal(ours, generate(own, ids, DynamicCache(config=model.config), prompt_lookup_num_tokens=3)[0])


def test_assisted_decoding_above_the_capacity_is_the_reference(recorder: Recorder) -> None:
    """Drafts are verified in calls of several tokens, of which a crop takes back what was not accepted."""
    model, ids = build("llama"), prompt(1, 9).repeat(1, 3)
    cache = evicting(model)
    said, _ = generate(model, ids, cache, prompt_lookup_num_tokens=3, new=40)
    seen = recorder.replay("h2o", TIGHT)
    assert said.shape[1] == 40 and seen["crops"] > 6 * 5
    assert cache.lengths[0] <= 27 + 40


def test_a_crop_reaches_the_last_short_call_only() -> None:
    model = build("llama")
    ids, mask = padded([30, 12])
    cache = evicting(model)
    model(ids, attention_mask=mask, past_key_values=cache)
    model(prompt(2, 1), past_key_values=cache)
    with pytest.raises(NotCroppable, match=r"what Evict leaves of flow H2O.* is exact down to 31 only"):
        cache.crop(-1)
    assert cache.lengths == [31, 13] and cache.get_seq_length() == 31
    model(prompt(2, 4, seed=3), past_key_values=cache)
    twin = copy.deepcopy(cache)
    cache.crop(-3)
    assert cache.lengths == [32, 14]
    with pytest.raises(NotCroppable):
        twin.crop(-5)
    assert twin.lengths == [35, 17]
    fresh = evicting(model)
    model(ids, attention_mask=mask, past_key_values=fresh)
    model(prompt(2, 1), past_key_values=fresh)
    model(prompt(2, 4, seed=3)[:, :1].repeat(1, 2), past_key_values=fresh)
    fresh.crop(-1)
    outs = [model(prompt(2, 1, seed=8), past_key_values=one).logits for one in (cache, fresh)]
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-4)


def test_what_a_cache_refuses() -> None:
    model = build("llama")
    with pytest.raises(ConfigError, match=r"received both"):
        evicting(model, budget=Budget(3))
    with pytest.raises(ConfigError, match=r"expected no dense layers where tokens are evicted .*received \[1\]"):
        evicting(model, skip_layers=[1])
    with pytest.raises(ConfigError, match="expected one that may evict"):
        evicting(model, flow="gqa_quest_sparse_attention")
    source, target = evicting(model), SparseCache(model.config, "streaming_llm", Budget(0, 1, 3))
    model(prompt(1, 30), past_key_values=source)
    model(prompt(1, 1), past_key_values=source)
    with pytest.raises(ConfigError, match="received some that lost tokens"):
        target.copy_past(source)
    assert target.get_seq_length() == 0 and not len(target.runtime.tables)


@pytest.mark.slow
def test_two_thousand_steps_in_flat_memory() -> None:
    model = build("llama")
    ids, mask = padded([30, 7])
    cache, sizes = evicting(model, Evict(40, 4, 8)), set()
    for step in range(2000):
        logits = model(ids, attention_mask=mask, past_key_values=cache).logits
        ids = logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        if step > 60:
            pools = [cache.runtime.layers[layer].pool for layer in range(3)]
            sizes.add((*(pool.k.shape for pool in pools), *(pool.state["mass"].shape for pool in pools)))
    assert len(sizes) == 1 and cache.lengths == [30 + 1999, 7 + 1999]
    assert cache.runtime.tables.block_allocator.used_blocks == 2 * 9  # 41 tokens


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
