"""``kvsieve explain``: which pages a flow kept in one generation, and which lost page mattered."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from kvsieve.budget_text import parse_budget
from kvsieve.cli import declared
from kvsieve.cli.declared import BUDGET_WORDS, PAGES_WORDS, SHARE_WORDS
from kvsieve.cli.files import check_output, check_plot
from kvsieve.cli.json_output import print_json
from kvsieve.cli.options import check_device, note_budget, parse_dtype, parse_flow_arguments, parse_layers, read_text
from kvsieve.cli.terminal import output, progress_bar
from kvsieve.errors import ConfigError
from kvsieve.evaluate.contenders import flow_contender
from kvsieve.evaluate.explain_page import lost_words, setting_words, write_explanation
from kvsieve.evaluate.explain_plot import choose_segments, plot_trace
from kvsieve.evaluate.tasks import Sample, choose_tasks
from kvsieve.evaluate.text import Corpus
from kvsieve.evaluate.trace import Trace, record
from kvsieve.models import load_model, quiet_transformers
from kvsieve.outputs import new_file

PIPE_WIDTH = 110
LISTED = 12
TEXT_HELP = "file with the text to continue, - for stdin" + declared.OWN_TEXT


def explain_command(
    flow: str = declared.FLOW_ARGUMENT,
    flow_arg: list[str] = declared.FLOW_ARGS,
    model: str = declared.MODEL,
    budget: str = typer.Option("12.5%", help=BUDGET_WORDS + SHARE_WORDS + PAGES_WORDS),
    page_size: int | None = declared.PAGE_SIZES,
    text: str | None = typer.Option(None, "--text", "--prompt-file", help=TEXT_HELP),
    context: int = typer.Option(1024, min=1, help="tokens of prompt: the last ones of the text"),
    task: str | None = typer.Option(None, help="explain a sample of this task of kvsieve eval, and go on from there"),
    sample: int | None = typer.Option(None, min=0, help="number of that sample  [default: 0]"),
    seed: int | None = typer.Option(None, help="seed of that sample  [default: 0]"),
    max_new_tokens: int = typer.Option(32, min=1, help="tokens to generate, greedily"),
    layer: str = typer.Option("", metavar="LAYERS", help="layers of the PNG, such as 0,4-6  [default: the worst one]"),
    head: str = typer.Option("", metavar="HEADS", help="KV heads of the PNG  [default: the worst one]"),
    dtype: str = declared.DTYPE,
    device: str = declared.DEVICE,
    plot: Path | None = typer.Option(None, metavar="FILE", help="save a PNG; needs matplotlib"),
    report: Path | None = typer.Option(None, metavar="FILE", help="write one HTML file, tokens under the cursor"),
    as_json: bool = declared.AS_JSON,
) -> None:
    """Show the pages kept over steps beside the exact attention, and the lost page that mattered most."""
    if task is None and (sample is not None or seed is not None):
        raise ConfigError("--sample and --seed: expected --task beside them, received none; name one of kvsieve eval's")
    if plot is None and (layer or head):
        raise ConfigError(
            "--layer and --head: expected --plot beside them, received none; the HTML report has them all"
        )
    check_plot(plot)
    check_output(report, "--report")
    contender, wish = flow_contender(flow, parse_flow_arguments(flow_arg), page_size), parse_budget(budget)
    kind, source = parse_dtype(dtype), read_text(text).rstrip("\r\n")
    check_device(device)
    quiet_transformers()
    loaded, tokenizer = load_model(model, kind, device=device)
    prompt = choose_prompt(Corpus(tokenizer, source), context, task, seed or 0, sample or 0)
    built = contender.build()
    beyond = len(prompt.question) + max_new_tokens
    pages = wish.budget(contender.page_size, len(prompt.prefix), beyond, selects=built.score is not None)
    note_budget(built, pages, asked=wish.chooses_none)
    with progress_bar("explain") as progress:
        trace = record(
            loaded, tokenizer, built, pages, contender.page_size, prompt.prefix, prompt.question, max_new_tokens,
            progress=progress,
        )  # fmt: skip
    if plot is not None:
        layers, heads = (parse_layers(words, option) for words, option in ((layer, "--layer"), (head, "--head")))
        with new_file(plot, "--plot") as name:
            plot_trace(trace, choose_segments(trace, layers, heads), name)
    if report is not None:
        write_explanation(trace, report, shlex.join(["kvsieve", *sys.argv[1:]]))
    print_json("explain", trace_json(trace)) if as_json else show(trace)


def choose_prompt(corpus: Corpus, context: int, task: str | None, seed: int, sample: int) -> Sample:
    """The end of the text, or a task's sample: its prefix is prefilled, its question fed token by token.

    Raises:
        ConfigError: the text has a single token.
    """
    if task is not None:
        return choose_tasks([task])[0].sample(corpus, context, seed, sample)
    ids = (corpus.start + corpus.ids)[-context:]
    if len(ids) < 2:
        raise ConfigError("--text: expected at least two tokens to continue, received one")
    return Sample(tuple(ids), (), ())


def trace_json(trace: Trace) -> dict[str, Any]:
    """What a program may want of a trace; the maps are in the HTML report."""
    return {
        "flow": trace.flow,
        "page_size": trace.page_size,
        "budget": asdict(trace.budget),
        "prompt_tokens": trace.prompt,
        "steps": trace.steps,
        "captured": trace.captured,
        "generated": "".join(trace.pieces[trace.prompt + trace.forced :]),
        "lost": [{**asdict(one), "text": trace.page_text(one.page)} for one in trace.losses(LISTED)],
    }


def show(trace: Trace) -> None:
    """Print what was kept, what was written, and what was lost."""
    console = output(PIPE_WIDTH)
    console.print(Text(setting_words(trace), style="dim"))
    console.print(Text("Generated: " + repr("".join(trace.pieces[trace.prompt + trace.forced :]))))
    console.print(Text(lost_words(trace), style="bold"))
