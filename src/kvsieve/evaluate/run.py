"""Runs an evaluation: batches of samples, each prefilled once, then decoded by every contender that is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from queue import Queue
from threading import Thread
from typing import Any

import torch

from kvsieve.budget_text import BudgetText
from kvsieve.dtypes import DTYPES
from kvsieve.errors import ConfigError, KvsieveError
from kvsieve.evaluate.contenders import DENSE, Contender
from kvsieve.evaluate.decode import Batch
from kvsieve.evaluate.store import Key, Result, ResultStore
from kvsieve.evaluate.tasks import TAIL, TASKS
from kvsieve.evaluate.text import Corpus, digest
from kvsieve.models import load_model, positions_of, quiet_transformers
from kvsieve.retention import Evict
from kvsieve.workers import Workers


@dataclass(frozen=True)
class Setting:
    """What all results of a run share. ``text`` is the text itself; ``batch``: samples that are decoded together."""

    model: str
    text: str
    dtype: str = "fp32"
    device: str = "cpu"
    backend: str = "eager"
    seed: int = 0
    batch: int = 4

    def as_json(self) -> dict[str, Any]:
        """As plain values, the text by its digest."""
        return {**vars(self), "text": digest(self.text)}


@dataclass(frozen=True)
class Wish:
    """What a run is asked for."""

    contenders: Sequence[Contender]
    tasks: Sequence[str]
    contexts: Sequence[int]
    budgets: Sequence[BudgetText]
    samples: int

    def keys(self, task: str, context: int, samples: Sequence[int]) -> Iterator[tuple[Contender, list[Key]]]:
        """Per contender and budget the results of some samples. Dense has one budget: everything."""
        tokens = list(dict.fromkeys(budget.of(context, TAIL) for budget in self.budgets))
        for contender in self.contenders:
            for count in [context + TAIL] if contender.rule == DENSE else tokens:
                yield contender, [Key(task, context, count, contender.name, sample) for sample in samples]

    def check(self) -> None:
        """Refuse budgets that a contender cannot have, before anything is loaded.

        Raises:
            ConfigError: a budget that does not hold sink and recent pages.
        """
        for contender in self.contenders:
            flow = contender.build()
            for context in self.contexts:
                for budget in self.budgets:
                    if contender.evicts:
                        Evict(budget.of(context))
                    if contender.rule != DENSE:
                        budget.budget(contender.page_size, context, selects=flow.score is not None)

    def digests(self) -> dict[str, str]:
        """Digest by contender."""
        return {contender.name: contender.digest for contender in self.contenders}


@dataclass(frozen=True)
class Unit:
    """A batch of samples and what is missing of it: the work of one process at a time."""

    task: str
    context: int
    samples: tuple[int, ...]
    missing: list[tuple[Contender, list[Key]]] = field(hash=False)


Progress = Callable[[int, int], None]


def units(wish: Wish, store: ResultStore, batch: int) -> list[Unit]:
    """The work that is left, the dearest first.

    Samples are batched by their numbers, and a batch is run as a whole: a run that is continued computes what a run in
    one piece does, to the last bit.
    """
    found = []
    for context in sorted(wish.contexts, reverse=True):
        for task in wish.tasks:
            for first in range(0, wish.samples, batch):
                samples = tuple(range(first, min(first + batch, wish.samples)))
                wanted = wish.keys(task, context, samples)
                missing = [(who, keys) for who, keys in wanted if not all(key in store.results for key in keys)]
                if missing:
                    found.append(Unit(task, context, samples, missing))
    return found


def evaluate(setting: Setting, wish: Wish, store: ResultStore, jobs: int = 1, progress: Progress | None = None) -> None:
    """Compute what ``store`` lacks of ``wish`` and add it.

    Raises:
        ConfigError: the text is too short, or the context too long for the model.
    """
    store.refuse_other_versions(wish.digests())
    todo = units(wish, store, setting.batch)
    total = sum(len(unit.missing) for unit in todo)
    if progress is not None:
        progress(0, total)
    for done, results in enumerate(run_units(setting, todo, jobs), 1):
        store.add(results)
        if progress is not None:
            progress(done, total)


def run_units(setting: Setting, todo: Sequence[Unit], jobs: int) -> Iterator[list[Result]]:
    """Results of every contender and budget of every unit, as they come."""
    if jobs == 1 or len(todo) < 2:
        for unit in todo:
            yield from run_unit(setting, unit)
        return
    workers = min(jobs, len(todo))
    threads, spawn = max(1, torch.get_num_threads() // workers), get_context("spawn")
    results: SimpleQueue[list[Result] | None] = spawn.SimpleQueue()  # as they come: an interrupted run keeps them
    received: Queue[list[Result] | None] = Queue()
    # A thread of its own: workers never wait for a reader, and a message cut short by a death holds up nobody else.
    Thread(target=_receive, args=(results, received), daemon=True).start()
    stop = spawn.Event()
    with Workers(workers, _start_worker, threads, results, stop) as pool:
        for unit in todo:
            pool.submit(_send_unit, setting, unit)
        running = len(todo)
        try:
            while running:
                done = pool.next_done(timeout=0.2)
                while not received.empty():
                    yield received.get() or []
                if done is not None:
                    running -= 1
                    done.result()
        except BrokenProcessPool:
            raise KvsieveError(
                f"a worker process of {workers} died, most likely out of memory; use fewer --jobs or a smaller --batch"
            ) from None
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
    results.put(None)
    while (last := received.get()) is not None:
        yield last


def _receive(results: SimpleQueue[list[Result] | None], received: Queue[list[Result] | None]) -> None:
    """Pass on what workers send, until None."""
    message: list[Result] | None = []
    while message is not None:
        message = results.get()
        received.put(message)


def run_unit(setting: Setting, unit: Unit) -> Iterator[list[Result]]:
    """Results of one batch of samples, one list per contender and budget."""
    model, corpus = _loaded(setting)
    limit = positions_of(model)
    if limit is not None and unit.context + TAIL > limit:
        raise ConfigError(
            f"--context {unit.context}: expected at most {limit - TAIL}, the model's {limit} positions less {TAIL} for "
            "question and answer"
        )
    samples = [TASKS[unit.task].sample(corpus, unit.context, setting.seed, index) for index in unit.samples]
    names = [f"{setting.seed}/{unit.task}/{unit.context}/{index}" for index in unit.samples]
    batch = Batch(model, samples, names, setting.backend)
    for contender, keys in unit.missing:
        outcomes = batch.run(contender, keys[0].tokens)
        yield [Result(key, contender.digest, outcome) for key, outcome in zip(keys, outcomes, strict=True)]


@cache
def _loaded(setting: Setting) -> tuple[Any, Corpus]:
    """Model and text of a setting, loaded once a process."""
    model, tokenizer = load_model(setting.model, DTYPES[setting.dtype], device=setting.device)
    return model, Corpus(tokenizer, setting.text)


_results: SimpleQueue[list[Result] | None]
_stop: Event


def _start_worker(threads: int, results: SimpleQueue[list[Result] | None], stop: Event) -> None:
    global _results, _stop
    _results, _stop = results, stop
    torch.set_num_threads(threads)
    quiet_transformers()


def _send_unit(setting: Setting, unit: Unit) -> None:
    for results in run_unit(setting, unit):
        _results.put(results)
        if _stop.is_set():  # another unit failed, or the run was interrupted
            return
