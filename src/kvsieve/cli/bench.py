"""``kvsieve bench``: how fast a decode step is, phase by phase, beside dense attention, in one run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer

from kvsieve.backends import backend_names
from kvsieve.bench import Measurement, Setting, run_bench, run_seeding
from kvsieve.bench.plot import plot_measurement
from kvsieve.bench.setting import parse_heads
from kvsieve.budget_text import parse_budget
from kvsieve.cli import declared
from kvsieve.cli.bench_report import print_measurement
from kvsieve.cli.declared import BUDGET_WORDS, PAGES_WORDS
from kvsieve.cli.files import check_output, check_plot
from kvsieve.cli.json_output import json_text, print_json
from kvsieve.cli.options import check_device, load_flows, note_budget, parse_dtype
from kvsieve.cli.seeding_report import print_seeding
from kvsieve.cli.terminal import progress_bar
from kvsieve.errors import ConfigError, UnknownName
from kvsieve.outputs import new_file, write_text

DEFAULT_FLOWS = ("block_sparse_attention", "gqa_quest_sparse_attention")
DEFAULT_CONTEXTS = (4096, 16384)
FLOWS_HELP = f"{declared.FLOW_WORDS}; may be repeated  [default: {', '.join(DEFAULT_FLOWS)}]"
LAYERS_HELP = (
    "layers that share a step's plan; each finds its memory cold  [default: 4; on a GPU enough to exceed its cache]"
)
SEEDING_CONTEXTS = (2048, 4096, 8192)
SEEDING_HELP = "measure instead what seeding attention mass costs beside dense prefill, at 2048, 4096 and 8192 tokens"
TUNE_HELP = "on a GPU: first try other tilings of the generated kernels, and keep the best for these sizes in the cache"
JSON_HELP = "write one JSON object here (docs/json.md); - is stdout, and nothing else there"
CONTEXTS_HELP = "tokens per request; may be repeated  [default: 4096, 16384]"


def bench_command(
    flow: list[str] = typer.Option([], help=FLOWS_HELP),
    flow_arg: list[str] = declared.FLOW_ARGS,
    context: list[int] = typer.Option([], min=3, help=CONTEXTS_HELP),
    backend: str | None = typer.Option(None, help="backend to measure  [default: triton on a GPU, else compiled]"),
    device: str = declared.DEVICE,
    batch: int = typer.Option(1, min=1, help="requests in the batch"),
    heads: str = typer.Option("32/8", help="query heads/KV heads"),
    head_dim: int = typer.Option(128, min=1, help="width of queries, keys and values"),
    page_size: int = typer.Option(16, min=1, help="tokens per page, for flows that take any"),
    budget: str = typer.Option("64+1+2", help=BUDGET_WORDS + PAGES_WORDS + "; the same tokens for any page"),
    dtype: str = typer.Option("bf16", help="fp32, bf16 or fp16: of q, K and V"),
    threads: int | None = typer.Option(None, min=1, help="CPU threads  [default: torch's]"),
    layers: int | None = typer.Option(None, min=1, help=LAYERS_HELP),
    repeats: int = typer.Option(25, min=3, help="measurements of each phase"),
    json_file: str | None = typer.Option(None, "--json", metavar="FILE", help=JSON_HELP),
    plot: str | None = typer.Option(None, metavar="FILE.png", help="draw time against context here"),
    tune: bool = typer.Option(False, "--tune", help=TUNE_HELP),
    seeding: bool = typer.Option(False, "--seeding", help=SEEDING_HELP),
) -> None:
    """Verify a decode step against float64, then time its phases, the whole of it, and dense attention beside it.

    Bandwidths count the bytes that a phase has to move; no time is shown for a step that is wrong.
    """
    check_device(device)
    backend = backend or ("triton" if device.startswith("cuda") else "compiled")
    if backend not in backend_names():
        raise UnknownName("backend", backend, backend_names())
    query_heads, kv_heads = parse_heads(heads)
    kind, wish = parse_dtype(dtype), parse_budget(budget)
    pages = wish.budget(page_size)
    built = load_flows(flow or DEFAULT_FLOWS, flow_arg)
    check_output(None if json_file in (None, "-") else Path(json_file), "--json")
    check_plot(None if plot is None else Path(plot))
    if threads is not None:
        torch.set_num_threads(threads)
    setting = Setting(
        device, backend, batch, query_heads, kv_heads, head_dim, page_size, pages, kind, layers or 0, repeats, tune
    )
    if tune and not setting.on_gpu:
        raise ConfigError(f"--tune: expected a GPU (--device cuda), received {device}")
    if seeding:
        if flow or plot:
            raise ConfigError("--seeding measures no flow and draws no plot: expected neither --flow nor --plot")
        with progress_bar("measuring") as progress:
            seeded = run_seeding(sorted(set(context or SEEDING_CONTEXTS)), setting, progress)
        write_json(seeded.as_json(), json_file, lambda: print_seeding(seeded))
        return
    for one in built:
        note_budget(one, setting.budget_of(one), asked=wish.chooses_none)
    with progress_bar("measuring") as progress:
        measurement = run_bench(built, sorted(set(context or DEFAULT_CONTEXTS)), setting, progress)
    write_results(measurement, json_file, plot)


def write_results(measurement: Measurement, json_file: str | None, plot: str | None) -> None:
    """The table, unless JSON goes to stdout; the JSON and PNG files that were asked for."""
    write_json(measurement.as_json(), json_file, lambda: print_measurement(measurement))
    if plot is not None:
        with new_file(Path(plot), "--plot") as name:
            plot_measurement(measurement, name)


def write_json(data: dict[str, Any], json_file: str | None, show: Callable[[], None]) -> None:
    """JSON to stdout, or what ``show`` prints and the JSON file that was asked for."""
    if json_file == "-":
        print_json("bench", data)
        return
    show()
    if json_file is not None:
        write_text(Path(json_file), json_text("bench", data, indent=2) + "\n", "--json")
