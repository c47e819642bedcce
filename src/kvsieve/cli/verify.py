"""``kvsieve verify``: proves flows on a backend, fuzzes the life cycle, runs the mutants."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from kvsieve.backends import backend_names, get_backend
from kvsieve.cli import declared
from kvsieve.cli.accumulator import accumulator_command, accumulator_options
from kvsieve.cli.json_output import print_json
from kvsieve.cli.mutants import run_mutants
from kvsieve.cli.options import check_device, parse_flow_arguments
from kvsieve.dtypes import DTYPES
from kvsieve.errors import ConfigError, UnknownName
from kvsieve.flow import list_flows, load_flow
from kvsieve.verify.data import BulkData, LayerShape
from kvsieve.verify.programs import FuzzResult
from kvsieve.verify.run import Order, fuzz_in_parallel, verify_all
from kvsieve.verify.suite import CHECKS

WRONG = 1
EVENTS = 50
PROBE = (LayerShape(1, 2, 8, 8),)


def verify_command(
    flow: str | None = typer.Argument(None, metavar="FLOW", help=declared.FLOW_WORDS),
    everything: bool = typer.Option(False, "--all", help="every registered flow, over the whole grid of geometries"),
    flow_arg: list[str] = declared.FLOW_ARGS,
    backend: str = typer.Option("eager", help="backend to check"),
    device: str = declared.DEVICE,
    dtype: str = typer.Option("fp32", help="fp32, bf16 or fp16: of q, K and V"),
    seed: int = typer.Option(0, help="seed of all data and programmes"),
    grid: bool = typer.Option(False, "--grid", help="add the whole grid of geometries for one flow"),
    programs: int = typer.Option(0, "--fuzz", min=0, metavar="N", help="run N random life-cycle programmes instead"),
    events: int | None = typer.Option(None, min=1, help="events of a programme of --fuzz  [default: 50]"),
    mutants: bool = typer.Option(False, "--mutants", help="show that the checks find deliberate faults instead"),
    jobs: int = typer.Option(0, min=0, show_default=False, help="worker processes  [default: one a core]"),
    seq_len: int | None = typer.Option(None, help="accumulator harness: tokens of the request"),
    steps: int | None = typer.Option(None, help="accumulator harness: decode steps"),
    group_size: int | None = typer.Option(None, help="accumulator harness: query heads per KV head"),
    head_dim: int | None = typer.Option(None, help="accumulator harness: width of queries and keys"),
    topk: int | None = typer.Option(None, help="accumulator harness: pages chosen by score"),
    sink: int | None = typer.Option(None, help="accumulator harness: first pages"),
    recent: int | None = typer.Option(None, help="accumulator harness: last pages"),
    decay: float | None = typer.Option(None, help="accumulator harness: decay of the flow's state"),
    state_dtype: str | None = typer.Option(None, help="accumulator harness: float32, bfloat16 or float16"),
    as_json: bool = declared.AS_JSON,
) -> int:
    """Check flows against the float64 reference. Exit code 0: correct; 1: wrong; 2: the command was.

    With any option of the accumulator harness, the flow's decayed state is driven beside a float64 accumulator instead.
    """
    if dtype not in DTYPES:
        raise UnknownName("dtype", dtype, DTYPES)
    if backend not in backend_names():
        raise UnknownName("backend", backend, backend_names())
    harness = {
        "seq_len": seq_len,
        "steps": steps,
        "group_size": group_size,
        "head_dim": head_dim,
        "topk": topk,
        "sink": sink,
        "recent": recent,
        "decay": decay,
        "state_dtype": state_dtype,
    }
    refuse_idle(programs, events, grid, mutants, [name for name, value in harness.items() if value is not None])
    check_device(device)
    get_backend(backend).check_device(torch.device(device))
    if programs and (flow_arg or everything):
        raise ConfigError("--fuzz takes registered flows with their default arguments: drop --flow-arg and --all")
    if mutants:
        if flow is not None or everything or programs:
            raise ConfigError("--mutants runs its own flows: give no flow, --all or --fuzz with it")
        return run_mutants(jobs or os.cpu_count() or 1, as_json)
    if programs:
        where = {"backend": backend, "dtype": dtype, "device": device}
        return run_fuzz(programs, events or EVENTS, seed, flow, where, jobs or os.cpu_count() or 1, as_json)
    if (flow is None) != everything:
        raise ConfigError(f"expected a flow or --all, received {'neither' if flow is None else 'both'}")
    arguments = parse_flow_arguments(flow_arg)
    if any(value is not None for value in harness.values()):
        return run_harness(flow, arguments, {**harness, "seed": seed, "backend": backend, "device": device}, as_json)
    names = list(list_flows()) if flow is None else [flow]
    orders = [Order(name, arguments, backend, dtype, device, seed) for name in names]
    orders[0].subject().twin(PROBE, BulkData(seed))  # a mistake in the flow is answered here, not by a worker
    return run_verify(orders, everything or grid, jobs or os.cpu_count() or 1, as_json)


def refuse_idle(programs: int, events: int | None, grid: bool, mutants: bool, harness: Sequence[str]) -> None:
    """Refuse options that would have no effect beside others.

    Raises:
        ConfigError: names them.
    """
    if events is not None and not programs:
        raise ConfigError("--events: expected --fuzz N beside it, received none; name a number of programmes")
    instead = "--fuzz" if programs else "--mutants" if mutants else "the accumulator harness" if harness else ""
    if instead and grid:
        raise ConfigError(f"--grid: expected a flow's checks, received {instead}, which has no grid; drop one")
    if harness and (programs or mutants):
        option = f"--{harness[0].replace('_', '-')}"
        raise ConfigError(f"{option} is of the accumulator harness: received {instead} too; drop one")


def run_verify(orders: Sequence[Order], grid: bool, jobs: int, as_json: bool) -> int:
    """Run the suite and print a verdict per flow."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("checking", total=len(orders) * (len(CHECKS) + grid))
        reports = list(verify_all(orders, grid, jobs, lambda: progress.advance(task)))
    passed = all(report.passed for report in reports)
    if as_json:
        print_json("verify", {"passed": passed, "flows": [report.as_json() for report in reports]})
    else:
        print("\n".join(report.text() for report in reports))
        if len(reports) > 1:
            print(f"{sum(report.passed for report in reports)} of {len(reports)} flows are correct")
    return 0 if passed else WRONG


