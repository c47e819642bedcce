"""Budgets: integers only, exact floors, and the refusals."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch

from kvsieve.budget import Budget, budget_for_layer
from kvsieve.errors import ConfigError
from kvsieve.flow import Flow, build_flow, check_flow
from kvsieve.plan import Plan
from kvsieve.runtime import Runtime


@pytest.mark.parametrize("ratio", ["0.1", "0.3", "0.7", "0.29", "0.57", "1e-3", "0.333333333333", "1.0", "0"])
def test_ratio_floors_are_exact(ratio: str) -> None:
    budget = Budget(0, sink=0, recent=1, ratio=float(ratio))
    for pages in range(10_001):
        assert budget.kept(pages) == max(1, math.floor(Fraction(ratio) * pages))


def test_binary_floors_would_differ() -> None:
    """0.29 * 100 is 28.999... in binary: the exact floor is 29."""
    assert int(0.29 * 100) == 28 and Budget(0, 0, 1, ratio=0.29).kept(100) == 29


def test_kept_is_the_larger_of_count_and_ratio() -> None:
    budget = Budget(4, sink=1, recent=2, ratio=0.5)
    assert [budget.kept(s) for s in (1, 7, 14, 15, 16, 100)] == [7, 7, 7, 7, 8, 50]
    assert [budget.window(s) for s in (0, 1, 3, 4, 10)] == [0, 0, 0, 1, 7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topk": -1}, "topk"),
        ({"topk": 1.0}, "topk"),
        ({"topk": True}, "topk"),
        ({"topk": 1, "sink": -1}, "sink"),
        ({"topk": 1, "recent": 0}, "recent"),
        ({"topk": 1, "ratio": 1.01}, "ratio"),
        ({"topk": 1, "ratio": -0.1}, "ratio"),
        ({"topk": 1, "ratio": math.nan}, "ratio"),
        ({"topk": 1, "ratio": math.inf}, "ratio"),
        ({"topk": 1, "ratio": "0.5"}, "ratio"),
        ({"topk": 1, "ratio": True}, "ratio"),
    ],
)
def test_wrong_budgets_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Budget(**arguments)


@pytest.mark.parametrize(
    ("n", "page_size", "sink", "recent", "expected"),
    [
        (512, 16, 4, 32, Budget(29, 1, 2)),
        (513, 16, 4, 32, Budget(30, 1, 2)),
        (100, 1, 4, 32, Budget(64, 4, 32)),
        (100, 33, 4, 32, Budget(2, 1, 1)),
        (1, 16, 0, 0, Budget(0, 0, 1)),
        (48, 16, 16, 17, Budget(0, 1, 2)),
        (70, 16, 17, 1, Budget(2, 2, 1)),
    ],
)
def test_tokens_round_up_to_pages(n: int, page_size: int, sink: int, recent: int, expected: Budget) -> None:
    budget = Budget.tokens(n, page_size, sink_tokens=sink, recent_tokens=recent)
    assert budget == expected
    assert (budget.topk + budget.sink + budget.recent) * page_size >= n


def test_tokens_of_a_flow_that_does_not_select_are_recent() -> None:
    assert Budget.tokens(512, 16, selects=False) == Budget(0, 1, 31)


def test_tokens_refuses_what_cannot_hold_sink_and_recent() -> None:
    with pytest.raises(ConfigError, match="48 tokens"):
        Budget.tokens(32, 16)
    for arguments in ({"n": 0}, {"page_size": 0}, {"sink_tokens": -1}, {"recent_tokens": -1}, {"n": 2.5}, {"n": True}):
        with pytest.raises(ConfigError):
            Budget.tokens(**{"n": 64, "page_size": 16, **arguments})


def test_per_layer() -> None:
    budgets = {0: Budget(1), 3: Budget(2)}
    assert budget_for_layer(Budget(9), 7) == Budget(9)
    assert budget_for_layer(budgets, 3) == Budget(2)
    with pytest.raises(ConfigError, match=r"layer 1.*\[0, 3\]"):
        budget_for_layer(budgets, 1)


def test_page_size_and_score_are_checked() -> None:
    with pytest.raises(ConfigError, match="page_size 1, received 16"):
        check_flow(build_flow("h2o_token_sparse_attention"), 16, Budget(1))
    for budget in (Budget(1), Budget(0, ratio=0.5)):
        with pytest.raises(ConfigError, match="topk=0 and ratio=0"):
            check_flow(Flow(), 16, budget)
    for page_size in (0, -1, 1.5):
        with pytest.raises(ConfigError, match="page_size"):
            Runtime("gqa_quest_sparse_attention", Budget(1), page_size=page_size)  # type: ignore[arg-type]


def test_plan_counts_in_integers() -> None:
    """The floor reaches the step's plan unchanged."""
    runtime = Runtime("gqa_quest_sparse_attention", Budget(0, 0, 1, ratio=0.29), page_size=1)
    requests = [runtime.admit() for _ in range(3)]
    runtime.extend(requests, [100, 10, 1])
    plan = Plan(runtime.tables, requests, [0, 0, 0], [], torch.device("cpu"))
    quota = plan.quota(Budget(0, 0, 1, ratio=0.29), True, False)
    assert quota.count.tolist() == [29, 2, 1] and quota.pages.tolist() == [100, 10, 1]
    assert quota.window is not None and quota.window.topk.tolist() == [28, 1]
