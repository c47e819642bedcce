"""``kvsieve study``: what decay, state dtype and weights of the H2O flows do, in numbers and curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import typer
from rich import box
from rich.table import Table

from kvsieve.budget import Budget
from kvsieve.cli import declared
from kvsieve.cli.files import check_plot
from kvsieve.cli.json_output import print_json
from kvsieve.cli.options import read_text
from kvsieve.cli.terminal import output, progress_bar
from kvsieve.dtypes import STATE_DTYPES
from kvsieve.models import quiet_transformers
from kvsieve.outputs import new_file
from kvsieve.verify.accumulator_report import ERROR, PUBLISHED_FLOW
from kvsieve.verify.plots import plot_decay, plot_weights
from kvsieve.verify.published import SEEDS, PublishedReport, run_published
from kvsieve.verify.recorded import Recorded, record_model
from kvsieve.verify.study import NOISES, STEADY, DecayStudy, study_decay
from kvsieve.verify.study_weights import RATIOS, WeightsStudy, planted_segments, study_weights

PIPE_WIDTH = 150

study_app = typer.Typer(help="Studies of the H2O flows: decay, weights, published figures.")
PLOT = typer.Option(None, metavar="FILE", help="save the curves as a PNG; needs matplotlib")
SEED = typer.Option(0, help="seed of the planted data")


@study_app.command("decay")
def decay_command(
    steps: int = typer.Option(20_000, min=100, help="steps of every run"),
    topk: int = typer.Option(32, min=1, max=115, help="of 116 tokens"),
    seed: int = SEED,
    plot: Path | None = PLOT,
    as_json: bool = declared.AS_JSON,
) -> None:
    """Sweep decay = 1 - 2**-k and 1 for state in bfloat16, float16 and float32 over long runs."""
    check_plot(plot)
    with progress_bar("decay") as progress:
        study = study_decay(steps, seed, topk, progress=progress)
    if plot is not None:
        with new_file(plot, "--plot") as name:
            plot_decay(study, name)
    print_json("study decay", study.as_json()) if as_json else show_decay(study)


@study_app.command("weights")
def weights_command(
    model: str = typer.Option("smollm2", help="whose keys: smollm2, a local directory, a hub path, or none"),
    text: str | None = typer.Option(None, help="file with the text that the model reads" + declared.OWN_TEXT),
    tokens: int = typer.Option(2304, min=64, help="tokens of the text"),
    queries: int = typer.Option(16, min=1, help="last tokens whose queries rank the pages"),
    topk: int = typer.Option(8, min=1, help="pages chosen"),
    page_size: int = typer.Option(16, min=1, help="tokens per page"),
    seed: int = SEED,
    plot: Path | None = PLOT,
    as_json: bool = declared.AS_JSON,
) -> None:
    """Scale of the mean and peak terms, and attention captured over w_peak / w_avg, on planted and real keys."""
    check_plot(plot)
    keys: dict[str, Sequence[Recorded]] = {"planted": planted_segments(seed)}
    if model != "none":
        quiet_transformers()
        keys[model] = record_model(model, read_text(text), tokens=tokens, queries=queries)
    with progress_bar("weights") as progress:
        study = study_weights(keys, Budget(topk), page_size, progress=progress)
    if plot is not None:
        with new_file(plot, "--plot") as name:
            plot_weights(study, name)
    print_json("study weights", study.as_json()) if as_json else show_weights(study)


@study_app.command("published")
def published_command(
    seeds: int = typer.Option(SEEDS, min=1, help="consecutive seeds"),
    seed: int = SEED,
    as_json: bool = declared.AS_JSON,
) -> int:
    """Run the published accumulator figures again; exit code 1 if one leaves its band."""
    with progress_bar("published") as progress:
        report = run_published(seed, seeds, progress=progress)
    print_json("study published", report.as_json()) if as_json else show_published(report)
    return 0 if report.passed else 1


def show_decay(study: DecayStudy) -> None:
    """A table per kind of attention, then the answer."""
    print(f"{study.steps} steps, top {study.topk} of {study.tokens} tokens, seed {study.seed}")
    titles = ("k", "state", "decay held", "rel. error", "mass lost", "top-k", "vs sum", "exact vs sum", "frozen from")
    for kind in NOISES:
        rows = []
        for row in (row for dtype in STATE_DTYPES for row in study.of(dtype, kind)):
            power = "decay 1" if row.power is None else str(row.power)
            shares = (f"{row.lost:.1%}", f"{row.agree:.0%}", f"{row.agree_sum:.0%}", f"{row.recall:.0%}")
            frozen = "-" if row.frozen is None else str(row.frozen)
            rows.append([power, row.dtype, f"{row.stored_decay:.8g}", f"{row.error:.1e}", *shares, frozen])
        show_table(f"{kind} attention", titles, rows)
    for name in STATE_DTYPES:
        found = {kind: study.longest(name, kind) for kind in NOISES}
        names = {kind: "none" if power is None else f"1 - 2**-{power}" for kind, power in found.items()}
        words = ", ".join(f"{longest} ({kind} attention)" for kind, longest in names.items())
        print(f"{name}: longest decay with relative error below {ERROR}: {words}")
    print(bound_words(study))


def bound_words(study: DecayStudy) -> str:
    """Why, in two sentences."""
    lost = {row.power: row.lost for row in study.of("bfloat16", STEADY)}
    seen = f"; measured {lost[6]:.0%} at k = 6 and {lost[7]:.0%} at k = 7" if {6, 7} <= lost.keys() else ""
    return (
        "A store moves a value x only if increment - x * 2**-k exceeds half an ulp, and in bfloat16 an ulp is\n"
        "x * 2**-8 to x * 2**-7. Under constant attention growth therefore stops short of its limit by 11-20 %\n"
        f"at k = 6, by 20-33 % at k = 7 and by 33-50 % at k = 8{seen}.\n"
        "From k = 9 on the decay itself rounds to 1. With p significand bits, k = 6 becomes k = p - 2: 9 for float16,\n"
        "22 for float32."
    )


def show_weights(study: WeightsStudy) -> None:
    """Scales, then captured attention by ratio."""
    segments = ", ".join(f"{count} segments of {name}" for name, count in study.segments.items())
    print(f"pages of {study.page_size}: {study.sink} sink + {study.topk} chosen + {study.recent} recent; {segments}")
    scales = [
        [row.keys, row.flow, *(f"{x:.3g}" for x in (row.mean_scale, row.peak_scale, row.peak_scale / row.mean_scale)),
         f"{row.mean_level:.3g}", f"{row.peak_level:.3g}"]
        for row in study.rows
    ]  # fmt: skip
    show_table("terms", ("keys", "flow", "sd of mean", "sd of peak", "peak/mean", "avg of mean", "avg of peak"), scales)
    names = [f"{ratio:.3g}" if math.isfinite(ratio) else "peak" for ratio in RATIOS]
    shares = [[row.keys, row.flow, *(f"{x:.1%}" for x in row.captured), f"{row.exact:.1%}"] for row in study.rows]
    show_table("window attention captured, by w_peak / w_avg", ("keys", "flow", *names, "exact"), shares)


def show_published(report: PublishedReport) -> None:
    """Ours, the band, theirs."""
    rows = [
        [one.setting, one.name, f"{one.least:.4g} - {one.most:.4g}", f"{one.low:g} - {one.high:g}", one.published,
         "yes" if one.within else "NO"]
        for one in report.figures
    ]  # fmt: skip
    show_table(
        f"{PUBLISHED_FLOW}, {report.seeds} seeds",
        ("setting", "figure", "here", "band", "published (one seed; eight)", "within"),
        rows,
    )
    print("PASS" if report.passed else "FAIL: a figure leaves its band")


def show_table(title: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print one table for reading."""
    table = Table(*titles, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    output(PIPE_WIDTH).print(table)
