"""The checks that a flow must pass on a backend: what each shows, in one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvsieve.backends import get_backend
from kvsieve.backends.base import Selection
from kvsieve.budget import Budget
from kvsieve.paging.table import RequestTables
from kvsieve.plan import Plan, Quota
from kvsieve.reference import select
from kvsieve.verify.checks import Numbers, expect
from kvsieve.verify.data import BrokenRequestData, BulkData, Data, ExtremeData, LayerShape, PlantedData, TiedData
from kvsieve.verify.eviction import EVICTION
from kvsieve.verify.life_cycle import LIFE_CYCLE
from kvsieve.verify.metamorphic import METAMORPHIC
from kvsieve.verify.poison import poisoned_pools
from kvsieve.verify.subject import Subject

GROUPS, HEAD_DIMS, PAGE_SIZES, KV_HEADS = (1, 3, 4, 7, 8, 24), (64, 80, 128), (1, 5, 16, 33), (1, 3, 5)
GRID_JUDGED = 0.02


@dataclass(frozen=True)
class Check:
    """A named check; ``run`` returns what it saw or raises Fault."""

    name: str
    shows: str
    run: Callable[[Subject], Numbers]


@dataclass(frozen=True)
class Outcome:
    """A check's result: ``error`` is None when it passed."""

    check: str
    numbers: Numbers = field(default_factory=Numbers)
    error: Exception | None = None


def boundary_lengths(page_size: int, budget: Budget) -> list[int]:
    """Prompt lengths around every boundary: one token, a page, the budget; steps then cross them."""
    p, kept = page_size, budget.kept(0)
    wanted = {
        1,
        p - 1,
        p,
        p + 1,
        kept * p - 2,
        kept * p - 1,
        kept * p,
        kept * p + 1,
        (kept + 1) * p,
        (kept + 2) * p - 1,
    }
    return sorted(length for length in wanted if length > 0)


def drive(
    subject: Subject,
    shapes: Sequence[LayerShape],
    data: Data,
    lengths: Sequence[int],
    steps: int,
    *,
    page_size: int | None = None,
    judged: float = 1.0,
    prefill: bool = True,
    **options: Any,
) -> Numbers:
    """Prefill a ragged batch and decode; everything is compared, memory is poisoned."""
    with poisoned_pools():
        twin = subject.twin(shapes, data, page_size=page_size, judged=judged, **options)
        requests = [twin.admit() for _ in lengths]
        twin.extend(requests, list(lengths), compare=prefill)
        for _ in range(steps):
            twin.step(requests)
        twin.finish(requests)
    return twin.numbers


def _planted(subject: Subject) -> Numbers:
    """A long ragged run on data with sinks and heavy hitters."""
    p = subject.page_size
    return drive(subject, [LayerShape(2, 3, 16, 12)], PlantedData(subject.seed), [9 * p + 1, 1, 5 * p], 200, judged=0.1)


def _iid(subject: Subject) -> Numbers:
    """Two layers of different geometry, one of them wide, and more requests than eight."""
    shapes = [LayerShape(3, 4, 20, 20), LayerShape(1, 12, 192, 24)]
    p = subject.page_size
    lengths = [6 * p + 2, 3, p, 5 * p + 1, 1, 7 * p - 1, 2, 4 * p, 6 * p]
    return drive(subject, shapes, BulkData(subject.seed), lengths, 12)


def _ties(subject: Subject) -> Numbers:
    return drive(subject, [LayerShape(5, 2, 6, 6)], TiedData(subject.seed), [12 * subject.page_size, 2], 30)


def _extreme(subject: Subject) -> Numbers:
    return drive(subject, [LayerShape(2, 3, 12, 12)], ExtremeData(subject.seed), [9 * subject.page_size, 5], 30)


def _broken(subject: Subject) -> Numbers:
    lengths = [7 * subject.page_size, 6 * subject.page_size + 1, 2]
    return drive(subject, [LayerShape(2, 3, 12, 8)], BrokenRequestData(subject.seed, broken=1), lengths, 20)


def _options(subject: Subject) -> Numbers:
    """Scale, soft-cap and sink logits, each alone and together; a dense layer."""
    numbers = Numbers()
    for softcap, sinks in ((2.5, False), (None, True), (2.5, True)):
        numbers.merge(
            drive(
                subject,
                [LayerShape(2, 3, 12, 12), LayerShape(2, 3, 12, 12), LayerShape(1, 5, 16, 16)],
                BulkData(subject.seed, q_scale=3.0),
                [7 * subject.page_size + 1, 2],
                8,
                scale=0.4,
                softcap=softcap,
                sinks=sinks,
                dense_layers=(1,),
            )
        )
    return numbers


def _ratio(subject: Subject) -> Numbers:
    """A budget that grows with the request."""
    if subject.flow.score is None:
        return Numbers()
    p, shape = subject.page_size, LayerShape(2, 3, 12, 12)
    third = replace(subject, given_budget=Budget(1, 1, 1, 0.3))
    numbers = drive(third, [shape], BulkData(subject.seed), [12 * p, 11, 20 * p], 20)
    # 0.58 * 50 is 28.999999999999996 in binary floating point
    exact = replace(subject, given_budget=Budget(1, 1, 1, 0.58))
    lengths = [50 * p - 3]
    numbers.merge(drive(exact, [shape], BulkData(subject.seed), lengths, 5, judged=0.0, prefill=False))
    return numbers


