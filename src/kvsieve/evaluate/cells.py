"""Rows of a summary as text, the same in the terminal and in the report."""

from __future__ import annotations

from kvsieve.evaluate.contenders import DENSE
from kvsieve.evaluate.summary import Figure, Row
from kvsieve.evaluate.tasks import TASKS

COLUMNS = [
    "",
    "budget",
    "nll",
    "over dense",
    "over oracle",
    "exact",
    "tokens",
    "bytes read",
    "stored",
    "captured",
    "window",
    "recall",
]
LEGEND = (
    "nll: nats per answer token, and the difference to dense and to the oracle selection of the same budget, sample by "
    "sample, with its standard error. exact: wholly right answers; tokens: right answer tokens. bytes read: K/V "
    "attended and fields scored in decode steps, of dense (the oracle's own scoring is not counted). stored: K/V of "
    "the context that stays in memory. captured: share of the exact attention that falls on selected pages; window: "
    "the same among the pages that compete; recall: share of the exact best window pages that was selected. Means over "
    "steps, layers and KV heads."
)


def heading(task: str, context: int) -> str:
    """Task and context in words."""
    return f"{TASKS[task].title}, context {context}: {TASKS[task].about}"


def cells(row: Row) -> list[str]:
    """A row in the order of ``COLUMNS``."""
    exact = f"{round(row.exact * row.samples)}/{row.samples}" if TASKS[row.task].exact else "-"
    shares = (row.accuracy, row.bytes_read, row.stored, row.captured, row.window, row.recall)
    return [
        row.contender,
        "all" if row.rule == DENSE else str(row.tokens),
        f"{row.nll.mean:.3f}",
        difference(row.over_dense),
        difference(row.over_oracle),
        exact,
        *(f"{share:.1%}" for share in shares),
    ]


def difference(figure: Figure | None) -> str:
    """A difference and its standard error."""
    if figure is None:
        return "-"
    return f"{figure.mean:+.3f}" + ("" if figure.error is None else f" ± {figure.error:.3f}")
