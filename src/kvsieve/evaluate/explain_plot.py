"""A recorded generation as a PNG; needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from kvsieve.errors import ConfigError
from kvsieve.evaluate.trace import Loss, Trace, captured
from kvsieve.verify.plots import new_figure, save

FLOOR = 1e-4
"""Shares of the attention below it are drawn alike."""
LOWEST = math.log10(FLOOR)


def choose_segments(trace: Trace, layers: Sequence[int], heads: Sequence[int]) -> list[tuple[int, int]]:
    """(layer, KV head) pairs to draw: those asked for, or the one that lost most.

    Raises:
        ConfigError: a layer or head that was not recorded.
    """
    wrong = sorted(set(layers) - set(trace.layers)), sorted(set(heads) - set(range(trace.mass.shape[1])))
    if any(wrong):
        raise ConfigError(
            f"expected layers of {trace.layers} and KV heads below {trace.mass.shape[1]}, received "
            f"{wrong[0] + wrong[1]}"
        )
    worst = next(iter(trace.losses(1)), Loss(trace.layers[0], 0, 0, 0, 0.0))
    return [(layer, head) for layer in layers or [worst.layer] for head in heads or [worst.head]]


def plot_trace(trace: Trace, segments: Sequence[tuple[int, int]], path: Path) -> None:
    """Pages kept beside exact attention mass, steps downwards; a row per (layer, KV head).

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    figure, axes = new_figure(len(segments), 2, (13, 1 + 3.8 * len(segments)))
    for line, (layer, head) in zip(axes, segments, strict=True):
        place = trace.layers.index(layer), head
        mass, kept = trace.mass[place], trace.kept[place]
        line[0].imshow(kept.numpy(), aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        line[0].set_title(f"layer {layer}, KV head {head}: pages kept ({captured(mass, kept):.1%} of the attention)")
        levels = mass.clamp(min=FLOOR).log10().numpy()
        shown = line[1].imshow(levels, aspect="auto", cmap="magma", vmin=LOWEST, vmax=0, interpolation="nearest")
        line[1].set_title("exact attention per page; rings: most attended page not kept, from 5% on")
        lost = torch.where(kept, 0.0, mass).max(1)
        steps = [step for step in range(trace.steps) if lost.values[step] >= 0.05]
        line[1].scatter([int(lost.indices[step]) for step in steps], steps, s=28, facecolors="none", edgecolors="cyan")
        figure.colorbar(shown, ax=line[1], label="log10 of the share")
        for axis in line:
            axis.set(xlabel=f"page of {trace.page_size} tokens", ylabel="decode step")
    save(figure, path)
