"""Eviction alone: which slots are trimmed on masses that no attention need give, and what the others hold then."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvsieve.backends import get_backend
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.slots import POSITION, Trim, slot_fields
from kvsieve.verify.checks import Numbers, expect
from kvsieve.verify.subject import Subject

HEADS, REQUESTS, PAGE = 3, 2, 3
SIZES = ((13, 12, 0, 1), (29, 20, 2, 4), (40, 12, 4, 8), (24, 23, 1, 22), (200, 33, 0, 2))
"""Tokens stored, kept, sink and recent ones."""
ODD = torch.tensor([float("nan"), float("inf"), 0.0, 1e-42, 3e-42, 1.0, 2.0, 2 + 2.0**-22], dtype=torch.float32)
Tokens = dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""By position in the request: key, value and mass."""


def check_order(subject: Subject) -> Numbers:
    """NaN, infinities, ties, masses of neighbouring bits; slots in any order, ragged requests, every gap filled."""
    numbers, backend = Numbers(), get_backend(subject.backend)
    if not subject.flow.evictable or subject.flow.mass is None:
        return numbers
    random = torch.Generator().manual_seed(subject.seed)
    for stored, kept, sink, recent in SIZES:
        near = 1 + torch.randperm(stored, generator=random).to(torch.float32) * 2.0**-23
        for masses in (ODD[torch.randint(len(ODD), (stored,), generator=random)], near):
            lengths = [stored + 7, 3 * stored]
            pool, one = _filled(subject, random, masses, lengths, (stored, kept, sink, recent))
            before = [_tokens(pool, one, b, h, stored) for b, h in _segments()]
            backend.trim(pool, one)
            for (b, h), tokens in zip(_segments(), before, strict=True):
                _compare(tokens, _tokens(pool, one, b, h, kept), one, lengths[b] - recent, f"request {b} KV head {h}")
                numbers.note("selection", 0.0)
    return numbers


def _segments() -> Iterator[tuple[int, int]]:
    return ((b, h) for b in range(REQUESTS) for h in range(HEADS))


def _filled(
    subject: Subject,
    random: torch.Generator,
    masses: torch.Tensor,
    lengths: list[int],
    sizes: tuple[int, int, int, int],
) -> tuple[LayerPool, Trim]:
    """A pool in which requests of some lengths hold ``stored`` tokens each: sinks, recent ones and some between."""
    stored, kept, sink, recent = sizes
    pages = -(-stored // PAGE)
    device = torch.device(subject.device)
    pool = LayerPool(HEADS, PAGE, 6, 4, subject.dtype, device, {}, slot_fields(PAGE, True))
    pool.reserve(1 + REQUESTS * pages, 1 + REQUESTS * pages)
    blocks, rows = (1 + torch.randperm(REQUESTS * pages, generator=random).view(REQUESTS, -1) for _ in range(2))
    for field in (pool.k, pool.v):
        field.copy_(torch.randn(field.shape, generator=random))
    slot = torch.arange(stored)
    for b, h in _segments():
        between = sink + torch.randperm(lengths[b] - recent - sink, generator=random)[: stored - sink - recent]
        there = torch.cat([torch.arange(sink), between, torch.arange(lengths[b] - recent, lengths[b])])
        place = h, rows[b, slot // PAGE], slot % PAGE
        pool.state[POSITION][place] = there[torch.randperm(stored, generator=random)].to(device)
        pool.state["mass"][place] = masses[torch.randperm(stored, generator=random)].to(device)
    first_recent = torch.tensor(lengths, device=device) - recent
    return pool, Trim(blocks.to(device), rows.to(device), stored, kept, sink, first_recent)


def _tokens(pool: LayerPool, one: Trim, request: int, head: int, count: int) -> Tokens:
    """What the first ``count`` slots hold."""
    blocks, rows = one.blocks[request], one.rows[request]
    k, v = (field[head, blocks].flatten(0, 1)[:count].cpu() for field in (pool.k, pool.v))
    position, mass = (pool.state[name][head, rows].flatten()[:count].cpu() for name in (POSITION, "mass"))
    return {int(t): (k[i], v[i], mass[i]) for i, t in enumerate(position)}


def _compare(before: Tokens, after: Tokens, one: Trim, recent: int, place: str) -> None:
    """Those of least mass have gone, of them the younger first; the others are what they were."""
    free = [token for token in before if one.sink <= token < recent]
    free.sort(key=lambda t: (float(before[t][2].nan_to_num(nan=-1.0)), -t))
    wanted = sorted(set(before) - set(free[: one.stored - one.kept]))
    expect(sorted(after) == wanted, "selection", place, f"tokens {sorted(after)} are left, expected {wanted}")
    for token in wanted:
        for name, now, then in zip(("k", "v", "mass"), after[token], before[token], strict=True):
            same = torch.equal(now.nan_to_num(nan=-1.0), then.nan_to_num(nan=-1.0))
            expect(same, "storage", place, f"{name} of token {token} is not what it was")
