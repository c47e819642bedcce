"""SparseCache inside generate: equal to the model's own attention under budget, to the reference above it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers import DynamicCache, PreTrainedModel, StaticCache

from kvsieve import Budget, ConfigError, SparseCache, build_flow
from kvsieve.reference import ReferenceSegment
from kvsieve.runtime import Attended, Call
from kvsieve.verify.unselected import UnselectedNaN
from tiny_models import ARCHITECTURES, build

pytestmark = pytest.mark.usefixtures("shared_traces")

QUEST = "gqa_quest_sparse_attention"
AMPLE = Budget(1000)
TIGHT = Budget(2, sink=1, recent=1)


def prompt(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A left-padded batch and its attention mask."""
    width = max(lengths)
    ids, mask = prompt(len(lengths), width, seed), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1
    return ids * mask, mask


def generate(model: PreTrainedModel, ids: torch.Tensor, cache: Any, new: int = 12, **options: Any) -> tuple[Any, Any]:
    """Greedy tokens [B, new] and logits [B, new, V]."""
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    out = model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=new,
        min_new_tokens=new,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)


def own_attention(model: PreTrainedModel, architecture: str) -> PreTrainedModel:
    """The same weights with the model's own attention: sdpa, or eager where sdpa lacks soft-cap or sinks."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager" if architecture in ("gemma2", "gpt_oss") else "sdpa")
    return twin


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("lengths", [[1], [5], [37], [5, 1, 23, 16]])
def test_under_budget_equals_the_models_own_attention(architecture: str, lengths: list[int]) -> None:
    model = build(architecture)
    ids, mask = padded(lengths)
    twin = own_attention(model, architecture)
    tokens, logits = generate(twin, ids, DynamicCache(config=model.config), attention_mask=mask)
    cache = SparseCache(model.config, flow=QUEST, budget=AMPLE, page_size=5)
    ours, our_logits = generate(model, ids, cache, attention_mask=mask)
    assert torch.equal(ours, tokens)
    torch.testing.assert_close(our_logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_cache_that_is_let_go_is_freed_at_once(architecture: str) -> None:
    """Without the garbage collector: pages, layers and sliding windows."""
    model = build(architecture)
    cache = SparseCache(model.config, flow="h2o", budget=TIGHT, page_size=5)
    generate(model, prompt(2, 37), cache, new=3)
    twin = copy.deepcopy(cache)
    gc.collect()
    gc.disable()
    try:
        generate(model, prompt(2, 1), cache, new=2, attention_mask=torch.ones(2, 41))
        alive = [weakref.ref(x) for one in (cache, twin) for x in (one.runtime, *one.layers)]
        alive += [weakref.ref(layer.pool.k) for one in (cache, twin) for _, layer in one.runtime.layers.items()]
        cache.reset()
        generate(model, prompt(2, 7), cache, new=3)
        del cache, twin
        assert not [ref() for ref in alive if ref() is not None]
    finally:
        gc.enable()


@pytest.fixture
def recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> list[tuple[Call, int, tuple[torch.Tensor, ...], dict[str, Any], Attended]]:
    """Every attend of every layer: the call, the layer, q, k, v, the options, the result."""
    records: list[Any] = []
    original = Call.attend

    def attend(self: Call, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Attended:
        result = original(self, layer, q, k, v, **options)
        records.append((self, layer, (q.clone(), k.clone(), v.clone()), options, result))
        return result

    monkeypatch.setattr(Call, "attend", attend)
    return records


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("flow,page_size", [(QUEST, 5), ("gqa_h2o_token_sparse_attention", 1), ("streaming_llm", 3)])
def test_above_budget_equals_the_reference(architecture: str, flow: str, page_size: int, recorded: list[Any]) -> None:
    """Replays what the model computed, row by row and head by head, through the float64 reference."""
    model = build(architecture)
    ids, mask = padded([40, 9, 1, 33])
    budget = Budget(0, 1, 3) if flow == "streaming_llm" else TIGHT
    cache = SparseCache(model.config, flow=flow, budget=budget, page_size=page_size)
    generate(model, ids, cache, attention_mask=mask)
    segments: dict[tuple[int, int, int], ReferenceSegment] = {}
    sparse = 0
    for call, layer, (q, k, v), options, result in recorded:
        heads, group, first = k.shape[1], q.shape[1] // k.shape[1], 0
        for place, (request, count) in enumerate(zip(call.requests, call.counts, strict=True)):
            rows = slice(first, first + count)
            first += count
            for head in range(heads):
                mine = slice(head * group, (head + 1) * group)
                sinks = options["sinks"][mine] if options["sinks"] is not None else None
                key = layer, request, head
                if key not in segments:
                    segments[key] = ReferenceSegment(
                        build_flow(flow),
                        budget,
                        page_size,
                        scale=options["scale"],
                        softcap=options["softcap"],
                        sinks=sinks,
                        layer=layer,
                    )
                if call.decode:
                    step = segments[key].step(q[rows][0, mine], k[rows][0, head], v[rows][0, head])
                    count_pages = int(result.selection.count[place])
                    assert result.selection.pages[place, head, :count_pages].tolist() == step.selection
                    sparse += step.selection != list(range(-(-len(segments[key].k) // page_size)))
                    expected = step.out[None]
                else:
                    expected, _ = segments[key].extend(q[rows, mine], k[rows, head], v[rows, head])
                torch.testing.assert_close(result.out[rows, mine].double(), expected, rtol=1e-5, atol=1e-5)
    assert sparse > 40


@pytest.mark.parametrize("flow,page_size", [(QUEST, 4), ("h2o_token_sparse_attention", 1)])
def test_a_padded_row_equals_the_row_alone(flow: str, page_size: int) -> None:
    model = build("llama")
    lengths = [30, 7, 19]
    ids, mask = padded(lengths)
    cache = SparseCache(model.config, flow=flow, budget=TIGHT, page_size=page_size)
    tokens, logits = generate(model, ids, cache, attention_mask=mask)
    assert cache.lengths == [length + 11 for length in lengths]
    for row, length in enumerate(lengths):
        alone = SparseCache(model.config, flow=flow, budget=TIGHT, page_size=page_size)
        one, one_logits = generate(model, ids[row : row + 1, -length:], alone)
        assert torch.equal(one[0], tokens[row])
        torch.testing.assert_close(one_logits[0], logits[row], rtol=1e-4, atol=1e-4)


def test_a_second_padded_turn_equals_the_rows_alone() -> None:
    """Padding in the middle of a row is never stored, so it cannot be attended."""
    model = build("llama")
    first, first_mask = padded([20, 6])
    second, second_mask = padded([3, 8], seed=5)
    cache = SparseCache(model.config, flow=QUEST, budget=TIGHT, page_size=4)
    said, _ = generate(model, first, cache, new=5, attention_mask=first_mask)
    # The newest token was sampled but not yet cached; the next turn brings it along.
    ids = torch.cat([first, said, second], 1)
    mask = torch.cat([first_mask, torch.ones_like(said), second_mask], 1)
    _, logits = generate(model, ids, cache, new=6, attention_mask=mask)
    for row in range(2):
        alone = SparseCache(model.config, flow=QUEST, budget=TIGHT, page_size=4)
        one = first[row, first_mask[row].bool()][None]
        generate(model, one, alone, new=5)
        turn = torch.cat([one, said[row : row + 1], second[row, second_mask[row].bool()][None]], 1)
        _, alone_logits = generate(model, turn, alone, new=6)
        torch.testing.assert_close(alone_logits[0], logits[row], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_chunked_prefill_equals_whole_prefill(chunk: int) -> None:
    model = build("llama")
    ids = prompt(2, 51)  # no chunk size leaves a remainder of one token, which Transformers cannot tell from a step
    results = []
    for options in ({}, {"prefill_chunk_size": chunk}):
        budget = AMPLE if chunk == 1 else TIGHT  # a chunk of one token is a decode step to Transformers
        cache = SparseCache(model.config, flow=QUEST, budget=budget, page_size=4)
        results.append(generate(model, ids, cache, **options))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-4)


def test_multi_turn_equals_dense_under_budget() -> None:
    model = build("qwen3")
    twin = own_attention(model, "qwen3")
    ours: Any = SparseCache(model.config, flow=QUEST, budget=AMPLE, page_size=3)
    dense: Any = DynamicCache(config=model.config)
    ids = prompt(1, 10)
    for turn in range(3):
        said, _ = generate(model, ids, ours, new=4)
        expected, _ = generate(twin, ids, dense, new=4)
        assert torch.equal(said, expected)
        ids = torch.cat([ids, said, prompt(1, 5, seed=turn + 7)], 1)


def test_sampling_and_several_sequences() -> None:
    model = build("llama")
    ids = prompt(1, 12)
    results = []
    for variant, cache in (
        (model, SparseCache(model.config, flow=QUEST, budget=AMPLE)),
        (own_attention(model, "llama"), DynamicCache(config=model.config)),
    ):
        torch.manual_seed(3)
        results.append(generate(variant, ids, cache, do_sample=True, num_return_sequences=3)[0])
    assert results[0].shape[0] == 3 and torch.equal(results[0], results[1])


@pytest.mark.parametrize("flow,page_size", [(QUEST, 4), ("h2o_token_sparse_attention", 1), ("streaming_llm", 2)])
def test_unselected_pages_are_not_read_by_generate(flow: str, page_size: int) -> None:
    model = build("llama")
    ids, mask = padded([44, 18])
    budget = Budget(0, 1, 4) if flow == "streaming_llm" else TIGHT
    clean = SparseCache(model.config, flow=flow, budget=budget, page_size=page_size)
    backend = UnselectedNaN("eager")
    poisoned = SparseCache(model.config, flow=flow, budget=budget, page_size=page_size, backend=backend)
    expected = generate(model, ids, clean, attention_mask=mask)
    received = generate(model, ids, poisoned, attention_mask=mask)
    assert backend.overwritten > 500
    assert torch.equal(expected[0], received[0]) and torch.equal(expected[1], received[1])


def test_skip_layers_stay_dense() -> None:
    model = build("llama")
    ids = prompt(1, 40)
    every = SparseCache(model.config, flow=QUEST, budget=TIGHT, page_size=4, skip_layers=[0, 1, 2])
    _, logits = generate(model, ids, every)
    _, dense = generate(own_attention(model, "llama"), ids, DynamicCache(config=model.config))
    torch.testing.assert_close(logits, dense, rtol=1e-4, atol=1e-4)
    assert every.stats.field_bytes == 0 and every.stats.kv_bytes == every.stats.dense_bytes
    with pytest.raises(ConfigError, match="skip_layers"):
        SparseCache(model.config, flow=QUEST, budget=TIGHT, skip_layers=[7])


def test_stats_count_the_selected_tokens() -> None:
    model = build("llama")
    cache = SparseCache(model.config, flow=QUEST, budget=TIGHT, page_size=4)
    generate(model, prompt(1, 41), cache, new=3)
    # Steps at lengths 42 and 43: pages 1 + 2 + 1, the last one holding 2 and 3 tokens; 3 layers, 2 heads, K and V of 8.
    assert cache.stats.steps == 2
    assert cache.stats.kv_bytes == (14 + 15) * 3 * 2 * 16 * 4
    assert cache.stats.dense_bytes == (42 + 43) * 3 * 2 * 16 * 4
    assert cache.stats.field_bytes == 2 * 9 * 3 * 2 * 16 * 4  # 9 window pages, k_min and k_max


def test_reset_copies_and_interleaved_caches() -> None:
    model = build("llama")
    ids = prompt(2, 30)
    cache = SparseCache(model.config, flow="h2o_token_sparse_attention", budget=TIGHT)
    first = generate(model, ids, cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.runtime.tables.block_allocator.used_blocks == 0
    other = SparseCache(model.config, flow="h2o_token_sparse_attention", budget=TIGHT)
    model(prompt(2, 20, seed=9), past_key_values=other)
    assert torch.equal(generate(model, ids, cache)[1], first[1])
    model(ids, past_key_values=(again := SparseCache(model.config, flow=QUEST, budget=TIGHT, page_size=4)))
    twin = copy.deepcopy(again)
    step = prompt(2, 1, seed=4)
    assert torch.equal(model(step, past_key_values=again).logits, model(step, past_key_values=twin).logits)


def test_forward_without_a_cache_is_dense() -> None:
    model = build("qwen2_mixed")
    ids, mask = padded([21, 9])
    ours = model(ids, attention_mask=mask, use_cache=False).logits
    own = own_attention(model, "qwen2_mixed")(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(ours[mask.bool()], own[mask.bool()], rtol=1e-4, atol=1e-4)


def _static(model: PreTrainedModel, cache: SparseCache) -> None:
    generate(model, prompt(1, 9), StaticCache(config=model.config, max_cache_len=64), disable_compile=True)


def _dynamic(model: PreTrainedModel, cache: SparseCache) -> None:
    generate(model, prompt(1, 9), DynamicCache(config=model.config))


def _other_attention(model: PreTrainedModel, cache: SparseCache) -> None:
    model.set_attn_implementation("sdpa")
    generate(model, prompt(1, 9), cache)


def _four_dimensional_mask(model: PreTrainedModel, cache: SparseCache) -> None:
    model(prompt(1, 4), attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool), past_key_values=cache)


def _changed_mask(model: PreTrainedModel, cache: SparseCache) -> None:
    model(prompt(1, 4), past_key_values=cache)
    model(prompt(1, 1), attention_mask=torch.tensor([[0, 1, 1, 1, 1]]), past_key_values=cache)


def _short_mask(model: PreTrainedModel, cache: SparseCache) -> None:
    model(prompt(1, 4), past_key_values=cache)
    model(prompt(1, 1), attention_mask=torch.ones(1, 1, dtype=torch.long), past_key_values=cache)


def _other_batch(model: PreTrainedModel, cache: SparseCache) -> None:
    model(prompt(1, 4), past_key_values=cache)
    model(prompt(2, 1), past_key_values=cache)


def _attentions(model: PreTrainedModel, cache: SparseCache) -> None:
    model(prompt(1, 4), past_key_values=cache, output_attentions=True)


WRONG = {
    _static: "SparseCache",
    _dynamic: "SparseCache",
    _other_attention: "set_attn_implementation",
    _four_dimensional_mask: "4-D",
    _changed_mask: "hides or shows",
    _short_mask: "attention_mask: expected",
    _other_batch: "rows that the cache holds",
    _attentions: "output_attentions",
}


@pytest.mark.parametrize("act", WRONG, ids=lambda act: act.__name__[1:])
def test_what_cannot_work_says_what_to_use(act: Any) -> None:
    model = build("llama")
    cache = SparseCache(model.config, flow=QUEST, budget=TIGHT, page_size=4)
    with pytest.raises(ConfigError, match=WRONG[act]):
        act(model, cache)


def test_an_additive_mask_is_added() -> None:
    model = build("llama")
    ids = prompt(1, 10)
    bias = torch.where(torch.ones(1, 1, 10, 10).tril().bool(), 0.0, torch.finfo(torch.float32).min)
    bias[..., 1] -= 0.5
    ours = model(ids, attention_mask=bias, use_cache=False).logits
    own = own_attention(model, "llama")(ids, attention_mask=bias, use_cache=False).logits
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


def test_a_row_cannot_begin_beside_rows_that_decode() -> None:
    model = build("llama")
    ids, mask = prompt(2, 31), torch.ones(2, 31, dtype=torch.long)
    mask[1, :30] = 0
    cache = SparseCache(model.config, flow=QUEST, budget=TIGHT, page_size=4)
    model(ids[:, :30], attention_mask=mask[:, :30], past_key_values=cache)
    with pytest.raises(ConfigError, match=r"rows \[1\] were padding until now"):
        model(ids[:, 30:], attention_mask=mask, past_key_values=cache)


def test_a_backward_pass_is_refused() -> None:
    model = build("llama")
    with torch.enable_grad():
        embedded = model.get_input_embeddings()(prompt(1, 6)).detach().requires_grad_(True)
        cache = SparseCache(model.config, flow=QUEST, budget=TIGHT, page_size=4)
        logits = model(inputs_embeds=embedded, past_key_values=cache).logits
        with pytest.raises(ConfigError, match="for inference"):
            logits.sum().backward()


def test_the_models_configs_are_not_touched() -> None:
    model = build("llama")
    before = copy.deepcopy(model.generation_config.to_dict()), copy.deepcopy(model.config.to_dict())
    generate(model, prompt(1, 9), SparseCache(model.config, flow=QUEST, budget=TIGHT, page_size=4))
    assert (model.generation_config.to_dict(), model.config.to_dict()) == before


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