def run_harness(flow: str | None, arguments: dict[str, Any], options: dict[str, Any], as_json: bool) -> int:
    """Drive a flow's decayed state beside a float64 accumulator."""
    if flow is None:
        raise ConfigError("the accumulator harness takes one flow, received --all; name a flow that keeps state")
    return accumulator_command(load_flow(flow, **arguments), accumulator_options(**options), as_json=as_json)


def run_fuzz(
    programs: int, events: int, seed: int, flow: str | None, where: dict[str, str], jobs: int, as_json: bool
) -> int:
    """Run random programmes; a fault prints a minimal one as a snippet that replays it."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("fuzzing", total=programs)
        result = fuzz_in_parallel(
            programs, events, seed, flow, jobs=jobs, progress=lambda count: progress.advance(task, count), **where
        )
    print_json("verify", fuzz_json(result)) if as_json else print(fuzz_text(result))
    return WRONG if result.failing else 0


def fuzz_text(result: FuzzResult) -> str:
    """The result of a fuzzing run in words."""
    compared = sum(result.numbers.checked.values())
    seen = f"{result.programs:,} programmes, {result.events:,} events, {compared:,} comparisons"
    if result.failing is None:
        return f"no fault in {seen}"
    return f"FAULT after {seen}: {result.error}\nreplay it with:\n\n{result.failing.snippet()}"


def fuzz_json(result: FuzzResult) -> dict[str, object]:
    """The result of a fuzzing run for a program."""
    return {
        "passed": result.failing is None,
        "programs": result.programs,
        "events": result.events,
        "comparisons": result.numbers.checked,
        "error": None if result.error is None else str(result.error),
        "snippet": None if result.failing is None else result.failing.snippet(),
    }
