"""Checks of the life cycle: random programmes, and what chance seldom meets."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvsieve.dtypes import dtype_name
from kvsieve.mass import LARGEST_UNIT
from kvsieve.paging.table import CROP_ROWS, RequestId
from kvsieve.verify.checks import Numbers, expect
from kvsieve.verify.data import BulkData, LayerShape
from kvsieve.verify.poison import poisoned_pools
from kvsieve.verify.programs import random_program, run_program
from kvsieve.verify.subject import Subject
from kvsieve.verify.twin import Twin

SHAPE = LayerShape(2, 3, 12, 12)
FAMILY = 0


def _programs(subject: Subject) -> Numbers:
    """Random programmes of admit, extend, step, fork, crop, reorder, preempt, resume, finish in a tiny pool."""
    return random_lives(subject, 4, evicting=False)


def random_lives(subject: Subject, count: int, evicting: bool) -> Numbers:
    """Random programmes of a flow, checked event by event."""
    numbers, dtype = Numbers(), dtype_name(subject.dtype)
    for index in range(count):
        seed, place = subject.seed + index, {"dtype": dtype, "device": subject.device}
        program = random_program(seed, subject.name, 50, subject.flow, evicting=evicting, **place)
        numbers.merge(run_program(program, subject.backend, subject.flow))
    return numbers


def _abandoned(subject: Subject) -> Numbers:
    """A call that not every layer has attended leaves no prefix behind, and what follows knows nothing of it."""
    p, pages = subject.page_size, 3
    with poisoned_pools():
        twin = subject.twin([SHAPE, SHAPE], BulkData(subject.seed))
        first, lost = twin.admit(), twin.admit(FAMILY, pages)
        twin.extend([first], [2 * p + 1])
        twin.abandon(lost, pages * p)
        second = twin.admit(FAMILY, pages)
        _starts_empty(twin, second)
        twin.extend([second, first], [pages * p + 1, 2])
        twin.step([first, second])
        twin.finish([first, second])
    return twin.numbers


def _evicted_prefix(subject: Subject) -> Numbers:
    """A prefix that lost its first page to a full pool is no prefix any more."""
    p, pages = subject.page_size, 4
    with poisoned_pools():
        twin = subject.twin([SHAPE], BulkData(subject.seed), num_blocks=pages + 2)
        first = twin.admit(FAMILY, pages)
        for count in ((pages - 1) * p, p):
            twin.extend([first], [count])
        twin.finish([first])
        other = twin.admit()
        twin.extend([other], [3 * p])
        again = twin.admit(FAMILY, pages)
        _starts_empty(twin, again)
        twin.extend([again], [p + 1])
        if p > 1:
            twin.step([again])
        twin.finish([other, again])
    return twin.numbers


def _mass(subject: Subject) -> Numbers:
    """Attention mass where chance seldom looks: crops, preemption and decay beside queries that do not count yet."""
    mass, numbers = subject.flow.mass, Numbers()
    if mass is None:
        return numbers
    full = mass.window or CROP_ROWS + 1
    with poisoned_pools():
        twin = subject.twin([SHAPE], BulkData(subject.seed), judged=0.2)
        cropped, preempted = twin.admit(), twin.admit()
        twin.extend([cropped, preempted], [full + 7, full])
        twin.extend([cropped, preempted], [10, 5])
        twin.crop([cropped], [full + 8])
        twin.preempt(preempted)
        twin.step([cropped])
        twin.resume(preempted)
        for _ in range(2):
            twin.step([preempted, cropped])
        numbers.merge(twin.numbers)
        if 0 < mass.factor < 1:  # the store is rebased in the middle of the steps
            limit = min(1000, math.floor(math.log(LARGEST_UNIT) / -math.log(mass.factor)))
            twin = subject.twin([LayerShape(1, 2, 6, 4)], BulkData(subject.seed), judged=0.2)
            request = twin.admit()
            twin.extend([request], [max(1, limit - 4)], compare=False)
            for _ in range(12):
                twin.step([request])
            numbers.merge(twin.numbers)
    return numbers


def _starts_empty(twin: Twin, request: RequestId) -> None:
    length = twin.requests[request]
    expect(length == 0, "life cycle", "prefix", f"{length} tokens of a prefix that is not there")


LIFE_CYCLE: tuple[tuple[str, str, Callable[[Subject], Numbers]], ...] = (
    ("life cycle", "random programmes in a tiny pool", _programs),
    ("abandoned call", "a call that not every layer attended leaves nothing behind", _abandoned),
    ("evicted prefix", "a prefix without its first page is none", _evicted_prefix),
    ("mass life cycle", "attention mass through crops, preemption, rebasing", _mass),
)
