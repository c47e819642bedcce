"""What a runtime is made and called with, refused with expected, received and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsieve.budget import Budget
from kvsieve.errors import ConfigError
from kvsieve.flow import Flow
from kvsieve.paging.table import RequestId
from kvsieve.retention import Evict, Keep


def budgets_of(budget: Any, retention: Any) -> list[Budget]:
    """The budgets of all layers; none where tokens are evicted.

    Raises:
        ConfigError: both or neither of a budget and an eviction, or what is neither.
    """
    if isinstance(retention, Evict):
        if budget is not None:
            raise ConfigError(f"expected a budget or retention={retention}, received both ({budget}); leave out one")
        return []
    if not isinstance(retention, Keep):
        raise ConfigError(f"retention: expected Keep() or Evict(capacity), received {retention!r}")
    budgets = list(budget.values()) if isinstance(budget, Mapping) else [budget]
    if not budgets or not all(isinstance(one, Budget) for one in budgets):
        wanted = "expected a Budget, or a mapping of layer to Budget"
        raise ConfigError(f"budget: {wanted}, received {budget!r}; or keep fewer tokens with retention=Evict(capacity)")
    return budgets


def check_arguments(flow: Any, num_blocks: Any) -> None:
    """Refuse what is no flow, and a pool of no size.

    Raises:
        ConfigError: with expected and received.
    """
    if not isinstance(flow, Flow):
        raise ConfigError(f"flow: expected a Flow instance or a registered name, received {flow!r}")
    if num_blocks is not None and (not isinstance(num_blocks, int) or isinstance(num_blocks, bool) or num_blocks < 1):
        raise ConfigError(f"num_blocks: expected an integer >= 1 or None, received {num_blocks!r}")


def check_distinct(what: str, requests: Sequence[RequestId]) -> None:
    """Refuse a call ``what`` that names a request twice.

    Raises:
        ConfigError: lists them.
    """
    if len(set(requests)) != len(requests):
        raise ConfigError(f"{what}: expected distinct requests, received {list(requests)}")
