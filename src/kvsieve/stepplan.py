"""The plan of a captured step: the same integers as any plan's, in tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from kvsieve.budget import Budget
from kvsieve.mass import RequestMass
from kvsieve.paging.allocator import NULL_BLOCK, BlockId
from kvsieve.paging.slots import Trim
from kvsieve.paging.table import RequestId
from kvsieve.plan import Host, MassRows, Plan

RING = 4
"""Host buffers: one may still be on its way to the device while the next is filled."""

NAMES = 16
"""Values of a plan per request; three more of each budget."""


class StepMemory:
    """Device memory of a graph's plans, for requests of up to so many pages each: block and row tables
    [B, most pages], and a buffer for everything else, of layers with so many different budgets."""

    def __init__(self, device: torch.device, limits: Sequence[int], budgets: int) -> None:
        self.device, self.limits = device, tuple(limits)
        self.batch, self.pages = batch, pages = len(limits), max(limits)
        self.table, self.rows = (torch.zeros(batch, pages, dtype=torch.int64, device=device) for _ in range(2))
        self.known: object = None
        self._size = (NAMES + 3 * budgets) * (batch + 1)
        self._values = torch.zeros(self._size, dtype=torch.int64, device=device)
        self._hosts = [self._on_host(torch.zeros(self._size, dtype=torch.int64)) for _ in range(RING)]
        self._sent = [torch.cuda.Event() for _ in range(RING)] if device.type == "cuda" else []
        self._turn = 0
        self._places: dict[str, tuple[int, int]] = {}
        self._used = 0

    def begin(self) -> None:
        """Take the next host buffer, once its last copy is over."""
        self._turn = (self._turn + 1) % RING
        if self._sent:
            self._sent[self._turn].synchronize()

    def put(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Fill the values of a name, integers or float32; where they are on the device after :meth:`flush`."""
        flat = values.flatten()
        if name not in self._places:
            self._places[name] = self._used, len(flat)
            self._used += len(flat) + len(flat) % 2  # 16 bytes
            assert self._used <= self._size, "more names than a plan has"
        first, count = self._places[name]
        assert count == len(flat), f"{name} changed its size"
        host, there = (x[first : first + count] for x in (self._hosts[self._turn], self._values))
        if values.is_floating_point():
            host, there = (x.view(torch.float32)[:count] for x in (host, there))
        host.copy_(flat)
        return there.view(values.shape)

    def flush(self) -> None:
        """Send what was put, in one copy."""
        self._values.copy_(self._hosts[self._turn], non_blocking=True)
        if self._sent:
            self._sent[self._turn].record()

    def send_tables(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Send whole tables [B, pages]."""
        for table, host in ((self.table, blocks), (self.rows, rows)):
            table.copy_(self._on_host(host), non_blocking=True)

    def _on_host(self, values: torch.Tensor) -> torch.Tensor:
        return values.pin_memory() if self.device.type == "cuda" else values


class StepPlan(Plan):
    """A decode step's plan in a :class:`StepMemory`. Its sizes are those of requests at their full length."""

    def __init__(self, *arguments: Any, memory: StepMemory) -> None:
        self.memory = memory
        memory.begin()
        super().__init__(*arguments)
        newest = [self.tables.pages(entry.stored) - 1 for entry in self.entries]
        self._last_page = self._send(newest, "newest page")
        self._last_row = self._send(self._newest_rows(), "newest row")
        evict = self._eviction
        first_recent = [entry.length - 1 - evict.recent for entry in self.entries] if evict else []
        self._recent = self._send(first_recent, "first recent")

    def take_newest(self) -> None:
        """Requests go on in the blocks and state rows of their newest tokens; what is trimmed is read before that."""
        _ = self.trims
        self.memory.table.scatter_(1, self._last_page[:, None], self.writes.blocks[:, None])
        if self.tables.stateful:
            self.memory.rows.scatter_(1, self._last_page[:, None], self._last_row[:, None])

    @cached_property
    def trims(self) -> list[Trim]:
        cut = self._cuts[0] if self._cuts else None
        if cut is None or self._eviction is None:
            return []
        pages = self.tables.pages(cut.stored)
        blocks, rows = (table[:, :pages].clone() for table in (self.memory.table, self.memory.rows))
        return [Trim(blocks, rows, cut.stored, cut.kept, self._eviction.sink, self._recent)]

    def upload(self, requests: Sequence[RequestId]) -> None:
        """Send this step's values; and the tables, unless all that happened since the last upload was its step."""
        lengths = [entry.length for entry in self.entries]
        if self.memory.known != (requests, self.tables.changes, [length - 1 for length in lengths]):
            self.memory.send_tables(self._full_table("blocks"), self._full_table("rows"))
        self.memory.known = requests, self.tables.changes, lengths
        self.memory.flush()

    @property
    def rebases(self) -> dict[int, float]:
        """What stored mass is multiplied by ahead of the graph, by place."""
        updates = [mass.counted for mass in self._masses]
        return {i: update.rebase for i, update in enumerate(updates) if update is not None and update.rebase}

    @cached_property
    def mass(self) -> MassRows:
        rows = super().mass
        return MassRows(rows.table, rows.unit, {}, rows.clear)

    @cached_property
    def row_table(self) -> torch.Tensor:
        return self.memory.rows if self.tables.stateful else self.memory.table

    def _full_table(self, name: str) -> torch.Tensor:
        """Blocks or rows [B, pages] before the call trimmed its requests."""
        table = torch.full((self.memory.batch, self.memory.pages), int(NULL_BLOCK), dtype=torch.int64)
        for row, entry, cut in zip(table, self.entries, self._cuts, strict=True):
            held = getattr(entry if cut is None else cut, name)
            row[: len(held)] = torch.tensor(held, dtype=torch.int64)
        return table

    def _block_table(self) -> torch.Tensor:
        return self.memory.table

    def _filled(self, blocks: list[BlockId]) -> list[BlockId]:
        return [*blocks, *[NULL_BLOCK] * (self.memory.batch - len(blocks))]

    def _entered(self, rows: Sequence[BlockId]) -> Sequence[BlockId]:
        return [*rows, *[NULL_BLOCK] * (self.memory.batch - len(rows))]

    def _longest(self, pages: list[int]) -> int:
        return self.memory.pages

    def _most_pages(self, budget: Budget, widths: list[int]) -> int:
        return sum(budget.window(pages) for pages in self.memory.limits)

    def _scored(self, widths: list[int], any_scored: bool) -> list[int]:
        return list(range(len(widths))) if any_scored else []

    def _scale(self, mass: RequestMass) -> float:
        rebase = mass.counted.rebase if mass.counted else None
        return mass.scale / rebase if rebase else mass.scale  # what is rebased ahead of the graph

    def _send(self, values: Host, name: str) -> torch.Tensor:
        tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.int64)
        return self.memory.put(name, tensor)
