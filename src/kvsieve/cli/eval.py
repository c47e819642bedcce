"""``kvsieve eval``: quality of flows on seeded tasks, and the share of attention that they cover."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from kvsieve.backends import backend_names
from kvsieve.budget_text import parse_budget
from kvsieve.cli import declared
from kvsieve.cli.declared import BUDGET_WORDS, SHARE_WORDS
from kvsieve.cli.files import check_output
from kvsieve.cli.json_output import print_json
from kvsieve.cli.options import check_device, note_budget, parse_dtype, parse_flow_arguments, read_text
from kvsieve.cli.terminal import output, progress_bar
from kvsieve.errors import ConfigError, UnknownName
from kvsieve.evaluate.cells import COLUMNS, LEGEND, cells, heading
from kvsieve.evaluate.contenders import line_up
from kvsieve.evaluate.report import write_report
from kvsieve.evaluate.run import Setting, Wish, evaluate
from kvsieve.evaluate.store import ResultStore
from kvsieve.evaluate.summary import Summary, summarize
from kvsieve.evaluate.tasks import TASKS, choose_tasks
from kvsieve.flow import list_flows
from kvsieve.models import quiet_transformers

PIPE_WIDTH = 160
TASK_HELP = f"{', '.join(TASKS)}; may be repeated"
QUICK: dict[str, Any] = {
    "task": ["needle", "repeat", "perplexity"],
    "budget": ["12.5%"],
    "context": [1024],
    "samples": 4,
}
FULL: dict[str, Any] = {**QUICK, "task": list(TASKS), "budget": ["25%", "12.5%"], "samples": 8}


def eval_command(
    flows: list[str] = typer.Argument(None, metavar="FLOW", help=declared.FLOW_WORDS),
    flow: list[str] = typer.Option([], help="a flow, as before; may be repeated"),
    everything: bool = typer.Option(False, "--all", help="every registered flow"),
    flow_arg: list[str] = typer.Option([], metavar="KEY=VALUE", help="argument of the flow, if it is one; may repeat"),
    model: str = declared.MODEL,
    budget: list[str] = typer.Option([], help=f"{BUDGET_WORDS}{SHARE_WORDS}; may be repeated"),
    context: list[int] = typer.Option([], min=64, help="tokens of context; may be repeated"),
    task: list[str] = typer.Option([], help=TASK_HELP),
    samples: int | None = typer.Option(None, min=1, help="samples per task and context"),
    quick: bool = typer.Option(False, help="three tasks, 12.5%, 1024 tokens, 4 samples, unless they are given"),
    text: str | None = typer.Option(None, help="file with the text that contexts are cut from" + declared.OWN_TEXT),
    seed: int = typer.Option(0, help="seed of all samples"),
    page_size: int | None = declared.PAGE_SIZES,
    dtype: str = declared.DTYPE,
    device: str = declared.DEVICE,
    backend: str = typer.Option("eager", help="backend that flows run on"),
    batch: int = typer.Option(4, min=1, help="samples decoded together"),
    jobs: int = typer.Option(1, min=1, help="worker processes"),
    evict: bool = typer.Option(False, help="also flows that can evict tokens, evicting: the budget is their capacity"),
    references: bool = typer.Option(True, help="also dense, oracle selection, random pages, recent only"),
    results: Path | None = typer.Option(None, metavar="FILE", help="JSON lines to keep results in, and to go on from"),
    report: Path | None = typer.Option(None, metavar="FILE", help="write one self-contained HTML file"),
    as_json: bool = declared.AS_JSON,
) -> None:
    """Compare flows with dense attention and the exact best pages on a real model.

    Contexts are prefilled densely; question and answer are decoded sparsely.
    """
    names = [*(flows or []), *flow, *(list_flows() if everything else ())]
    arguments = parse_flow_arguments(flow_arg)
    if not names:
        raise ConfigError("expected a flow, --flow or --all, received none of them")
    if arguments and len(set(names)) > 1:
        raise ConfigError("--flow-arg belongs to one flow: expected one, received several; evaluate them one by one")
    if backend not in backend_names():
        raise UnknownName("backend", backend, backend_names())
    parse_dtype(dtype)
    check_device(device)
    check_output(report, "--report")
    check_output(results, "--results")
    default = QUICK if quick else FULL
    contenders = line_up(names, arguments, page_size, references, evict)
    if evict and not any(one.evicts for one in contenders):
        raise ConfigError(f"--evict: expected a flow that evicts by attention mass (h2o), received {names}; drop it")
    wish = Wish(
        contenders,
        [one.name for one in choose_tasks(task or default["task"])],
        list(dict.fromkeys(context or default["context"])),
        [parse_budget(one) for one in budget or default["budget"]],
        samples or default["samples"],
    )
    setting = Setting(model, read_text(text), dtype, device, backend, seed, batch)
    wish.check()
    for one in contenders:
        if one.spec in names and not one.evicts:
            built, least = one.build(), min(wish.contexts)
            note_budget(built, one.budget(built, min(budget.of(least) for budget in wish.budgets)))
    quiet_transformers()
    summary = run(setting, wish, jobs, results)
    if report is not None:
        write_report(summary, report, shlex.join(["kvsieve", *sys.argv[1:]]))
    if as_json:
        print_json("eval", summary.as_json())
    else:
        show(summary)


def run(setting: Setting, wish: Wish, jobs: int, results: Path | None) -> Summary:
    """Evaluate what is missing and sum up."""
    store = ResultStore(setting.as_json(), results)
    with progress_bar("eval") as progress:
        evaluate(setting, wish, store, jobs, progress)
    return summarize(setting, wish, store)


def show(summary: Summary) -> None:
    """Print a table per task and context."""
    console, setting = output(PIPE_WIDTH), summary.setting
    words = f"{setting.model} ({setting.dtype}, {setting.device}, {setting.backend}), seed {setting.seed}, "
    console.print(Text(f"{words}{summary.wish.samples} samples; nll in nats per answer token", style="dim"))
    for task in summary.wish.tasks:
        for context in summary.wish.contexts:
            table = Table(*COLUMNS, title=heading(task, context), title_justify="left", box=box.SIMPLE_HEAD)
            for column in table.columns[2:]:
                column.justify = "right"
            for row in summary.of(task, context):
                table.add_row(*cells(row))
            console.print(table)
    console.print(Text(LEGEND, style="dim"))
