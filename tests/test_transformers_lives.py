"""Rows of a Transformers cache that are copied, taken back and refused: beams, drafts, crops, a full pool."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")
from transformers import DynamicCache

from kvsieve import ConfigError, NotCroppable, OutOfPages, SparseCache
from test_transformers import AMPLE, QUEST, TIGHT, _no_grad, generate, own_attention, padded, prompt  # noqa: F401  (no gradients in any test)
from tiny_models import build


@pytest.mark.parametrize("architecture", ["llama", "qwen2_mixed"])
def test_beam_search_under_budget_is_the_models_own(architecture: str) -> None:
    model = build(architecture)
    ids, mask = padded([17, 6])
    cache = SparseCache(model.config, flow="h2o_token_sparse_attention", budget=AMPLE)
    ours = generate(model, ids, cache, attention_mask=mask, num_beams=3, new=9)[0]
    own = own_attention(model, architecture)
    assert torch.equal(
        ours, generate(own, ids, DynamicCache(config=model.config), attention_mask=mask, num_beams=3, new=9)[0]
    )


@pytest.mark.parametrize("flow", [QUEST, "h2o_token_sparse_attention"])
def test_reordered_rows_go_on_as_copies(flow: str) -> None:
    """Above budget: a reordered, repeated or selected cache continues as separately filled ones do."""
    model = build("llama")
    ids, mask = padded([33, 12, 21])
    step = prompt(3, 1, seed=6)
    order = torch.tensor([2, 0, 2])

    def filled(rows: list[int]) -> SparseCache:
        cache = SparseCache(model.config, flow=flow, budget=TIGHT, page_size=None if "token" in flow else 4)
        model(ids[rows], attention_mask=mask[rows], past_key_values=cache)
        model(step[rows], past_key_values=cache)
        return cache

    def go_on(cache: SparseCache) -> torch.Tensor:
        return torch.cat([model(prompt(3, 1, seed=seed), past_key_values=cache).logits for seed in (7, 8)], 1)

    reordered, selected, repeated = filled([0, 1, 2]), filled([0, 1, 2]), filled([1])
    reordered.reorder_cache(order)
    selected.batch_select_indices(order)
    repeated.batch_repeat_interleave(3)
    expected = go_on(filled([2, 0, 2]))
    torch.testing.assert_close(go_on(reordered), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(go_on(selected), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(go_on(repeated), go_on(filled([1, 1, 1])), rtol=1e-4, atol=1e-4)


def test_assisted_decoding_under_budget_is_the_models_own() -> None:
    model = build("llama")
    ids = prompt(1, 9).repeat(1, 3)
    for flow in (QUEST, "h2o_token_sparse_attention"):
        cache = SparseCache(model.config, flow=flow, budget=AMPLE)
        ours = generate(model, ids, cache, prompt_lookup_num_tokens=3)[0]
        own = generate(
            own_attention(model, "llama"), ids, DynamicCache(config=model.config), prompt_lookup_num_tokens=3
        )[0]
        assert torch.equal(ours, own)


def test_crop_forgets_columns_and_refuses_what_state_cannot_undo() -> None:
    model = build("llama")
    ids, mask = padded([30, 4])
    kept = SparseCache(model.config, flow=QUEST, budget=TIGHT, page_size=4)
    cropped = copy.deepcopy(kept)
    model(ids[:, :25], attention_mask=mask[:, :25], past_key_values=kept)
    model(ids, attention_mask=mask, past_key_values=cropped)
    cropped.crop(-5)
    assert cropped.lengths == kept.lengths == [25, 0]
    tail, tail_mask = ids[:, 25:], mask
    outs = [model(tail, attention_mask=tail_mask, past_key_values=cache).logits for cache in (kept, cropped)]
    torch.testing.assert_close(
        outs[0][tail_mask[:, 25:].bool()], outs[1][tail_mask[:, 25:].bool()], rtol=1e-4, atol=1e-4
    )
    stateful = SparseCache(model.config, flow="h2o_token_sparse_attention", budget=TIGHT)
    model(ids, attention_mask=mask, past_key_values=stateful)
    model(prompt(2, 1), past_key_values=stateful)
    with pytest.raises(NotCroppable, match="fork the request"):
        stateful.crop(-1)
    assert stateful.lengths == [31, 5] and stateful.get_seq_length() == 31
    with pytest.raises(ConfigError, match="crop: expected"):
        kept.crop(3)


def test_out_of_pages_undoes_sliding_layers_before_the_paged_one() -> None:
    model = build("gemma2")  # its first layer slides
    ids = prompt(2, 17)
    cache = SparseCache(model.config, flow=QUEST, budget=AMPLE, page_size=4, num_blocks=9)
    model(ids[:, :16], past_key_values=cache)
    with pytest.raises(OutOfPages):
        model(ids[:, 16:], past_key_values=cache)
    cache.batch_select_indices(torch.tensor([0]))
    received = model(ids[:1, 16:], past_key_values=cache).logits
    fresh = SparseCache(model.config, flow=QUEST, budget=AMPLE, page_size=4)
    model(ids[:1, :16], past_key_values=fresh)
    torch.testing.assert_close(received, model(ids[:1, 16:], past_key_values=fresh).logits, rtol=1e-4, atol=1e-4)


def test_out_of_pages_changes_nothing() -> None:
    model = build("llama")
    cache = SparseCache(model.config, flow=QUEST, budget=TIGHT, page_size=4, num_blocks=6)
    ids = prompt(2, 12)
    model(ids, past_key_values=cache)
    with pytest.raises(OutOfPages, match="needs 2 free blocks, the pool has 0"):
        model(prompt(2, 1), past_key_values=cache)
    assert cache.lengths == [12, 12]
    ample = SparseCache(model.config, flow=QUEST, budget=TIGHT, page_size=4)
    expected = model(ids, past_key_values=ample).logits
    cache.reset()
    assert torch.equal(model(ids, past_key_values=cache).logits, expected)
