"""Curves of the studies as PNG files; needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

from kvsieve.dtypes import STATE_DTYPES
from kvsieve.errors import ConfigError
from kvsieve.verify.accumulator_report import ERROR
from kvsieve.verify.study import NOISES, DecayStudy
from kvsieve.verify.study_weights import RATIOS, WeightsStudy


def plot_decay(study: DecayStudy, path: Path) -> None:
    """Relative error, mass kept and top-k agreement over the power of the decay; a row per kind of attention.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    figure, axes = new_figure(len(NOISES), 3, (13, 3.4 * len(NOISES)))
    for line, kind in zip(axes, NOISES, strict=True):
        for dtype in STATE_DTYPES:
            rows = study.of(dtype, kind)
            x = range(len(rows))
            line[0].semilogy(x, [max(row.error, 1e-8) for row in rows], marker="o", label=dtype)
            line[1].plot(x, [1 - row.lost for row in rows], marker="o", label=dtype)
            line[2].plot(x, [row.agree for row in rows], marker="o", label=dtype)
        names = ["none" if row.power is None else str(row.power) for row in rows]
        line[0].axhline(ERROR, color="grey", linestyle=":")
        for axis, title in zip(line, ("relative error", "mass kept", f"top-{study.topk} agreement"), strict=True):
            axis.set_xticks(range(len(names)), names)
            axis.set(title=f"{title}, {kind} attention", xlabel="k of decay 1 - 2**-k; none: undecayed")
        line[0].legend()
    save(figure, path)


def plot_weights(study: WeightsStudy, path: Path) -> None:
    """Captured attention over the ratio of the weights; a panel per kind of keys.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    kinds = list(study.segments)
    figure, axes = new_figure(1, len(kinds), (6 * len(kinds), 3.8))
    names = [f"{ratio:g}" if math.isfinite(ratio) else "peak only" for ratio in RATIOS]
    for axis, kind in zip(axes[0], kinds, strict=True):
        for row in study.rows:
            if row.keys == kind:
                (drawn,) = axis.plot(range(len(names)), row.captured, marker="o", label=row.flow)
                axis.axhline(row.exact, color=drawn.get_color(), linestyle=":")
        axis.set_xticks(range(len(names)), names, rotation=45)
        axis.set(title=f"{kind} keys; dotted: exact top pages", xlabel="w_peak / w_avg", ylabel="captured attention")
        axis.legend()
    save(figure, path)


def check_plotting() -> None:
    """Refuse early where a plot could not be drawn.

    Raises:
        ConfigError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install matplotlib")


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its axes [rows][columns], drawn without a display."""
    check_plotting()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    both: tuple[Any, Any] = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    return both


def save(figure: Any, path: Path) -> None:
    """Write a figure and forget it."""
    from matplotlib import pyplot

    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}; expected a writable file such as decay.png") from error
    finally:
        pyplot.close(figure)
