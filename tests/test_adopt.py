"""One dense prefill serves caches with other flows, budgets and page sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from kvsieve.budget import Budget  # noqa: E402
from kvsieve.errors import ConfigError, OutOfPages  # noqa: E402
from kvsieve.integrations.transformers import SparseCache  # noqa: E402
from kvsieve.runtime import Runtime  # noqa: E402
from tiny_models import build  # noqa: E402

QUEST, TOKENS = "gqa_quest_sparse_attention", "gqa_h2o_token_sparse_attention"


def rows(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of 37 and 24 tokens, the short one padded on the left, and 6 tokens more of each."""
    ids = torch.randint(2, 97, (2, 43), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    return ids, mask


def steps(model: Any, cache: SparseCache, first: int = 37) -> torch.Tensor:
    """Logits of the decode steps from column ``first`` on."""
    ids, mask = rows()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return torch.stack(
            [
                model(
                    ids[:, t : t + 1],
                    attention_mask=mask[:, : t + 1],
                    position_ids=positions[:, t : t + 1],
                    past_key_values=cache,
                ).logits
                for t in range(first, ids.shape[1])
            ]
        )


def prefilled(model: Any, flow: str, budget: Budget, page_size: int) -> SparseCache:
    ids, mask = rows()
    cache = SparseCache(model.config, flow, budget, page_size)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids[:, :37], attention_mask=mask[:, :37], position_ids=positions[:, :37], past_key_values=cache)
    return cache


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(("flow", "page_size"), [(QUEST, 3), (TOKENS, 1)])
def test_a_copied_past_is_the_past_of_a_prefill(architecture: str, flow: str, page_size: int) -> None:
    model = build(architecture)
    budget = Budget(2, 1, 1)
    source = prefilled(model, "streaming_llm", Budget(0, 0, 100), 5)
    expected = steps(model, prefilled(model, flow, budget, page_size))
    for _ in range(2):  # the source serves as often as it is asked
        copied = SparseCache(model.config, flow, budget, page_size)
        copied.copy_past(source)
        assert copied.lengths == [37, 24] and copied.get_seq_length() == 37
        assert torch.equal(steps(model, copied), expected)
        assert copied.stats.steps == 6 and copied.stats.kv_bytes < copied.stats.dense_bytes
    dense = steps(model, source)
    assert torch.equal(dense, steps(model, prefilled(model, "streaming_llm", Budget(0, 0, 100), 5)))
    assert not torch.equal(dense, expected)


def test_wrong_copies_are_refused() -> None:
    model = build("llama")
    source = prefilled(model, QUEST, Budget(2), 4)
    target = SparseCache(model.config, QUEST, Budget(2))
    with pytest.raises(ConfigError, match="run the prefill first"):
        target.copy_past(SparseCache(model.config, QUEST, Budget(2)))
    with pytest.raises(ConfigError, match="expected an empty cache"):
        source.copy_past(source)
    other = build("gemma2")
    with pytest.raises(ConfigError, match="same model"):
        SparseCache(other.config, QUEST, Budget(2)).copy_past(source)


def test_adopting_into_a_small_pool_changes_nothing() -> None:
    model = build("llama")
    source = prefilled(model, QUEST, Budget(2), 4)
    small = Runtime(QUEST, Budget(2), page_size=7, num_blocks=8)  # 6 + 4 pages are needed
    with pytest.raises(OutOfPages):
        small.adopt(source.runtime, source._requests)
    assert len(small.tables) == 0 and small.tables.block_allocator.idle_blocks == 8
    enough = Runtime(QUEST, Budget(2), page_size=7, num_blocks=10)
    assert [enough.length(one) for one in enough.adopt(source.runtime, source._requests)] == [37, 24]


def test_a_decode_step_is_not_stored() -> None:
    runtime = Runtime(QUEST, Budget(2), page_size=3)
    q, k = torch.ones(4, 6, 5), torch.ones(4, 2, 5)
    request = runtime.admit()
    runtime.extend([request], [4]).attend(0, q, k, k)
    with pytest.raises(ConfigError, match="received a decode step"):
        runtime.step([request]).store(0, k[:1], k[:1], query_heads=6, scale=1.0)
