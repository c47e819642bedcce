"""A real model inside vLLM: stock answers under budget, and above it those of the Transformers integration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_world import Answer, answers, engine, same_but_near_ties, serving

# isort: split
# What needs vLLM comes behind the module that skips without it.
from kvsieve import Budget, SparseCache
from kvsieve.cache import cache_dir
from kvsieve.smollm2 import fetch_smollm2

FLOW = "gqa_quest_sparse_attention"
BUDGET = {"topk": 1, "sink": 1, "recent": 2, "ratio": 0.25}
TEXT = Path(__file__).parent.parent / "examples" / "jargon.txt"
SPANS = ((0, 5), (100, 700), (0, 500), (500, 333), (1500, 420))
NEW = 24
SURE = 0.15
"""Of log-probabilities: nearer than this two tokens are a near-tie of this model in bfloat16."""


@pytest.fixture(scope="module")
def model() -> Path:
    return fetch_smollm2(cache_dir())


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
    ids = tokenizer(TEXT.read_text(encoding="utf-8")).input_ids
    return [ids[start : start + count] for start, count in SPANS]


def test_stock_answers_under_budget(model: Path, prompts: list[list[int]]) -> None:
    with serving(model) as llm:
        stock = answers(llm, prompts, NEW)
    with serving(model, {"flow": FLOW, "budget": {"topk": 500}}) as llm:
        mine = answers(llm, prompts, NEW)
        assert engine().counters.dense_rows == len(prompts) * (NEW - 1)
    equal = [same_but_near_ties(one, other, SURE) for one, other in zip(stock, mine, strict=True)]
    assert sum(equal) >= 0.7 * NEW * len(prompts), equal


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_answers_of_the_transformers_integration(model: Path, prompts: list[list[int]], prefix_caching: bool) -> None:
    """The same flow and budget; with prefix caching also a second time, from cached pages."""
    with serving(model, {"flow": FLOW, "budget": BUDGET}, enable_prefix_caching=prefix_caching) as llm:
        rounds = [answers(llm, prompts, NEW) for _ in range(1 + prefix_caching)]
        assert engine().counters.sparse_rows >= (len(prompts) - 1) * (NEW - 1)
    expected = _with_transformers(model, prompts)
    for mine in rounds:
        equal = [_equal(one, other) for one, other in zip(mine, expected, strict=True)]
        assert sum(equal) >= 0.5 * NEW * len(prompts), equal


def _with_transformers(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation="kvsieve", local_files_only=True
    )
    results = []
    for prompt in prompts:
        cache = SparseCache(loaded.config, flow=FLOW, budget=Budget(**BUDGET), page_size=16)  # type: ignore[arg-type]
        out = loaded.generate(
            torch.tensor([prompt]),
            past_key_values=cache,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        )
        results.append(out[0, len(prompt) :].tolist())
    return results


def _equal(mine: Answer, expected: list[int]) -> int:
    """How many tokens are equal; where they part, both must be nearly as likely."""
    for place, (one, other) in enumerate(zip(mine.tokens, expected, strict=True)):
        if one != other:
            gap = mine.best[place][one] - mine.best[place].get(other, float("-inf"))
            assert gap <= SURE, f"token {place}: {one} or {other}, apart by {gap:.3f} in log-probability"
            return place
    return len(expected)
