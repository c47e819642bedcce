"""Options that several commands share, declared once: the same name, values and words everywhere."""

from __future__ import annotations

from typing import Any

import typer

FLOW_WORDS = "registered name, or file.py:ClassName"
BUDGET_WORDS = "tokens attended per step such as 256, sink and recent ones included"
SHARE_WORDS = ", or a share of the context such as 12.5% or 0.125"
PAGES_WORDS = ", or pages chosen+sink+recent such as 64+1+2"

OWN_TEXT = "  [default: kvsieve's examples/jargon.txt]"

FLOW: Any = typer.Option(..., help=FLOW_WORDS)
FLOW_ARGUMENT: Any = typer.Argument(..., metavar="FLOW", help=FLOW_WORDS)
FLOW_ARGS: Any = typer.Option([], "--flow-arg", metavar="KEY=VALUE", help="argument of the flow; may be repeated")
MODEL: Any = typer.Option("smollm2", help="smollm2, a local directory, or a hub path")

BUDGET_TOKENS: Any = typer.Option(None, help=f"{BUDGET_WORDS}; without pages generate takes 512")
TOPK: Any = typer.Option(None, help="pages chosen by score: a budget in pages, instead of --budget-tokens")
SINK: Any = typer.Option(None, help="first pages, always attended")
RECENT: Any = typer.Option(None, help="last pages, always attended")
RATIO: Any = typer.Option(None, help="share of all pages to keep, 0 to 1")
SKIP_LAYERS: Any = typer.Option("", metavar="LAYERS", help="layers that stay dense, such as 0,1,4-6")

PAGE_SIZE: Any = typer.Option(None, min=1, help="tokens per page  [default: the flow's own, or 16]")
PAGE_SIZES: Any = typer.Option(None, min=1, help="tokens per page, for flows that take any  [default: 16]")
DTYPE: Any = typer.Option("fp32", help="fp32, bf16 or fp16")
DEVICE: Any = typer.Option("cpu", help="cpu, cuda, cuda:1, ...")

AS_JSON: Any = typer.Option(False, "--json", help="print one JSON object and nothing else on stdout (docs/json.md)")
