"""Eviction in the slots of a pool: who goes, and where the others move, by a list written out token by token."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kvsieve.backends.compiled import native
from kvsieve.paging import slots
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.slots import POSITION, Trim, slot_fields
from kvsieve.verify.poison import poisoned_pools

HEADS, WIDTHS, SINK, RECENT = 3, (5, 4), 2, 4
TRIMS = {"eager": slots.trim, "compiled": native.trim}


class Stored:
    """A poisoned pool in which two requests hold ``stored`` tokens each, in blocks and rows that lie anywhere."""

    def __init__(self, page: int, stored: int, kept: int, mass: bool, dtype: torch.dtype, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        pages = -(-stored // page)
        with poisoned_pools():
            self.pool = LayerPool(HEADS, page, *WIDTHS, dtype, torch.device("cpu"), {}, slot_fields(page, mass))
            self.pool.reserve(3 * pages + 1, 3 * pages + 1)
        places = [(1 + torch.randperm(3 * pages, generator=random))[: 2 * pages].view(2, pages) for _ in range(2)]
        self.trim = Trim(*places, stored, kept, SINK, torch.tensor([stored + 3 - RECENT, stored + 9 - RECENT]))
        for request, length in enumerate((stored + 3, stored + 9)):  # of which 3 and 9 were evicted before
            for head in range(HEADS):
                middle = torch.arange(SINK, length - RECENT)
                left = middle[torch.randperm(len(middle), generator=random)[: stored - SINK - RECENT]]
                ends = [torch.arange(SINK), torch.arange(length - RECENT, length)]
                positions = torch.cat([*ends, left])[torch.randperm(stored, generator=random)]
                for slot, position in enumerate(positions.tolist()):
                    self._store(request, head, slot, position, random)

    def _store(self, request: int, head: int, slot: int, position: int, random: torch.Generator) -> None:
        pool, (page, offset) = self.pool, divmod(slot, self.pool.page_size)
        block, row = self.trim.blocks[request, page], self.trim.rows[request, page]
        for field in (pool.k, pool.v):
            field[head, block, offset] = torch.randn(field.shape[3], generator=random).to(pool.dtype)
        pool.state[POSITION][head, row, offset] = position
        if "mass" in pool.state:  # ties, zeros, tiny and huge ones, NaN
            values = (0.0, 0.5, 0.5, 1e-42, 1e30, math.nan, float(torch.rand((), generator=random)))
            pool.state["mass"][head, row, offset] = values[int(torch.randint(len(values), (), generator=random))]

    def fields(self) -> dict[str, torch.Tensor]:
        """Every field of the pool."""
        return {"k": self.pool.k, "v": self.pool.v, **self.pool.state}

    def expected(self) -> dict[str, torch.Tensor]:
        """The fields as they must be after the trim."""
        fields = {name: field.clone() for name, field in self.fields().items()}
        for request in range(2):
            for head in range(HEADS):
                gone = self._gone(request, head)
                gaps = [slot for slot in range(self.trim.kept) if slot in gone]
                movers = [slot for slot in range(self.trim.kept, self.trim.stored) if slot not in gone]
                for source, target in zip(movers, gaps, strict=True):
                    for name, field in fields.items():
                        table = self.trim.blocks if name in ("k", "v") else self.trim.rows
                        (a, i), (b, j) = (divmod(slot, self.pool.page_size) for slot in (source, target))
                        field[head, table[request, b], j] = self.fields()[name][head, table[request, a], i]
        return fields

    def _gone(self, request: int, head: int) -> set[int]:
        ranked = []
        for slot in range(self.trim.stored):
            page, offset = divmod(slot, self.pool.page_size)
            row = self.trim.rows[request, page]
            position = int(self.pool.state[POSITION][head, row, offset])
            mass = float(self.pool.state["mass"][head, row, offset]) if "mass" in self.pool.state else 0.0
            if SINK <= position < int(self.trim.recent[request]):
                ranked.append((not math.isnan(mass), 0.0 if math.isnan(mass) else mass, -position, slot))
        return {slot for *_, slot in sorted(ranked)[: self.trim.stored - self.trim.kept]}


@pytest.mark.parametrize("trim", TRIMS.values(), ids=TRIMS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mass", [True, False], ids=["mass", "age"])
@pytest.mark.parametrize(("stored", "kept"), [(17, 16), (70, 16), (34, 33), (40, 6), (12, 7)])
@pytest.mark.parametrize("page", [1, 5, 33])
def test_who_goes_and_where_the_others_move(
    trim: Callable[[LayerPool, Trim], None], page: int, stored: int, kept: int, mass: bool, dtype: torch.dtype
) -> None:
    for seed in range(3):
        one = Stored(page, stored, kept, mass, dtype, seed)
        expected = one.expected()
        trim(one.pool, one.trim)
        for name, field in one.fields().items():
            assert torch.equal(torch.nan_to_num(field, nan=7.0), torch.nan_to_num(expected[name], nan=7.0)), name
