"""A decode step's plan in memory that stays where it is, as a captured CUDA graph needs it.

The same integers as those of :class:`~kvsieve.integrations.vllm.plan.Decoding`, which asks the device how long requests
are. Here the host knows bounds only, and nothing waits for the device: what is not there is masked by counts. All of it
is for flows without state.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvsieve.budget import Budget
from kvsieve.plan import Quota, Rows
from kvsieve.window import Window

Asked = tuple[Budget, bool]
"""A budget, and whether the flow scores."""


class DecodeMemory:
    """Device memory of decode plans, for up to ``rows`` requests of up to ``tokens`` tokens each.

    Every plan takes the first rows of the same tensors, so that a graph that was captured for a number of requests
    finds the plan of each later step of as many. Plans do not live at the same time.
    """

    @torch.inference_mode(False)  # it outlives a forward pass
    def __init__(self, rows: int, tokens: int, page_size: int, block_size: int, device: torch.device) -> None:
        self.page_size, self.share = page_size, block_size // page_size
        self.tokens = tokens
        blocks = -(-tokens // block_size)
        self.table = torch.zeros(rows, blocks * self.share, dtype=torch.int64, device=device)
        self.lengths, self.pages, self.filled = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3))
        self.requests = torch.arange(rows, device=device)
        self.there = torch.zeros(rows, dtype=torch.bool, device=device)
        self.within = torch.arange(self.share, device=device)
        self._by_budget: dict[Budget, torch.Tensor] = {}

    @torch.inference_mode(False)
    def of(self, budget: Budget, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Counts, window widths and pages to choose [rows] under a budget."""
        if budget not in self._by_budget:
            rows_each = len(self.lengths) + len(self.lengths) % 2  # 16 bytes
            self._by_budget[budget] = torch.zeros(3, rows_each, dtype=torch.int64, device=self.lengths.device)
        counts, widths, topk = self._by_budget[budget][:, :rows]
        return counts, widths, topk

    def fill_table(self, blocks: torch.Tensor, pages: int) -> torch.Tensor:
        """Physical pages [R, pages] of requests with these blocks [R, N]."""
        count = min(-(-pages // self.share), blocks.shape[1])
        place = self.table[: len(blocks), : count * self.share].unflatten(1, (count, self.share))
        torch.add(blocks[:, :count, None].to(torch.int64) * self.share, self.within, out=place)
        return self.table[: len(blocks), :pages]

    def fill_pages(self, slots: torch.Tensor) -> torch.Tensor:
        """Pages that one new token of each request fills [R]; the null page where it fills none."""
        filled = self.filled[: len(slots)]
        filled.copy_(_filled(slots, self.page_size))
        return filled


class FixedDecoding:
    """Requests that take one token on a past, by bounds that the host knows.

    Args:
        lengths: [R] tokens of each, the new one included; 0: a row that is not there.
        blocks: [R, N] block table.
        longest: tokens that no request exceeds.
        asked: under what budgets layers will attend.
        tokens: [R] places in the flat token axis; None: all of it, in order.

    Attributes:
        there: bool [R]: which rows are requests.
    """

    def __init__(
        self,
        memory: DecodeMemory,
        lengths: torch.Tensor,
        blocks: torch.Tensor,
        longest: int,
        asked: Iterable[Asked],
        tokens: torch.Tensor | None = None,
    ) -> None:
        self.memory, self.page_size, self.tokens = memory, memory.page_size, tokens
        self.count, self.longest = len(lengths), -(-longest // memory.page_size)
        self.lengths, self.pages = memory.lengths[: self.count], memory.pages[: self.count]
        self.lengths.copy_(lengths)
        self.there, self.state = memory.there[: self.count], None
        torch.gt(lengths, 0, out=self.there)
        torch.div(self.lengths + (self.page_size - 1), self.page_size, rounding_mode="floor", out=self.pages)
        self.table = memory.fill_table(blocks, self.longest)
        self.rows = Rows((), (), (), self.table, self.lengths)
        self._quotas = {one: self._quota(*one) for one in set(asked)}

    def quota(self, budget: Budget, scores: bool, stateful: bool = False) -> Quota:
        """How many pages each row attends; one of the ``asked`` budgets, in a captured step."""
        assert not stateful, "state follows its requests on the host"
        if (budget, scores) not in self._quotas:
            self._quotas[budget, scores] = self._quota(budget, scores)
        return self._quotas[budget, scores]

    def _quota(self, budget: Budget, scores: bool) -> Quota:
        fraction, pages, most = budget.ratio_fraction, self.pages, budget.kept(self.longest)
        fixed = budget.sink + budget.recent
        counts, widths, topk = self.memory.of(budget, self.count)
        kept = torch.clamp(fraction.numerator * pages // fraction.denominator, min=fixed + budget.topk)
        torch.minimum(pages, kept, out=counts)
        over = pages > kept
        widths.copy_(torch.where(over, pages - fixed, 0))
        topk.copy_(torch.where(over, counts - fixed, 0))
        sparse = self.longest > most
        window = self._window(budget, widths, topk, most - fixed) if scores and sparse else None
        width = min(self.longest, most)
        return Quota(budget.sink, budget.recent, pages, counts, width, sparse, window, 0, self.table)

    def _window(self, budget: Budget, widths: torch.Tensor, topk: torch.Tensor, most: int) -> Window:
        width = budget.window(self.longest)
        # Not `settled`: which kernels come ahead, and what they let start early, is vLLM's affair.
        return Window(
            requests=self.memory.requests[: self.count],
            table=self.table,
            row_table=self.table,
            lengths=self.lengths,
            widths=widths,
            width=width,
            sink=budget.sink,
            page_size=self.page_size,
            topk=topk,
            max_topk=most,
            total_pages=self.count * width,
        )


def leaves_pages_out(asked: Iterable[Asked], longest: int, page_size: int) -> bool:
    """Whether a request of so many tokens would leave pages out under some budget."""
    pages = -(-longest // page_size)
    return any(pages > budget.kept(pages) for budget, _ in asked)


def filled_pages(slots: torch.Tensor, page_size: int, requests: int) -> torch.Tensor:
    """Pages that tokens of so many requests at these slots [T] fill, the null page behind them: no more are possible.

    Padding, whose slot is -1, fills none.
    """
    most = len(slots) // page_size + min(requests, len(slots))
    pages = _filled(slots, page_size)
    place = torch.where(pages > 0, torch.cumsum(pages > 0, 0) - 1, most)
    return torch.zeros(most + 1, dtype=torch.int64, device=slots.device).scatter_(0, place, pages)[:most]


def _filled(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    ends = (slots >= 0) & (slots % page_size == page_size - 1)
    return torch.where(ends, slots // page_size, 0)
