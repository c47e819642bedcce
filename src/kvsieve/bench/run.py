"""Runs a measurement: verify, then time phases, whole steps and dense forms in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from kvsieve.backends.base import PHASES
from kvsieve.bench.check import check_step
from kvsieve.bench.dense import UNFAIR, dense_forms
from kvsieve.bench.gpu import fitting_layers, measure_in_graphs, rounds, tune_kernels
from kvsieve.bench.result import Case, DenseTime, FlowResult, Measurement, Phase
from kvsieve.bench.setting import Setting
from kvsieve.bench.stack import Stack
from kvsieve.bench.timing import Clock, copy_bandwidth
from kvsieve.dtypes import torch_name
from kvsieve.flow import Flow, flow_name

CPU_LAYERS = 4


def run_bench(
    flows: Sequence[Flow],
    contexts: Sequence[int],
    setting: Setting,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Measurement:
    """Measure every flow at every context, and the two cases in which nothing is to be chosen.

    Raises:
        KvsieveError: a step does not agree with the float64 reference; no time is taken then.
    """
    plan = [(flow, _cases(flow, contexts, setting)) for flow in flows]
    total, done = sum(len(cases) for _, cases in plan) * setting.repeats, 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    progress(0, total)
    bandwidth = copy_bandwidth(torch.device(setting.device))
    results = []
    for flow, cases in plan:
        measured = tuple(measure_case(flow, kind, context, setting, tick) for kind, context in cases)
        results.append(FlowResult(flow_name(flow), setting.page_size_of(flow), measured))
    return Measurement(describe(setting), bandwidth, tuple(results))


def measure_case(
    flow: Flow, kind: str, context: int, setting: Setting, tick: Callable[[], None] = lambda: None
) -> Case:
    """Verify one flow at one context, then time it and dense attention in turn."""
    setting = _with_layers(flow, setting, context)
    stack = Stack(flow, setting, context)
    checked = check_step(stack)
    tuned = tune_kernels(stack) if setting.tune else ()
    pages, kept = int(stack.quota.pages[0]), int(stack.quota.count[0])
    sizes, kernels = stack.bytes(), setting_kernels(stack)
    forms = dense_forms(stack)
    if setting.on_gpu:
        times, single = measure_in_graphs(stack, forms, tick)
        how = f"backend {setting.backend}, a CUDA graph of {rounds(setting)} x {setting.layers} layers"
    else:
        times, single = _measure_calls(stack, forms, tick), None
        how = f"backend {setting.backend}, {setting.layers} layers a step"
    if stack.options.mass is not None and "mass" not in times:
        sizes["attend"] += sizes["mass"]
    rows = [Phase(name, *times[name], sizes[name], kernels[name]) for name in PHASES if name in times]
    moved = sum(sizes[row.name] for row in rows if row.name != "summarize")
    moved += sizes["summarize"] // stack.runtime.page_size
    rows.append(Phase("step", *times["step"], moved, how))
    compared = tuple(DenseTime(name, *times[name], setting.on_gpu or name != UNFAIR) for name in forms)
    return Case(kind, context, pages, kept, tuple(rows), compared, checked, single, tuned)


def _with_layers(flow: Flow, setting: Setting, context: int) -> Setting:
    """The setting with a number of layers, where none was asked for."""
    if setting.layers:
        return setting
    if not setting.on_gpu:
        return replace(setting, layers=CPU_LAYERS)
    tokens = min(context, setting.budget_of(flow).kept(0) * setting.page_size_of(flow))
    return replace(setting, layers=fitting_layers(setting, context, setting.dense_bytes(tokens)))


def _measure_calls(
    stack: Stack, forms: Mapping[str, Callable[[int], object]], tick: Callable[[], None]
) -> dict[str, tuple[float, float]]:
    setting = stack.setting
    runs = {**stack.phases(), "step": lambda layer: stack.step(), **forms}
    clock = Clock(torch.device(setting.device), setting.layers, setting.repeats)
    times = clock.measure(runs, {"step": stack.rewind}, tick)
    median, least = (seconds / setting.layers for seconds in times["step"])
    return {**times, "step": (median, least)}


def setting_kernels(stack: Stack) -> dict[str, str]:
    """What runs each phase."""
    return stack.runtime.backend.kernels(stack.layer(0).pool)


def describe(setting: Setting) -> dict[str, Any]:
    """The setting, the software and the number of threads, as plain JSON values."""
    words = {**asdict(setting), "dtype": torch_name(setting.dtype), "torch": torch.__version__}
    words["layers"] = setting.layers or (None if setting.on_gpu else CPU_LAYERS)  # on a GPU each case has its own
    words["threads"] = torch.get_num_threads()
    if setting.device.startswith("cuda"):
        words["gpu"] = torch.cuda.get_device_name(setting.device)
    return words


def _cases(flow: Flow, contexts: Sequence[int], setting: Setting) -> list[tuple[str, int]]:
    """Contexts, and the two no-op cases: half a page below the budget, and exactly the budget."""
    p, kept = setting.page_size_of(flow), setting.budget_of(flow).kept(0)
    under = max(3, (kept - 3) * p - p // 2)
    return [
        *((("sparse" if -(-n // p) > kept else "under budget"), n) for n in contexts),
        ("under budget", under),
        ("budget = length", kept * p),
    ]
