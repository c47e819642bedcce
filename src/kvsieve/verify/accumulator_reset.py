"""State belongs to a request: what a finished one left must not reach the next, and the check must be able to tell."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvsieve.flow import Flow
from kvsieve.verify.accumulator_report import Reset, StatelessReport
from kvsieve.verify.accumulator_stack import FixedWindow


def check_reset(stack: FixedWindow, field: str, initial: torch.Tensor) -> Reset:
    """End the requests and admit others into their rows: once with the reset skipped, once as the stack does it."""
    dirty = _dirty_rows(stack, field, initial)
    stack.readmit(reset=False)
    leftovers = dirty & _dirty_rows(stack, field, initial)
    fresh = stack.readmit()
    reused = leftovers & {row for request in fresh for row in stack.rows(request)}
    clean = bool((stack.state(fresh, field) == initial).all())
    return Reset(len(reused), clean, bool(leftovers))


def check_stateless(flow: Flow, make: Callable[[bool], FixedWindow]) -> StatelessReport:
    """A flow without state on reused blocks and in fresh memory: the scores of a step must be the same bits.

    ``make(True)`` builds a stack of other tokens than ``make(False)``.
    """
    used, fresh, again = make(True), make(False), make(False)
    used.first_step([one.query() for one in used.data])
    before = used.blocks()
    used.replace(again.data)
    q = [one.query() for one in again.data]
    old, new = used.first_step(q), fresh.first_step(q)
    assert old is not None and new is not None
    stateless = not used.layer.pool.state
    return StatelessReport(repr(flow), len(before & used.blocks()), stateless and torch.equal(old, new))


def _dirty_rows(stack: FixedWindow, field: str, initial: torch.Tensor) -> set[int]:
    """Rows of the live requests that do not hold the initial value."""
    rows = torch.tensor([stack.rows(request) for request in stack.requests])
    differs = (stack.state(stack.requests, field) != initial).reshape(*rows.shape, -1).any(2)
    return set(rows[differs].tolist())
