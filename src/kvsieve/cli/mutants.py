"""``kvsieve verify --mutants``: shows that the checks find deliberate faults."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress

from kvsieve.cli.json_output import print_json
from kvsieve.verify.mutants import MUTANTS
from kvsieve.verify.mutants.hunt import hunt_all
from kvsieve.verify.mutants.report import as_json, passed, text


def run_mutants(jobs: int, json_wanted: bool) -> int:
    """Hunt every mutant and print what killed it. Exit code 0: at least 95 % killed, survivors explained; else 1."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("hunting mutants", total=len(MUTANTS))
        hunts = hunt_all(tuple(MUTANTS), jobs, lambda: progress.advance(task))
    print_json("verify", {"passed": passed(hunts), **as_json(hunts)}) if json_wanted else print(text(hunts))
    return 0 if passed(hunts) else 1