def _long(subject: Subject) -> Numbers:
    """More pages than 15 bits count."""
    if subject.flow.page_size not in (None, 1):
        return Numbers()
    return drive(
        subject,
        [LayerShape(1, 2, 4, 4)],
        BulkData(subject.seed),
        [33_000],
        1,
        page_size=1,
        prefill=False,
    )


def _order(subject: Subject) -> Numbers:
    """The backend's selection alone, on scores that no flow need give: NaN, infinities, both zeros, ties, negatives."""
    numbers, backend, p, heads = Numbers(), get_backend(subject.backend), 3, 3
    random = torch.Generator().manual_seed(subject.seed)
    pool = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1.5, -1.0, 2.0, 2 + 2.0**-22, 1e-42, -1e-42],
        dtype=torch.float32,
    )
    steps = torch.randperm(1500, generator=random).to(torch.float32)
    near = 1 + steps * 2.0**-23  # no two alike, and no coarser key tells them apart
    ragged, long = [19 * p, 4 * p + 1, 1, 11 * p - 1, 30 * p], [1503 * p, 7 * p]
    cases = [(budget, ragged, pool, 20) for budget in (Budget(4, 1, 2), Budget(1, 0, 1), Budget(2, 2, 1, 0.6))]
    for budget, lengths, values, times in (*cases, (Budget(200, 1, 2), long, near, 2)):
        tables = RequestTables(p, None, False)
        requests = [tables.admit() for _ in lengths]
        tables.append(requests, lengths)
        plan = Plan(tables, requests, lengths, [], torch.device(subject.device))
        quota = plan.quota(budget, True, False)
        assert quota.window is not None
        shape = (len(quota.window.requests), heads, quota.window.valid.shape[1])
        for _ in range(times):
            drawn = torch.randint(len(values), shape, generator=random)
            if len(values) >= shape[2]:  # each value once
                drawn = torch.rand((*shape[:2], len(values)), generator=random, dtype=torch.float32).argsort(-1)[
                    ..., : shape[2]
                ]
            scores = values[drawn]
            padding = ~quota.window.valid.cpu()[:, None].expand(shape)
            scores[padding] = (float("inf"), float("nan"), 1e9)[int(torch.randint(3, (), generator=random))]
            selection = backend.select(scores.to(subject.device), quota, heads)
            _check_order(numbers, selection, scores, quota, budget, lengths, p)
    return numbers


def _check_order(
    numbers: Numbers,
    selection: Selection,
    scores: torch.Tensor,
    quota: Quota,
    budget: Budget,
    lengths: Sequence[int],
    page_size: int,
) -> None:
    assert quota.window is not None
    scored = quota.window.requests.tolist()
    for i, length in enumerate(lengths):
        pages = -(-length // page_size)
        for head in range(scores.shape[1]):
            row = scores[scored.index(i), head, : budget.window(pages)] if i in scored else None
            listed = selection.pages[i, head, : int(selection.count[i])].tolist()
            wanted = select(row, pages, budget)
            expect(listed == wanted, "selection", f"request {i} head {head}", f"pages {listed}, expected {wanted}")
    numbers.note("selection", 0.0)


def _grid(subject: Subject) -> Numbers:
    """Every group, head_dim, page size and number of KV heads, around every boundary."""
    sizes = PAGE_SIZES if subject.flow.page_size is None else (subject.flow.page_size,)
    small = replace(subject, given_budget=Budget(2, 1, 1) if subject.flow.score else Budget(0, 1, 3))
    shapes = [LayerShape(h, g, d, d if h < 5 else 48) for g in GROUPS for d in HEAD_DIMS for h in KV_HEADS]
    numbers = Numbers()
    for p in sizes:
        twin_data, lengths = BulkData(subject.seed + p), boundary_lengths(p, small.budget)
        numbers.merge(drive(small, shapes, twin_data, lengths, 2, page_size=p, judged=GRID_JUDGED, prefill=False))
    return numbers


CHECKS: tuple[Check, ...] = (
    Check("planted", "200 steps with sinks and heavy hitters", _planted),
    Check("iid", "two layers of different geometry, every bound derived", _iid),
    Check("ties", "equal scores: the older page stays", _ties),
    Check("extreme", "huge and tiny magnitudes", _extreme),
    Check("broken request", "NaN and infinite keys in one request; the others do not notice", _broken),
    Check("options", "scale, soft-cap, sink logits, a dense layer", _options),
    Check(
        "order",
        "selection alone: NaN, infinities, both zeros, ties, negatives, near ties, ragged and long windows",
        _order,
    ),
    Check("ratio", "a budget that grows with the request", _ratio),
    Check("long context", "33,000 pages: more than 15 bits count", _long),
    *(Check(name, shows, run) for name, shows, run in LIFE_CYCLE),
    *(Check(name, shows, run) for name, shows, run in METAMORPHIC),
    *(Check(name, shows, run) for name, shows, run in EVICTION),
)
GRID = Check("grid", "groups 1 to 24, head_dim 64 to 128, pages 1 to 33, 1 to 5 KV heads", _grid)


def run_check(check: Check, subject: Subject) -> Outcome:
    """Run one check; faults and exceptions become outcomes."""
    try:
        return Outcome(check.name, check.run(subject))
    except Exception as error:
        return Outcome(check.name, error=error)
