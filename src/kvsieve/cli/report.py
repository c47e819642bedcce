"""What ``kvsieve generate`` prints: texts, where they part, speed and bytes; or the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from kvsieve.budget import Budget
from kvsieve.cli.generation import Parting, Run, StepBytes
from kvsieve.cli.terminal import output
from kvsieve.retention import Evict, Retention

PIPE_WIDTH = 110


@dataclass(frozen=True)
class Comparison:
    """A sparse run, what it was made with, and the dense run if there was one."""

    setting: Mapping[str, Any]
    flow: str
    flow_words: str
    page_size: int
    limit: Budget | Retention
    sparse: Run
    dense: Run | None
    parting: Parting | None

    def as_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {
            **self.setting,
            "flow": self.flow,
            "flow_arguments": self.flow_words,
            "page_size": self.page_size,
            "budget": asdict(self.limit) if isinstance(self.limit, Budget) else None,
            "retention": asdict(self.limit) if isinstance(self.limit, Evict) else None,
            "sparse": run_json(self.sparse),
            "dense": run_json(self.dense) if self.dense else None,
            "parting": asdict(self.parting) if self.parting else None,
        }


def run_json(run: Run) -> dict[str, Any]:
    """A run as plain JSON values."""
    bytes_per_step = asdict(run.step_bytes) if run.step_bytes else None
    return {
        "text": run.text,
        "tokens": run.tokens,
        "tokens_per_second": run.tokens_per_second,
        "prefill_seconds": run.prefill_seconds,
        "bytes_per_step": bytes_per_step,
    }


def print_report(result: Comparison) -> None:
    """Print texts and measurements for reading."""
    console = output(PIPE_WIDTH)
    console.print(Text(setting_words(result), style="dim"))
    for title, run in (("dense", result.dense), (result.flow, result.sparse)):
        if run is not None:
            console.rule(Text(title), align="left")
            console.print(Text(run.text))
    console.rule()
    if result.dense is not None:
        console.print(Text(parting_words(result)))
    console.print(measurements(result))
    if result.setting.get("backend") == "eager":
        console.print(
            Text("Backend eager is PyTorch ops, for checking: compare the bytes. For speed: --backend compiled.")
        )
    read = result.sparse.step_bytes
    if read is not None and read.kv == read.dense:
        limit, option = ("capacity",) * 2 if isinstance(result.limit, Evict) else ("budget", "budget-tokens")
        console.print(
            Text(
                f"Every step was within the {limit}, hence dense: nothing was left out. Lower --{option} or lengthen "
                "the prompt to see the flow at work.",
                style="bold",
            )
        )


def setting_words(result: Comparison) -> str:
    """Model, prompt, flow and budget in one line."""
    words = result.setting
    model = f"{words['model']} ({words['dtype']}, {words['device']}), prompt of {words['prompt_tokens']} tokens"
    return f"{model}; {result.flow_words}; {limit_words(result.limit, result.page_size)}"


def limit_words(limit: Budget | Retention, page_size: int) -> str:
    """Budget or capacity in words."""
    if isinstance(limit, Evict):
        chosen = limit.capacity - limit.sink - limit.recent
        return f"capacity: {limit.sink} sink + {chosen} chosen + {limit.recent} recent tokens, all others are evicted"
    assert isinstance(limit, Budget)
    pages = f"{limit.sink} sink + {limit.topk} chosen + {limit.recent} recent pages of {page_size}"
    return f"budget: {pages}{f', at least {limit.ratio} of all' if limit.ratio else ''}"


def parting_words(result: Comparison) -> str:
    """One sentence: whether and where the texts part."""
    if result.parting is None:
        return f"Both runs give the same {len(result.sparse.tokens)} tokens."
    at = result.parting
    return f"The texts part at new token {at.index}: dense {at.dense[:40]!r}, sparse {at.sparse[:40]!r}."


def measurements(result: Comparison) -> Table:
    """Speed and bytes per decode step, a row per run."""
    table = Table("", "decode tok/s", "K/V read/step", "fields/step", "total/step", "of dense", box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    read = result.sparse.step_bytes
    if result.dense is not None:
        table.add_row("dense", speed(result.dense), *byte_cells(StepBytes(read.dense, 0, read.dense) if read else None))
    table.add_row(Text(result.flow), speed(result.sparse), *byte_cells(read))
    return table


def byte_cells(read: StepBytes | None) -> list[str]:
    """K/V, fields, their sum, and the sum relative to dense."""
    if read is None:
        return ["-"] * 4
    total = read.kv + read.fields
    return [megabytes(read.kv), megabytes(read.fields), megabytes(total), f"{total / read.dense:.1%}"]


def speed(run: Run) -> str:
    """Decode speed for the table."""
    return "-" if run.tokens_per_second is None else f"{run.tokens_per_second:.1f}"


def megabytes(count: float) -> str:
    """Bytes in units of 10**6."""
    return f"{count / 1e6:.3g} MB"
