"""The table that ``kvsieve bench --seeding`` prints."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from kvsieve.bench import SeedingMeasurement
from kvsieve.cli.bench_report import PIPE_WIDTH
from kvsieve.cli.terminal import output


def print_seeding(measurement: SeedingMeasurement) -> None:
    """The setting, and a row per prompt length and decay."""
    console, s = output(PIPE_WIDTH), measurement.setting
    console.print(
        Text(
            f"Seeding attention mass: {s['backend']} on {s.get('gpu', s['device'])}, {s['threads']} threads, "
            f"{s['dtype']}, one request, one layer, heads {s['query_heads']}/{s['kv_heads']} x {s['head_dim']}, page "
            f"{s['page_size']}; median of {s['repeats']}",
            style="dim",
        )
    )
    table = Table(
        *("prompt", "prefill ms", "decay", "seeding ms", "x prefill", "x by least", "tensor MB"),
        box=box.SIMPLE_HEAD,
    )
    for column in table.columns:
        column.justify = "right"
    for case in measurement.cases:
        for one in case.seedings:
            table.add_row(
                f"{case.context:,}",
                f"{1e3 * case.prefill:.1f}",
                f"{one.decay:g}",
                f"{1e3 * one.seconds:.1f}",
                f"{one.seconds / case.prefill:.2f}",
                f"{one.least / case.prefill_least:.2f}",
                f"{one.largest / 1e6:.1f}",
            )
    console.print(table)
    console.print(
        Text(
            "x prefill: seeding divided by the dense prefill attention that it follows, by medians and by the least "
            "times. tensor: the largest that seeding makes. The sums of the last KV head were compared with "
            "float64 first.",
            style="dim",
        )
    )
