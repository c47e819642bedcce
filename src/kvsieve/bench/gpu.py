"""Clocks of a GPU: many calls in one CUDA graph, as a model runs them, and one call after the cache was flushed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from kvsieve.backends.base import Tuning
from kvsieve.bench.setting import Setting
from kvsieve.bench.stack import Stack
from kvsieve.call import Call
from kvsieve.stepgraph import StepGraph

LAUNCHES = 16
"""Calls in a graph, at least."""
MODEL_LAYERS = 32
"""Layers that a step's graph goes through, at least: what a graph costs once is then shared as in a model."""
REPLAYS = 12
"""Of a graph in a row: its launch takes the host as long as many calls, and is hidden behind the replay before it."""
FLUSH_BYTES = 256 << 20
FEWEST_LAYERS, MOST_LAYERS = 4, 32
STEPS_AHEAD = 2
"""Steps until one is replayed."""
MEMORY_SHARE = 0.6
"""Of the free memory, that a measurement's layers may take."""

Times = tuple[float, float]
"""Median and least seconds."""


@dataclass(frozen=True)
class GraphClock:
    """Times calls on a GPU by its events; ``layers`` take turns, so that each call finds its memory cold."""

    device: torch.device
    layers: int
    repeats: int

    def chain(self, run: Callable[[int], object]) -> Times:
        """Seconds of a call among many in one graph."""
        rounds = -(-LAUNCHES // self.layers)
        calls = [layer for _ in range(rounds) for layer in range(self.layers)]
        return self.replay(_captured(lambda: [run(layer) for layer in calls]), len(calls))

    def replay(self, graph: torch.cuda.CUDAGraph, calls: int) -> Times:
        """Seconds of one of the calls that a graph holds."""

        def replays() -> None:
            for _ in range(REPLAYS):
                graph.replay()

        return self._times(replays, lambda: None, calls * REPLAYS)

    def single(self, run: Callable[[int], object]) -> Times:
        """Seconds of one call in a graph of its own, the cache flushed by reading: writes would have to be written back
        while the call runs."""
        junk = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)
        return self._times(_captured(lambda: run(0)).replay, lambda: junk.sum(), 1)

    def _times(self, run: Callable[[], object], before: Callable[[], object], calls: int) -> Times:
        seconds = []
        for repeat in range(-2, self.repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before()
            start.record()
            run()
            end.record()
            end.synchronize()
            if repeat >= 0:
                seconds.append(start.elapsed_time(end) / 1e3 / calls)
        return statistics.median(seconds), min(seconds)


def rounds(setting: Setting) -> int:
    """How often a step's graph goes through the layers: memory may hold fewer than a model has."""
    return -(-MODEL_LAYERS // setting.layers)


def go_round(stack: Stack, times: int, call: Call) -> list[torch.Tensor]:
    """A decode step that goes through all layers so many times; the results of the last time."""
    for _ in range(times):
        call.record.attended.clear()
        results = [call.attend(layer, *draw).out for layer, draw in enumerate(stack.draws)]
    return results


def _captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what ``run`` launches; it has run once before, so that everything is compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def tune_kernels(stack: Stack) -> tuple[Tuning, ...]:
    """Try other tilings of the kernels that are generated for a stack's flow, at its sizes.

    Raises:
        ConfigError: the backend generates none.
    """
    setting = stack.setting
    clock = GraphClock(torch.device(setting.device), setting.layers, max(3, setting.repeats // 5))
    phases = stack.phases()

    def seconds(phase: str) -> float | None:
        try:
            return clock.chain(phases[phase])[0] if phase in phases else None
        except Exception as error:  # Triton's own class moves from version to version
            if "out of resource" not in str(error):
                raise
            return None  # too many registers, or too much shared memory

    return tuple(one for one in stack.tune(seconds) if math.isfinite(one.seconds))


def measure_in_graphs(
    stack: Stack, forms: Mapping[str, Callable[[int], object]], tick: Callable[[], None]
) -> tuple[dict[str, Times], Times]:
    """Chain times of a stack's phases, dense forms and whole step, by name; and the single time of its step.

    The step is one half a page below its context, if it can go back there: one in p fills a page.
    """
    setting = stack.setting
    clock = GraphClock(torch.device(setting.device), setting.layers, setting.repeats)
    phases = stack.phases()
    times = {name: clock.chain(run) for name, run in {**phases, **forms}.items()}

    def one_layer(layer: int) -> None:
        for name, run in phases.items():
            if name != "summarize":
                run(layer)

    single = clock.single(one_layer)
    stack.step_back(STEPS_AHEAD)
    times_round = rounds(setting)
    body = partial(go_round, stack, times_round)
    graph = StepGraph(stack.runtime, stack.requests, stack.context + 3, body, setting.device)
    while graph.graph is None:
        graph.step()
    times["step"] = clock.replay(graph.graph, times_round * setting.layers)
    for _ in range(setting.repeats):
        tick()
    return times, single


def fitting_layers(setting: Setting, context: int, step_bytes: int) -> int:
    """So many layers that what a step reads in all of them is several times the cache, if the memory holds them."""
    device = torch.device(setting.device)
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    wanted = -(-3 * cache // max(1, step_bytes))
    free, _ = torch.cuda.mem_get_info(device)
    held = 2.5 * setting.dense_bytes(context)  # paged, dense, and summaries
    return max(1, min(max(FEWEST_LAYERS, wanted), MOST_LAYERS, int(MEMORY_SHARE * free / held)))
