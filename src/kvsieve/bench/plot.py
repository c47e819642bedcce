"""Time against context as a PNG file, with the time that the bytes alone would take; needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from kvsieve.bench.result import Case, FlowResult, Measurement
from kvsieve.errors import ConfigError


def check_plotting() -> None:
    """Refuse early where no plot can be drawn.

    Raises:
        ConfigError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install matplotlib")


def plot_measurement(measurement: Measurement, path: Path) -> None:
    """A panel per flow: whole step, its phases, the fastest dense form, and both rooflines (bytes / copy bandwidth).

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    check_plotting()
    from matplotlib.figure import Figure

    flows = measurement.flows
    columns = min(3, len(flows))
    rows = -(-len(flows) // columns)
    figure: Any = Figure(figsize=(5.2 * columns, 4.3 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for axis, flow in zip(axes, flows, strict=False):
        _panel(axis, flow, measurement)
    for axis in axes[len(flows) :]:
        axis.set_visible(False)
    setting = measurement.setting
    figure.suptitle(
        f"One decode step in one layer: {setting['backend']} on {setting['device']}, {setting['threads']} threads, "
        f"{setting['dtype']}, batch {setting['batch']}",
        fontsize=11,
    )
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: expected a writable PNG file; {error}") from None


def _panel(axis: Any, flow: FlowResult, measurement: Measurement) -> None:
    cases = sorted(flow.cases, key=lambda case: case.context)
    x = [case.context for case in cases]
    axis.loglog(x, _us(case.baseline.seconds for case in cases), "k-o", label="dense, fastest form", markersize=4)
    axis.loglog(x, _us(case.step.seconds for case in cases), "C3-o", label="whole step", markersize=4)
    for number, name in enumerate(("score", "select", "attend")):
        points = [(case.context, phase.seconds) for case in cases for phase in case.phases if phase.name == name]
        if points:
            axis.loglog([p[0] for p in points], _us(p[1] for p in points), f"C{number}.--", label=name, linewidth=1)
    roofline = [case.step.bytes / measurement.copy_bandwidth for case in cases]
    axis.loglog(x, _us(roofline), "C3:", label="bytes of the step / copy bandwidth")
    dense = [_dense_bytes(case, measurement) / measurement.copy_bandwidth for case in cases]
    axis.loglog(x, _us(dense), "k:", label="bytes of dense / copy bandwidth")
    axis.set_title(flow.flow, fontsize=10)
    axis.set_xlabel("context, tokens")
    axis.set_ylabel("µs")
    axis.grid(True, which="both", alpha=0.2)
    axis.legend(fontsize=7)


def _dense_bytes(case: Case, measurement: Measurement) -> float:
    setting = measurement.setting
    size = 4 if setting["dtype"] == "float32" else 2
    return float(setting["batch"] * setting["kv_heads"] * case.context * 2 * setting["head_dim"] * size)


def _us(seconds: Any) -> list[float]:
    return [1e6 * value for value in seconds]
