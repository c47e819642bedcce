"""The report of an evaluation as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from kvsieve.evaluate.axes import nats, shares
from kvsieve.evaluate.cells import COLUMNS, LEGEND, cells, heading
from kvsieve.evaluate.chart import BOTTOM, LEFT, RIGHT, TOP, Line, Mark, chart, heat_map, swatch
from kvsieve.evaluate.contenders import DENSE, ORACLE, RANDOM, RECENT
from kvsieve.evaluate.page import page, table
from kvsieve.evaluate.summary import Row, Summary, mean_map, mean_of
from kvsieve.evaluate.tasks import TASKS
from kvsieve.outputs import write_text

STYLES = {DENSE: "ref-dense", ORACLE: "ref-oracle", RANDOM: "ref-random", RECENT: "ref-recent"}
COLOURS = 10
BYTES = "bytes read per step, of dense"
CAPTURED = "exact attention captured, among competing pages"
INTRODUCTION = """<p>Each sample's context is read densely; question and answer are then decoded token by token with a
selection of pages. The dashed line is dense attention. Black diamonds are the <b>oracle selection</b>: the pages to
which the step's own queries give most exact attention, as many as the flow may attend. A flow can be judged by how near
it comes to the oracle at equal bytes.</p>"""


def write_report(summary: Summary, path: Path, command: str = "") -> None:
    """Write the report of an evaluation.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, report(summary, command), "--report")


def report(summary: Summary, command: str = "") -> str:
    """The page: charts and a table per task and context, then maps of layers and heads."""
    setting, styles = summary.setting, line_styles(summary)
    words = (
        f"{setting.model}, {setting.dtype}, {setting.device}, backend {setting.backend}, seed {setting.seed}, "
        f"{summary.wish.samples} samples per task and context"
    )
    parts = ["<h1>kvsieve eval</h1>", f'<p class="soft">{escape(words)}</p>', INTRODUCTION]
    parts += [f"<pre>{escape(command)}</pre>"] if command else []
    for task in summary.wish.tasks:
        for context in summary.wish.contexts:
            parts.append(_section(task, context, summary.of(task, context), styles))
    parts.append(f'<p class="soft">{escape(LEGEND)}</p>')
    parts.append(_maps(summary))
    return page("kvsieve eval", "\n".join(parts))


def line_styles(summary: Summary) -> dict[str, str]:
    """CSS class by contender: references have their own, flows take colours in turn."""
    flows = [who.name for who in summary.wish.contenders if who.rule not in STYLES]
    styles = {name: f"s{i % COLOURS}" for i, name in enumerate(flows)}
    return styles | {who.name: STYLES[who.rule] for who in summary.wish.contenders if who.rule in STYLES}


def _section(task: str, context: int, rows: Sequence[Row], styles: dict[str, str]) -> str:
    legend = "".join(f"<li>{swatch(style)}{escape(name)}</li>" for name, style in styles.items())
    charts = [
        _quality("Loss over bytes read", BYTES, rows, styles, lambda row: row.bytes_read, True),
        _quality("Loss over captured mass", CAPTURED, rows, styles, lambda row: row.window, False),
    ]
    if TASKS[task].exact:
        charts.append(_exact(rows, styles))
    return (
        f'<h2>{escape(heading(task, context))}</h2><ul class="legend">{legend}</ul>'
        f'<div class="charts">{"".join(charts)}</div>{table(COLUMNS, [cells(row) for row in rows])}'
    )


def _quality(
    title: str, x_name: str, rows: Sequence[Row], styles: dict[str, str], of: Callable[[Row], float], log: bool
) -> str:
    x = shares([of(row) for row in rows], LEFT, RIGHT, log)
    y = nats([row.nll.mean for row in rows], BOTTOM, TOP)
    lines = _lines(rows, styles, of, lambda row: row.nll.mean)
    return chart(title, x_name, "nll per answer token", x, y, lines)


def _exact(rows: Sequence[Row], styles: dict[str, str]) -> str:
    x = shares([row.bytes_read for row in rows], LEFT, RIGHT, True)
    y = shares([], BOTTOM, TOP, False)
    lines = _lines(rows, styles, lambda row: row.bytes_read, lambda row: row.exact)
    return chart("Right answers over bytes read", BYTES, "exact answers", x, y, lines)


def _lines(
    rows: Sequence[Row], styles: dict[str, str], of_x: Callable[[Row], float], of_y: Callable[[Row], float]
) -> list[Line]:
    lines = []
    for name, style in styles.items():
        own = sorted((row for row in rows if row.contender == name), key=of_x)
        marks = [Mark(of_x(row), of_y(row), _hover(row)) for row in own]
        if marks:
            lines.append(Line(name, style, marks, level=own[0].rule == DENSE))
    return lines


def _hover(row: Row) -> str:
    budget = "everything" if row.rule == DENSE else f"{row.tokens} tokens"
    return (
        f"{budget}, {row.bytes_read:.1%} of dense bytes, nll {row.nll.mean:.3f}, exact {row.exact:.0%}, captured "
        f"{row.captured:.1%}, of the window {row.window:.1%}, recall {row.recall:.1%}"
    )


def _maps(summary: Summary) -> str:
    """Captured window mass per layer and head: one map per contender, means over the tasks."""
    parts = [
        "<h2>Captured mass by layer and head</h2>",
        '<p class="soft">Share of the exact attention on competing pages that the selection covers; the stronger '
        "the colour, the more. Layers run across, KV heads down; means over tasks.</p>",
    ]
    groups = dict.fromkeys((row.context, row.tokens) for row in summary.rows if row.rule != DENSE)
    for number, (context, tokens) in enumerate(groups):
        maps = []
        for who in summary.wish.contenders:
            rows = [r for r in summary.rows if (r.context, r.tokens, r.contender) == (context, tokens, who.name)]
            if rows and who.rule != DENSE:
                window = mean_map([row.maps["window"] for row in rows])
                maps.append(heat_map(f"{who.name}: {mean_of(window):.1%}", window, rows[0].layers))
        words = f"context {context}, budget {tokens} tokens"
        opened = " open" if number == 0 else ""
        parts.append(f'<details{opened}><summary>{words}</summary><div class="heats">{"".join(maps)}</div></details>')
    return "\n".join(parts)
