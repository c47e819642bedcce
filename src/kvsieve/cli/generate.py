"""``kvsieve generate``: a model continues a prompt with a sparse-attention flow, beside dense attention if asked."""

from __future__ import annotations

import json
from typing import Any

import typer

from kvsieve.backends import backend_names
from kvsieve.cli.generation import Setup, find_parting, prepare, run_dense, run_sparse
from kvsieve.cli.options import (
    check_device,
    choose_budget,
    choose_retention,
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


def generate_command(
    flow: str = typer.Option(..., help="registered name, or file.py:ClassName"),
    model: str = typer.Option("smollm2", help="smollm2, a local directory, or a hub path"),
    flow_arg: list[str] = typer.Option([], metavar="KEY=VALUE", help="argument of the flow; may be repeated"),
    budget_tokens: int | None = typer.Option(None, help="tokens attended per step  [default: 512]"),
    topk: int | None = typer.Option(None, help="pages chosen by score, instead of --budget-tokens"),
    sink: int | None = typer.Option(None, help="first pages, always attended; with --retention evict: tokens"),
    recent: int | None = typer.Option(None, help="last pages, always attended; with --retention evict: tokens"),
    ratio: float | None = typer.Option(None, help="share of all pages to keep, 0 to 1"),
    retention: str = typer.Option("keep", help="keep all K and V, or evict tokens by attention mass"),
    capacity: int | None = typer.Option(None, help="tokens that stay with --retention evict"),
    page_size: int | None = typer.Option(None, help="tokens per page  [default: the flow's own, or 16]"),
    skip_layers: str = typer.Option("", metavar="LAYERS", help="layers that stay dense, such as 0,1,4-6"),
    prompt: str | None = typer.Option(None, help="text to continue, taken as it is (no chat template)"),
    prompt_file: str | None = typer.Option(None, help="file with the text, or - for stdin; final newlines are cut"),
    max_new_tokens: int = typer.Option(64, min=1, help="tokens to generate, greedily"),
    dtype: str = typer.Option("fp32", help="fp32, bf16 or fp16"),
    device: str = typer.Option("cpu", help="cpu, cuda, cuda:1, ..."),
    backend: str = typer.Option("eager", help="backend that runs the flow: eager or compiled"),
    compare: bool = typer.Option(False, help="run dense attention beside it and show where the texts part"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object and nothing else on stdout"),
) -> None:
    """Continue a prompt with a sparse-attention flow; greedy. Prints the text, tokens/s and bytes read per step."""
    built = load_flow(flow, **parse_flow_arguments(flow_arg))
    size = choose_page_size(built, page_size)
    in_pages = {"budget-tokens": budget_tokens, "topk": topk, "ratio": ratio}
    kept, budget = choose_retention(built, retention, capacity, sink, recent, in_pages), None
    if isinstance(kept, Keep):
        budget = choose_budget(built, size, budget_tokens, topk=topk, sink=sink, recent=recent, ratio=ratio)
        check_flow(built, size, budget)
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
        print(json.dumps(result.as_json(), ensure_ascii=False))
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
