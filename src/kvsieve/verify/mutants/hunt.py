"""Looking for a mutant: unmodified checks, the cheapest first, until one complains."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from kvsieve.flow import Flow, build_flow
from kvsieve.verify.checks import Fault
from kvsieve.verify.mutants import MUTANTS
from kvsieve.verify.mutants.base import EVICTION, LIFE_CYCLE, MASS, TRANSFORMERS, Mutant
from kvsieve.verify.mutants.flow import EveryRule
from kvsieve.verify.mutants.observe import finite_memory, traced_once, watched
from kvsieve.verify.programs import random_program, run_program
from kvsieve.verify.subject import Subject
from kvsieve.verify.suite import CHECKS, Check
from kvsieve.workers import Workers

FLOWS = ("gqa_quest_sparse_attention", "gqa_block_sparse_attention", "h2o_token_sparse_attention", "every_rule")
"""What mutants run under: an envelope, a softmax over the window, state by token, every rule of the lowering."""

MASS_FLOWS = ("h2o", "snapkv", "tova")
"""What mutants of the attention mass run under: decayed, a window of queries, one query."""

CHEAPEST_FIRST = (
    "order",
    "under budget",
    "abandoned call",
    "evicted prefix",
    "mass life cycle",
    "eviction order",
    "evicting lives",
    "second turns",
    "kept twin",
    "ties",
    "broken request",
    "options",
    "extreme",
    "ratio",
    "others NaN",
    "padding requests",
    "unselected NaN",
    "free memory",
    "permuted blocks",
    "alone or in a batch",
    "batch order",
    "life cycle",
    "chunked prefill",
    "iid",
    "eviction",
    "long context",
    "planted",
    "algorithm 1",
)
EVICTING_FIRST = ("eviction order", "evicting lives", "second turns", "eviction", "kept twin", "algorithm 1")
"""What finds mutants of eviction, and nothing else: nothing else evicts."""

NARROW = {"order": FLOWS[:1], "long context": FLOWS[0::2], "planted": FLOWS[:1]}
"""Checks that are run under some of the flows: one brings its own, the others take long."""
DIRECTED = ("abandoned call", "evicted prefix")
"""Of the life cycle, and at once: what random programmes need long to meet."""
FUZZ_SECONDS = 60.0
FUZZ_EVENTS = 50


@dataclass(frozen=True)
class Stage:
    """One thing to run on the mutated program; ``run`` raises Fault if the program is wrong."""

    name: str
    run: Callable[[], object]


@dataclass(frozen=True)
class Hunt:
    """What became of a mutant.

    ``killed_by``: the first check that raised a fault, with the fault's ``stage`` and ``message``. ``finite``: the
    outputs up to then were finite, in memory full of NaN or else of small numbers. ``raised``: what the mutated
    program raised by itself, which takes it out of the count.
    """

    mutant: str
    seconds: float
    killed_by: str = ""
    stage: str = ""
    message: str = ""
    finite: bool = True
    raised: str = ""

    @property
    def counted(self) -> bool:
        """Finite, and nothing but a check complained."""
        return self.finite and not self.raised

    @property
    def killed(self) -> bool:
        return bool(self.killed_by)


@lru_cache(None)
def _flow(name: str) -> Flow:
    return EveryRule() if name == "every_rule" else build_flow(name)


def stages(mutant: Mutant) -> Iterator[Stage]:
    """What is run to find a mutant, in order."""
    if mutant.part == TRANSFORMERS:
        yield from _transformers()
        return
    flows = MASS_FLOWS if mutant.part == MASS else FLOWS
    if mutant.part == EVICTION:
        named = {check.name: check for check in CHECKS}
        yield from _checks([named[name] for name in EVICTING_FIRST], (*MASS_FLOWS, "streaming_llm"))
        return
    ordered = sorted(CHECKS, key=lambda check: CHEAPEST_FIRST.index(check.name))
    if mutant.part == LIFE_CYCLE:
        yield from _checks([check for check in ordered if check.name in DIRECTED], flows)
        yield from _programmes()
    yield from _checks(ordered, flows)


def _checks(checks: Sequence[Check], flows: Sequence[str]) -> Iterator[Stage]:
    for check in checks:
        for name in [flow for flow in flows if flow in NARROW.get(check.name, flows)]:
            subject = Subject(_flow(name))
            yield Stage(f"{check.name} / {name}", lambda check=check, subject=subject: check.run(subject))  # type: ignore[misc]


def _programmes() -> Iterator[Stage]:
    """Random programmes for a minute."""
    end, seed = time.perf_counter() + FUZZ_SECONDS, 0
    while time.perf_counter() < end:
        name = FLOWS[seed % len(FLOWS)]
        program = random_program(seed, name, FUZZ_EVENTS, _flow(name))
        yield Stage(f"fuzz {seed} / {name}", lambda program=program, name=name: run_program(program, built=_flow(name)))  # type: ignore[misc]
        seed += 1


def _transformers() -> Iterator[Stage]:
    from kvsieve.verify.transformers import TRANSFORMERS as checks

    subject = Subject(_flow(FLOWS[0]))
    for check in checks:
        yield Stage(check.name, lambda check=check: check.run(subject))  # type: ignore[misc]


def hunt(mutant: Mutant) -> Hunt:
    """Run the stages on the mutated program until one complains."""
    start = time.perf_counter()
    for stage in stages(mutant):
        error, finite = _attempt(mutant, stage)
        if error is None:
            continue
        seconds = time.perf_counter() - start
        if not isinstance(error, Fault):
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return Hunt(mutant.name, seconds, message=stage.name, raised=text)
        if not finite:
            with finite_memory():
                again, finite = _attempt(mutant, stage)
            finite &= isinstance(again, Fault)
        return Hunt(mutant.name, seconds, stage.name, error.stage, str(error), finite)
    return Hunt(mutant.name, time.perf_counter() - start)


def _attempt(mutant: Mutant, stage: Stage) -> tuple[Exception | None, bool]:
    """What a stage raises on the mutated program, and whether its outputs were finite."""
    with traced_once(), mutant.applied(), watched() as outputs:
        try:
            stage.run()
        except Exception as error:
            return error, outputs.finite
    return None, outputs.finite


def hunt_all(
    names: Sequence[str] = tuple(MUTANTS), jobs: int = 1, progress: Callable[[], None] = lambda: None
) -> list[Hunt]:
    """Hunt mutants in ``jobs`` worker processes; results in the order of the names."""
    # The long hunts first: nobody waits for one that began last.
    order = sorted(names, key=lambda name: not MUTANTS[name].survives)
    results: dict[str, Hunt] = {}
    with Workers(jobs, _start_worker) as pool:
        for name in order:
            pool.submit(_work, name)
        for future in pool.completed():
            result: Hunt = future.result()
            results[result.mutant] = result
            progress()
    return [results[name] for name in names]


def _start_worker() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def _work(name: str) -> Hunt:
    return hunt(MUTANTS[name])
