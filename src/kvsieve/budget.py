"""Budgets: how many pages of a segment a decode step attends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from kvsieve.errors import ConfigError, check_integer


@dataclass(frozen=True)
class Budget:
    """Pages attended per segment and step.

    ``kept = max(sink + topk + recent, floor(ratio * S))`` for a segment of ``S`` pages; with ``S <= kept`` all pages
    are attended. The floor is exact: ``ratio`` is read as the decimal fraction that was written.

    Args:
        topk: pages chosen by score from the window ``[sink, S - recent)``.
        sink: first pages, always attended (attention sinks: StreamingLLM, arXiv 2309.17453).
        recent: last pages, always attended; at least 1, since the last page holds the newest token.
        ratio: share of all pages to keep, in [0, 1]; raises ``topk`` as a request grows.

    Raises:
        ConfigError: a value is not an integer, negative, or out of range.
    """

    topk: int
    sink: int = 1
    recent: int = 2
    ratio: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("topk", 0), ("sink", 0), ("recent", 1)):
            check_integer(f"Budget({name}=)", getattr(self, name), least)
        if not isinstance(self.ratio, (int, float)) or isinstance(self.ratio, bool) or not 0 <= self.ratio <= 1:
            raise ConfigError(f"Budget(ratio=): expected a number in [0, 1], received {self.ratio!r}")

    @cached_property
    def ratio_fraction(self) -> Fraction:
        """``ratio`` as the exact decimal fraction that was written (0.1 is 1/10, not its binary neighbour)."""
        return Fraction(str(self.ratio))

    def kept(self, pages: int) -> int:
        """Pages attended by a segment of ``pages`` pages, before the cap at ``pages``."""
        fraction = self.ratio_fraction
        return max(self.sink + self.topk + self.recent, fraction.numerator * pages // fraction.denominator)

    def window(self, pages: int) -> int:
        """``W``: pages that compete, ``max(0, S - sink - recent)``."""
        return max(0, pages - self.sink - self.recent)

    @classmethod
    def tokens(
        cls, n: int, page_size: int, *, sink_tokens: int = 4, recent_tokens: int = 32, selects: bool = True
    ) -> Budget:
        """A budget of ``n`` tokens, sink and recent ones included, rounded up to whole pages.

        Args:
            n: tokens to attend per segment and step.
            page_size: tokens per page.
            sink_tokens: first tokens always kept, rounded up to pages.
            recent_tokens: last tokens always kept, rounded up to pages; at least one page.
            selects: False for a flow without ``score``: what is left goes to recent pages instead of ``topk``.

        Raises:
            BudgetTooSmall: ``n`` does not hold the sink and recent pages.
            ConfigError: an argument is no integer, or out of range.
        """
        arguments = (("n", n, 1), ("page_size", page_size, 1), ("sink_tokens", sink_tokens, 0))
        for name, value, least in (*arguments, ("recent_tokens", recent_tokens, 0)):
            check_integer(f"Budget.tokens({name}=)", value, least)
        total = math.ceil(n / page_size)
        sink = math.ceil(sink_tokens / page_size)
        recent = max(1, math.ceil(recent_tokens / page_size))
        topk = total - sink - recent
        if topk < 0:
            raise BudgetTooSmall(n, page_size, sink, recent)
        return cls(topk, sink, recent) if selects else cls(0, sink, recent + topk)


class BudgetTooSmall(ConfigError):
    """A budget in tokens that does not hold its sink and recent pages.

    Attributes:
        problem: what was expected and received.
        least: tokens that would do.
    """

    def __init__(self, tokens: int, page_size: int, sink: int, recent: int) -> None:
        self.least = (sink + recent) * page_size
        self.problem = (
            f"a budget of {tokens} tokens is {-(-tokens // page_size)} page(s) of {page_size}: expected at least "
            f"{sink} sink and {recent} recent page(s)"
        )
        super().__init__(
            f"{self.problem}; raise the budget to {self.least} tokens or lower sink_tokens / recent_tokens"
        )


BudgetLike = Budget | Mapping[int, Budget]
"""One budget for all layers, or one per layer index."""


def budget_for_layer(budget: BudgetLike, layer: int) -> Budget:
    """The budget of a layer.

    Raises:
        ConfigError: a per-layer mapping lacks the layer.
    """
    if isinstance(budget, Budget):
        return budget
    if layer not in budget:
        raise ConfigError(f"per-layer budgets: expected one for layer {layer}, received layers {sorted(budget)}")
    return budget[layer]
