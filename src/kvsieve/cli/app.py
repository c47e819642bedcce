"""Entry point: commands, and one place where errors become one line and exit code 2."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import typer
from typer.main import get_command

from kvsieve.cli import bench, doctor, explain, flows, generate, new, serve, show, verify
from kvsieve.cli import eval as evaluation
from kvsieve.cli.study import study_app
from kvsieve.errors import KvsieveError
from kvsieve.version import __version__

USAGE, INTERRUPTED = 2, 130

app = typer.Typer(
    name="kvsieve",
    help="Decode-time sparse attention, written as a few lines of PyTorch for one request and one KV head.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("bench")(bench.bench_command)
app.command("doctor")(doctor.doctor_command)
app.command("eval")(evaluation.eval_command)
app.command("explain")(explain.explain_command)
app.command("flows")(flows.flows_command)
app.command("generate")(generate.generate_command)
app.command("new")(new.new_command)
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve.serve_command)
app.command("show")(show.show_command)
app.command("verify")(verify.verify_command)
app.add_typer(study_app, name="study")

# Typer carries its own copy of click in later releases: this finds the base of its usage errors in any of them.
UsageProblem: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def show_version(wanted: bool) -> None:
    """Print versions and stop."""
    if wanted:
        print(f"kvsieve {__version__} (torch {torch.__version__}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def _commands(
    version: bool = typer.Option(False, "--version", callback=show_version, is_eager=True, help="print the version"),
) -> None:
    """Keeps the command names even if only one command is left."""


def run(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    try:
        result = get_command(app).main(list(arguments) or ["--help"], prog_name="kvsieve", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        print(f"error: {one_line(error, arguments)}", file=sys.stderr)
        if os.environ.get("KVSIEVE_TRACEBACK"):
            raise
        return USAGE
    if result == INTERRUPTED:  # Typer itself turns an interrupt into this result
        print("interrupted", file=sys.stderr)
    return result if isinstance(result, int) else 0


def one_line(error: Exception, arguments: Sequence[str] = ()) -> str:
    """An exception as one line for the user; what is not a user's error says its type and how to see more."""
    if isinstance(error, UsageProblem):
        context: Any = getattr(error, "ctx", None)
        command = context.command_path if context else "kvsieve"
        message = f"{error.format_message()}{_received(error, arguments)} ({command} --help lists what there is)"
    elif isinstance(error, KvsieveError):
        message = str(error)
    else:
        message = f"{type(error).__name__}: {error} (KVSIEVE_TRACEBACK=1 shows where)"
    return " ".join(message.split())


def _received(error: Any, arguments: Sequence[str]) -> str:
    """What was given for the option that an error of Typer's is about; nothing where it was given more than once."""
    options = [name for name in getattr(getattr(error, "param", None), "opts", []) if name.startswith("-")]
    given = [value for name, value in pairwise(arguments) if name in options]
    given += [word.partition("=")[2] for word in arguments if word.partition("=")[0] in options and "=" in word]
    return f", received {given[0]!r}" if len(given) == 1 else ""
