"""Faults of prefill and of the plan of a call: where tokens go, whose metadata it is, who is scored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvsieve.backends import attention
from kvsieve.backends.eager import EagerBackend
from kvsieve.budget import Budget
from kvsieve.call import Call
from kvsieve.paging.allocator import NULL_BLOCK
from kvsieve.plan import Plan, Quota, Writes
from kvsieve.verify.mutants.base import Table, with_columns
from kvsieve.window import Window

TABLE = Table()
fault = TABLE.fault

LIMIT = 2**15 - 1


@fault("prefill repeats K heads in turn", 22, attention, "prefill_request")
def _(original: Any) -> Any:
    def prefill_request(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Any) -> torch.Tensor:
        _, heads, group, _ = q.shape
        dealt = q.flatten(1, 2).unflatten(1, (group, heads)).transpose(1, 2)
        out: torch.Tensor = original(dealt, k, v, options).transpose(1, 2).flatten(1, 2)
        return out.reshape(-1, heads, group, out.shape[-1])

    return prefill_request


@fault("the causal mask of a later chunk starts at 0", 27, attention, "prefill_request")
def _(original: Any) -> Any:
    def prefill_request(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Any) -> torch.Tensor:
        rows = q.shape[0]
        out: torch.Tensor = original(q, k[:, :rows], v[:, :rows], options)
        return out

    return prefill_request


@fault("a chunk does not attend the past", 27, attention, "prefill_request")
def _(original: Any) -> Any:
    def prefill_request(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Any) -> torch.Tensor:
        rows = q.shape[0]
        out: torch.Tensor = original(q, k[:, -rows:], v[:, -rows:], options)
        return out

    return prefill_request


@fault("prefill sees one token ahead", None, attention, "prefill_request")
def _(original: Any) -> Any:
    def prefill_request(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Any) -> torch.Tensor:
        out: torch.Tensor = original(q, k, v, options)
        last = original(torch.cat([q[1:], q[-1:]]), k, v, options)
        return torch.cat([out[:1], last[:-2], out[-1:]]) if len(q) > 2 else out

    return prefill_request


@fault("outputs of a ragged prefill are in another order", 25, EagerBackend, "prefill")
def _(original: Any) -> Any:
    def prefill(self: Any, q: Any, k: Any, v: Any, pool: Any, rows: Any, options: Any) -> torch.Tensor:
        out: torch.Tensor = original(self, q, k, v, pool, rows, options)
        parts = out.split([count for count in rows.counts if count])
        return torch.cat(parts[::-1])

    return prefill


@fault("a later chunk is written from offset 0", 27, Plan, "_writes")
def _(original: Any) -> Any:
    def writes(self: Plan, entered: Any) -> Writes:
        chunk = [start > 0 and count > 1 for start, count in zip(self.rows.starts, self.rows.counts, strict=True)]
        starts = tuple(0 if later else start for later, start in zip(chunk, self.rows.starts, strict=True))
        kept, self.rows = self.rows, replace(self.rows, starts=starts)
        wrong: Writes = original(self, entered)
        self.rows = kept
        return wrong

    return writes


@fault("only pages that lie whole in a chunk are summarised", 27, Plan, "_writes")
def _(original: Any) -> Any:
    def writes(self: Plan, entered: Any) -> Writes:
        right: Writes = original(self, entered)
        opened = set(right.blocks[right.offsets == 0].tolist())
        whole = torch.tensor([block in opened for block in right.filled.tolist()], dtype=torch.bool)
        return replace(right, filled=right.filled[whole])

    return writes


@fault("a call reuses the plan of a call that looked alike", 32, Call, "_plan")
def _(original: Any) -> Any:
    plans: dict[Any, Plan] = {}

    def plan(self: Call, device: Any) -> Plan:
        key = id(self.host), self.requests, self.counts, self.decode
        made: Plan = plans.setdefault(key, original(self, device))
        return made

    return plan


@fault("state rests while a request is under its budget", 31, Plan, "quota")
def _(original: Any) -> Any:
    def quota(self: Plan, budget: Budget, scores: bool, stateful: bool) -> Quota:
        made: Quota = original(self, budget, scores, False)
        return made

    return quota


@fault("requests of more than 32,767 pages are not scored", 21, Plan, "quota")
def _(original: Any) -> Any:
    def quota(self: Plan, budget: Budget, scores: bool, stateful: bool) -> Quota:
        few = max(self.rows.lengths) <= LIMIT * self.page_size
        made: Quota = original(self, budget, scores and few, stateful)
        return made

    return quota


class _Floating(Budget):
    """The floor of ``ratio * S`` in binary floating point."""

    def kept(self, pages: int) -> int:
        return max(self.sink + self.topk + self.recent, int(self.ratio * pages))


class _Late(Budget):
    """A request that is one page over its budget stays dense."""

    def kept(self, pages: int) -> int:
        kept = super().kept(pages)
        return kept + (pages == kept + 1)


class _Rounded(Budget):
    """The floor of ``ratio * S`` rounded up."""

    def kept(self, pages: int) -> int:
        return max(super().kept(pages), -int(-self.ratio * pages // 1))


def _budget_of(original: Any, kind: type[Budget]) -> Any:
    def quota(self: Plan, budget: Budget, scores: bool, stateful: bool) -> Quota:
        if budget.recent == 1 and budget.sink == 0 and budget.ratio == 1:  # a dense layer
            return original(self, budget, scores, stateful)  # type: ignore[no-any-return]
        wrong = kind(budget.topk, budget.sink, budget.recent, budget.ratio)
        return original(self, wrong, scores, stateful)  # type: ignore[no-any-return]

    return quota


@fault("the floor of a ratio is taken in binary floating point", None, Plan, "_quota")
def _(original: Any) -> Any:
    return _budget_of(original, _Floating)


@fault("a ratio is rounded up", None, Plan, "_quota")
def _(original: Any) -> Any:
    return _budget_of(original, _Rounded)


@fault("a request one page over its budget stays dense", None, Plan, "_quota")
def _(original: Any) -> Any:
    return _budget_of(original, _Late)


@fault("padding of a shorter window writes into the request's real state rows", 13, Plan, "_window")
def _(original: Any) -> Any:
    def window(self: Plan, budget: Budget, scored: list[int], *more: Any) -> Window:
        right: Window = original(self, budget, scored, *more)
        newest = torch.stack([row[row != int(NULL_BLOCK)][-1:].sum() for row in self.row_table[scored]])
        return with_columns(right, rows=torch.where(right.valid, right.rows, newest[:, None]))

    return window


@fault("a window begins one page late", 28, Plan, "_window")
def _(original: Any) -> Any:
    def window(self: Plan, *arguments: Any) -> Window:
        right: Window = original(self, *arguments)
        shifted = right.blocks.roll(-1, 1)
        return with_columns(right, blocks=torch.where(right.valid, shifted, right.blocks))

    return window
