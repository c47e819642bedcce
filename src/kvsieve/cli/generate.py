"""``kvsieve generate``: a model continues a prompt with a sparse-attention flow, beside dense attention if asked."""

from __future__ import annotations

from typing import Any

import typer

from kvsieve.backends import backend_names
from kvsieve.cli import declared
from kvsieve.cli.generation import Setup, find_parting, prepare, run_dense, run_sparse
from kvsieve.cli.json_output import print_json
from kvsieve.cli.options import (
    check_device,
    choose_budget,
    choose_retention,
    note_budget,
    parse_dtype,
    parse_flow_arguments,
    parse_layers,
    read_file,
)
from kvsieve.cli.report import Comparison, print_report
from kvsieve.errors import ConfigError, UnknownName
from kvsieve.flow import check_evicting, check_flow, choose_page_size, load_flow
from kvsieve.models import load_model, quiet_transformers
from kvsieve.retention import Evict, Keep

CAPACITY_HELP = "tokens that stay with --retention evict; --sink and --recent are tokens then"


def generate_command(
    flow: str = declared.FLOW,
    model: str = declared.MODEL,
    flow_arg: list[str] = declared.FLOW_ARGS,
    budget_tokens: int | None = declared.BUDGET_TOKENS,
    topk: int | None = declared.TOPK,
    sink: int | None = declared.SINK,
    recent: int | None = declared.RECENT,
    ratio: float | None = declared.RATIO,
    retention: str = typer.Option("keep", help="keep all K and V, or evict tokens by attention mass"),
    capacity: int | None = typer.Option(None, help=CAPACITY_HELP),
    page_size: int | None = declared.PAGE_SIZE,
    skip_layers: str = declared.SKIP_LAYERS,
    prompt: str | None = typer.Option(None, help="text to continue, taken as it is (no chat template)"),
    prompt_file: str | None = typer.Option(None, help="file with the text, or - for stdin; final newlines are cut"),
    max_new_tokens: int = typer.Option(64, min=1, help="tokens to generate, greedily"),
    dtype: str = declared.DTYPE,
    device: str = declared.DEVICE,
    backend: str = typer.Option("eager", help="backend that runs the flow: eager or compiled"),
    compare: bool = typer.Option(False, help="run dense attention beside it and show where the texts part"),
    as_json: bool = declared.AS_JSON,
) -> None:
    """Continue a prompt with a sparse-attention flow; greedy. Prints the text, tokens/s and bytes read per step."""
    built = load_flow(flow, **parse_flow_arguments(flow_arg))
    size = choose_page_size(built, page_size)
    in_pages = {"budget-tokens": budget_tokens, "topk": topk, "ratio": ratio}
    kept, budget = choose_retention(built, retention, capacity, sink, recent, in_pages), None
    if isinstance(kept, Keep):
        budget = choose_budget(built, size, budget_tokens, topk=topk, sink=sink, recent=recent, ratio=ratio)
        check_flow(built, size, budget)
        note_budget(built, budget, asked=topk == 0)
    text, layers, kind = read_prompt(prompt, prompt_file), parse_layers(skip_layers), parse_dtype(dtype)
    if isinstance(kept, Evict):
        check_evicting(built, size, kept, layers)
    check_device(device)
    if backend not in backend_names():
        raise UnknownName("backend", backend, backend_names())
    quiet_transformers()
    loaded, tokenizer = load_model(model, dtype=kind, device=device)
    setup = prepare(loaded, tokenizer, text, max_new_tokens)
    sparse = run_sparse(setup, built, budget, size, layers, backend, kept)
    dense = run_dense(setup) if compare else None
    parting = find_parting(tokenizer, sparse.tokens, dense.tokens) if dense else None
    words = {**setup_words(setup, model, dtype, device), "backend": backend}
    result = Comparison(words, flow, repr(built), size, budget or kept, sparse, dense, parting)
    if as_json:
        print_json("generate", result.as_json())
    else:
        print_report(result)


def setup_words(setup: Setup, model: str, dtype: str, device: str) -> dict[str, Any]:
    """What was run, for the report."""
    return {"model": model, "dtype": dtype, "device": device, "prompt_tokens": setup.prompt_tokens}


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The text to continue.

    Raises:
        ConfigError: none or both are given, the file cannot be read, or the text is empty.
    """
    if (prompt is None) == (prompt_file is None):
        raise ConfigError(f"expected --prompt or --prompt-file, received {'neither' if prompt is None else 'both'}")
    text = read_file(prompt_file, "--prompt-file").rstrip("\r\n") if prompt_file is not None else prompt
    if not text:
        raise ConfigError("the prompt is empty: expected some text to continue")
    return text
