"""Clocks: many callables measured in turn, so that a disturbance meets all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

COPY_BYTES = 256 << 20


@dataclass(frozen=True)
class Clock:
    """Measures callables ``repeats`` times, each given the layers in turn, so that it finds its memory cold."""

    device: torch.device
    layers: int
    repeats: int

    def measure(
        self,
        runs: Mapping[str, Callable[[int], object]],
        before: Mapping[str, Callable[[], None]],
        tick: Callable[[], None],
    ) -> dict[str, tuple[float, float]]:
        """Median and least seconds by name; ``before`` names what runs unmeasured ahead of a callable."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(-self.layers, self.repeats):  # once through the layers to warm up
            for name, run in runs.items():
                if name in before:
                    before[name]()
                seconds = once(partial(run, repeat % self.layers), self.device)
                if repeat >= 0:
                    times[name].append(seconds)
            if repeat >= 0:
                tick()
        return {name: (statistics.median(values), min(values)) for name, values in times.items()}


def once(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call; on a GPU, until it is done there."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a copy that no cache holds; the best of ten."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * COPY_BYTES / min(once(lambda: target.copy_(source), device) for _ in range(10))
