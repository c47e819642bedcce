"""The tables that ``kvsieve bench`` prints."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from kvsieve.backends.base import Tuning
from kvsieve.bench import CPU_LAYERS, Case, FlowResult, Measurement
from kvsieve.cli.terminal import output

PIPE_WIDTH = 120
BUSY = 2
"""A median so many times above the least time says that something else was running."""


def print_measurement(measurement: Measurement) -> None:
    """The setting, a table of phases per flow, and the cases with nothing to choose."""
    console, s = output(PIPE_WIDTH), measurement.setting
    budget = s["budget"]
    console.print(
        Text(
            f"{s['backend']} on {s.get('gpu', s['device'])}, {s['threads']} threads, {s['dtype']}, batch {s['batch']}, "
            f"heads {s['query_heads']}/{s['kv_heads']} x {s['head_dim']}, page {s['page_size']}, budget "
            f"{budget['topk']}+{budget['sink']}+{budget['recent']} pages; times per layer, {timer(s)}, "
            f"median of {s['repeats']}; copy bandwidth {measurement.copy_bandwidth / 1e9:.1f} GB/s",
            style="dim",
        )
    )
    for flow in measurement.flows:
        title = f"{flow.flow}, page {flow.page_size}"
        console.rule(Text(title), align="left")
        for case in flow.cases:
            if case.kind == "sparse":
                console.print(phase_table(case, measurement.copy_bandwidth))
                console.print(Text(dense_words(case)))
                for one in case.tuned:
                    console.print(Text(tuning_words(one)))
                if case.single is not None:
                    console.print(Text(single_words(case)))
        console.print(summary(flow))
    if any(case.step.seconds > BUSY * case.step.least for flow in measurement.flows for case in flow.cases):
        console.print(
            Text(
                f"The machine was busy: medians lie more than {BUSY} times above the least times. Trust the ratio of "
                "the least times only, or measure again on a quiet machine.",
                style="bold",
            )
        )
    console.print(
        Text(
            "x dense: the fastest of the fair dense forms divided by the step, by medians and by the least times. "
            "Every case was compared with the float64 reference first, stage by stage, in the first and last segment.",
            style="dim",
        )
    )


def tuning_words(one: Tuning) -> str:
    """What trying other tilings found."""
    forms = ", ".join(f"{row[0]} pages x {row[1]} warps" for row in one.best)
    return (
        f"{one.phase}: {one.tried} tilings tried, {one.by_rule_seconds * 1e6:.1f} us by rule, "
        f"{one.seconds * 1e6:.1f} us with {forms}"
    )


def phase_table(case: Case, copy_bandwidth: float) -> Table:
    """A row per phase of one case."""
    table = Table(
        f"{case.context:,} tokens",
        "µs",
        "least",
        "MB moved",
        "GB/s",
        "of copy",
        "x dense",
        "ran on",
        box=box.SIMPLE_HEAD,
    )
    for column in table.columns[1:-1]:
        column.justify = "right"
    for phase in case.phases:
        table.add_row(
            phase.name,
            f"{1e6 * phase.seconds:.1f}",
            f"{1e6 * phase.least:.1f}",
            f"{phase.bytes / 1e6:.3g}",
            f"{phase.bandwidth / 1e9:.2f}",
            f"{phase.bandwidth / copy_bandwidth:.0%}",
            f"{case.baseline.seconds / phase.seconds:.2f}",
            Text(phase.kernel),
        )
    return table


def timer(setting: dict[str, Any]) -> str:
    """Which clock the times are of."""
    if str(setting["device"]).startswith("cuda"):
        return "chain timer (many calls in one CUDA graph, cold memory)"
    return f"{setting['layers'] or CPU_LAYERS} layers a step"


def single_words(case: Case) -> str:
    """A step by itself, in one line."""
    assert case.single is not None
    median, least = (1e6 * seconds for seconds in case.single)
    return (
        f"single timer (one step of one layer in a graph, cache flushed by reading): {median:.1f} µs, least {least:.1f}"
    )


def dense_words(case: Case) -> str:
    """The dense forms in one line."""
    forms = (
        f"{form.name} {1e6 * form.seconds:.0f} µs (least {1e6 * form.least:.0f})"
        + ("" if form.fair else ", no baseline")
        for form in case.dense
    )
    return "dense: " + "; ".join(forms)


def summary(flow: FlowResult) -> Table:
    """Whole steps against dense, a row per case."""
    table = Table(
        "case", "tokens", "pages", "attended", "step µs", "dense µs", "x dense", "x by least", box=box.SIMPLE_HEAD
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for case in flow.cases:
        table.add_row(
            case.kind,
            f"{case.context:,}",
            str(case.pages),
            str(case.kept),
            f"{1e6 * case.step.seconds:.0f}",
            f"{1e6 * case.baseline.seconds:.0f}",
            f"{case.speedup:.2f}",
            f"{case.least_speedup:.2f}",
        )
    return table
