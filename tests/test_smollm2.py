"""The real small model: under budget its own tokens, above it only what was selected is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers import DynamicCache

from kvsieve import Budget, SparseCache
from kvsieve.models import load_model
from kvsieve.verify.unselected import UnselectedNaN
from test_transformers import generate

TEXT = (Path(__file__).parent.parent / "examples" / "jargon.txt").read_text(encoding="utf-8")
AMPLE = Budget(5000)


@pytest.fixture(scope="module")
def small() -> Any:
    return load_model("smollm2")


@pytest.fixture(scope="module")
def ids(small: Any) -> torch.Tensor:
    tokens: torch.Tensor = small[1](TEXT, return_tensors="pt").input_ids
    return tokens


def own(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    """Tokens and logits with the model's own attention."""
    model.set_attn_implementation("sdpa")
    return generate(model, ids, DynamicCache(config=model.config), new=16, attention_mask=mask, pad_token_id=0)


def sparse(model: Any, ids: torch.Tensor, mask: torch.Tensor, flow: str, page_size: int) -> Any:
    """The same with a flow under its budget."""
    model.set_attn_implementation("kvsieve")
    cache = SparseCache(model.config, flow=flow, budget=AMPLE, page_size=page_size)
    return generate(model, ids, cache, new=16, attention_mask=mask, pad_token_id=0)


@pytest.mark.parametrize("length", [5, 100, pytest.param(1500, marks=pytest.mark.slow)])
def test_under_budget_greedy_tokens_are_the_models_own(small: Any, ids: torch.Tensor, length: int) -> None:
    prompt, mask = ids[:, :length], torch.ones(1, length, dtype=torch.long)
    expected = own(small[0], prompt, mask)
    for flow, page_size in (("gqa_quest_sparse_attention", 16), ("h2o_token_sparse_attention", 1)):
        received = sparse(small[0], prompt, mask, flow, page_size)
        assert torch.equal(received[0], expected[0]), flow
        torch.testing.assert_close(received[1], expected[1], rtol=0, atol=2e-4, msg=flow)


def test_under_budget_a_ragged_batch_is_the_models_own(small: Any, ids: torch.Tensor) -> None:
    """A row of less than a page, one of a few pages, and one of many that ends within a page."""
    lengths = [5, 100, 420]
    batch, mask = torch.zeros(3, 420, dtype=torch.long), torch.zeros(3, 420, dtype=torch.long)
    for row, length in enumerate(lengths):
        batch[row, 420 - length :] = ids[0, :length]
        mask[row, 420 - length :] = 1
    expected = own(small[0], batch, mask)
    received = sparse(small[0], batch, mask, "gqa_quest_sparse_attention", 16)
    assert torch.equal(received[0], expected[0])
    torch.testing.assert_close(received[1], expected[1], rtol=0, atol=2e-4)


def test_unselected_pages_are_not_read(small: Any, ids: torch.Tensor) -> None:
    model, prompt, budget = small[0], ids[:, :700], Budget(5)
    model.set_attn_implementation("kvsieve")
    results = []
    for backend in ("eager", UnselectedNaN("eager")):
        cache = SparseCache(model.config, flow="gqa_quest_sparse_attention", budget=budget, backend=backend)
        results.append(generate(model, prompt, cache, new=6, pad_token_id=0))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield
