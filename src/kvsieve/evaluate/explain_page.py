"""A recorded generation as one HTML page: pages kept and exact attention over steps, tokens under the cursor."""

from __future__ import annotations

import base64
import json
from html import escape
from pathlib import Path

import torch

from kvsieve.evaluate.page import asset, page, table
from kvsieve.evaluate.trace import Loss, Trace
from kvsieve.outputs import write_text

DECADES = 4
"""Mass is drawn on a logarithmic scale from 10**-4 to 1."""
LISTED = 12


def write_explanation(trace: Trace, path: Path, command: str = "") -> None:
    """Write the page.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, explanation(trace, command), "--report")


def explanation(trace: Trace, command: str = "") -> str:
    """The page: two maps of steps and pages, a choice of layer and head, and the losses that mattered most."""
    losses = trace.losses(LISTED)
    generated = "".join(trace.pieces[trace.prompt + trace.forced :])
    parts = [
        "<h1>kvsieve explain</h1>",
        f'<p class="soft">{escape(setting_words(trace))}</p>',
        f"<pre>{escape(command)}</pre>" if command else "",
        f"<p>{escape(lost_words(trace))}</p>",
        f"<p>Generated: <b>{escape(generated)}</b></p>",
        _controls(trace),
        '<div class="panels"><figure><figcaption>Pages kept: steps downwards, pages from left to right</figcaption>'
        '<canvas id="keptMap" role="img" aria-label="pages kept over steps"></canvas></figure>'
        '<figure><figcaption>Exact attention per page, 0.01% to 100%, logarithmic:<span class="key kept"></span>kept'
        '<span class="key lost"></span>not kept</figcaption>'
        '<canvas id="massMap" role="img" aria-label="exact attention mass over steps"></canvas></figure></div>',
        '<div id="say" aria-live="polite">Point at a page, or touch it.</div>',
        "<h2>Pages lost that mattered most</h2>",
        table(["page", "tokens", "layer", "KV head", "step", "exact mass"], [_loss(trace, one) for one in losses]),
        f'<script type="application/json" id="data">{_data(trace, losses)}</script>',
    ]
    return page("kvsieve explain", "\n".join(parts), style=asset("explain.css"), script=asset("explain.js"))


def setting_words(trace: Trace) -> str:
    """Flow, budget and what was generated."""
    budget = trace.budget
    return (
        f"{trace.flow}; {budget.sink} sink + {budget.topk} chosen + {budget.recent} recent pages of {trace.page_size}; "
        f"prompt of {trace.prompt} tokens, {trace.steps} decode steps; {trace.captured:.1%} of the exact attention kept"
    )


def lost_words(trace: Trace) -> str:
    """One sentence: the page that was lost and mattered most."""
    worst = next(iter(trace.losses(1)), None)
    if worst is None:
        return "No page was lost: every step attended all of them."
    first = worst.page * trace.page_size
    return (
        f"Lost and mattered most: page {worst.page} (tokens {first}-{first + trace.page_size - 1}, "
        f"{trace.page_text(worst.page)!r}) held {worst.mass:.1%} of the exact attention of layer {worst.layer}, KV "
        f"head {worst.head}, at step {worst.step} (reading {trace.pieces[trace.prompt + worst.step]!r}), and was not "
        "kept"
    )


def _loss(trace: Trace, loss: Loss) -> list[str]:
    text = " ".join(trace.page_text(loss.page).split())
    return [f"{loss.page}: {text}", str(loss.page * trace.page_size), str(loss.layer), str(loss.head), str(loss.step),
            f"{loss.mass:.1%}"]  # fmt: skip


def _controls(trace: Trace) -> str:
    layers = "".join(f'<option value="{i}">{layer}</option>' for i, layer in enumerate(trace.layers))
    heads = "".join(f'<option value="{head}">{head}</option>' for head in range(trace.mass.shape[1]))
    every = '<option value="all">all (mean)</option>'
    return (
        f'<div class="controls"><label>Layer <select id="layer">{every}{layers}</select></label>'
        f'<label>KV head <select id="head">{every}{heads}</select></label></div>'
    )


def _data(trace: Trace, losses: list[Loss]) -> str:
    """What the script draws: a byte per cell, seven bits of logarithmic mass and one for kept."""
    level = (1 + trace.mass.clamp(min=1e-9).log10() / DECADES).clamp(0, 1)
    cells = (level * 127).round().to(torch.uint8) * 2 + trace.kept.to(torch.uint8)
    worst = losses[0] if losses else None
    data = {
        "layers": trace.layers,
        "heads": trace.mass.shape[1],
        "steps": trace.steps,
        "pages": trace.mass.shape[3],
        "page": trace.page_size,
        "prompt": trace.prompt,
        "decades": DECADES,
        "pieces": trace.pieces,
        "worst": [trace.layers.index(worst.layer), worst.head, worst.step, worst.page] if worst else None,
        "cells": base64.b64encode(cells.contiguous().numpy().tobytes()).decode(),
    }
    return json.dumps(data).replace("<", "\\u003c")
