"""``kvsieve flows``: the table of registered flows, for a terminal, as Markdown or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from kvsieve.cli import declared
from kvsieve.cli.flow_table import SETTING, FlowRow, flow_rows
from kvsieve.cli.json_output import print_json
from kvsieve.cli.terminal import output
from kvsieve.errors import ConfigError

PIPE_WIDTH = 220


def flows_command(
    as_json: bool = declared.AS_JSON,
    as_markdown: bool = typer.Option(False, "--markdown", help="print a Markdown table"),
) -> None:
    """List the flows: page size, fields, bytes per step relative to dense, and what each backend makes of them."""
    if as_json and as_markdown:
        raise ConfigError("expected --json or --markdown, received both; drop one")
    rows = flow_rows()
    if as_json:
        print_json("flows", {"flows": [row.as_json() for row in rows]})
    elif as_markdown:
        print(markdown(rows))
    else:
        show(rows)


def header(rows: Sequence[FlowRow]) -> list[str]:
    """Column titles: the fixed ones and one per backend."""
    return ["flow", "page", "summary fields", "state fields", "bytes/step", *(rows[0].backends if rows else ())]


def cells(row: FlowRow) -> list[str]:
    """A row as text, in the order of :func:`header`."""
    cost = "-" if row.relative_bytes is None else f"{row.relative_bytes:.1%}"
    page = "any" if row.page_size is None else str(row.page_size)
    return [row.name, page, fields(row.summary), fields(row.state), cost, *row.backends.values()]


def fields(specs: Mapping[str, str]) -> str:
    """``k_max [128], k_min [128]``, or ``-``."""
    return ", ".join(f"{name} {spec}" for name, spec in specs.items()) or "-"


def markdown(rows: Sequence[FlowRow]) -> str:
    """The table in Markdown, with the setting of its costs below it."""
    lines = [header(rows), ["---"] * len(header(rows)), *(cells(row) for row in rows)]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"{table}\n\n{SETTING[0].upper()}{SETTING[1:]}."


def show(rows: Sequence[FlowRow]) -> None:
    """Print the table for reading."""
    console = output(PIPE_WIDTH)
    table = Table(*header(rows), box=box.SIMPLE_HEAD, show_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in cells(row)))
    console.print(table)
    console.print(Text(SETTING, style="dim"))
