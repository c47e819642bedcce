"""What a call does to every layer, worked out once on the host: where tokens go, who is scored, how many pages stay.

Tensors are built from integers the host knows, so no backend ever waits for the device. A plan belongs to its call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from kvsieve.budget import Budget
from kvsieve.mass import RequestMass
from kvsieve.paging.allocator import NULL_BLOCK, BlockId
from kvsieve.paging.slots import Trim
from kvsieve.paging.table import Cut, RequestId, RequestTables
from kvsieve.retention import Evict
from kvsieve.window import Window

Host = torch.Tensor | Sequence[int]
"""Integers, or a tensor on the CPU."""


@dataclass(frozen=True)
class Writes:
    """Where the call's tokens go: ``blocks`` and ``offsets`` [T]; blocks of pages it fills; state rows that enter.

    ``slots``, where tokens are evicted: state rows, offsets and positions in the request [T]. ``step``: one token of
    each request.
    """

    blocks: torch.Tensor
    offsets: torch.Tensor
    filled: torch.Tensor
    entered: torch.Tensor
    slots: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    step: bool = False


@dataclass(frozen=True)
class Rows:
    """The requests of a call: tokens stored before, new, stored after (host), and their block table [B, S]."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    table: torch.Tensor
    lengths_tensor: torch.Tensor


@dataclass(frozen=True)
class Pages:
    """Blocks and state rows [S] of one request."""

    blocks: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class MassRows:
    """Attention mass of a call's requests: state rows [B, S], what a mass of 1 that the step adds is stored as
    (``unit`` [B] float32), and what stored mass is multiplied by beforehand, by place in the batch (host). ``clear``:
    all of that is 0."""

    table: torch.Tensor
    unit: torch.Tensor
    rebase: dict[int, float]
    clear: bool = False


@dataclass(frozen=True)
class Quota:
    """How many pages each request of a step attends under one budget.

    ``pages`` [B] (S), ``count`` [B] (pages attended), ``width`` the largest count, ``tokens`` those in the attended
    pages of all requests, ``table`` [B, S] their block table. ``window`` is None when no request is scored; ``sparse``
    says whether any request leaves pages out.
    """

    sink: int
    recent: int
    pages: torch.Tensor
    count: torch.Tensor
    width: int
    sparse: bool
    window: Window | None
    tokens: int = 0
    table: torch.Tensor | None = None

    @cached_property
    def everything(self) -> torch.Tensor:
        """The list of a request of which no page is left out, made once for all layers: int64 [width]."""
        return torch.arange(self.width, device=self.count.device)


class Plan:
    """The shared part of a call on one device."""

    def __init__(
        self,
        tables: RequestTables,
        requests: Sequence[RequestId],
        counts: Sequence[int],
        entered: Sequence[BlockId],
        device: torch.device,
        masses: Sequence[RequestMass] = (),
        eviction: Evict | None = None,
        cuts: Sequence[Cut | None] = (),
    ) -> None:
        self.page_size, self.device = tables.page_size, device
        self.tables, self.entries = tables, [tables[request] for request in requests]
        self._eviction, self._cuts, self._masses = eviction, cuts, masses
        lengths = tuple(entry.stored for entry in self.entries)
        starts = tuple(length - count for length, count in zip(lengths, counts, strict=True))
        self.seen = sum(entry.length for entry in self.entries)
        """Tokens of the call's requests, whether or not they are stored."""
        self.rows = Rows(starts, tuple(counts), lengths, self._block_table(), self._send(lengths, "lengths"))
        self.writes = self._writes(entered)
        self._quotas: dict[tuple[Budget, bool, bool], Quota] = {}

    @cached_property
    def mass(self) -> MassRows:
        """Where the attention mass of the call's requests is stored, and in which unit."""
        updates = [mass.counted for mass in self._masses]
        units = [update.unit if update else 0.0 for update in updates]
        rebase = {i: update.rebase for i, update in enumerate(updates) if update and update.rebase is not None}
        clear = len(rebase) == len(updates) and not any(rebase.values())
        return MassRows(self.row_table, self._send(_floats(units), "units"), rebase, clear)

    @cached_property
    def row_table(self) -> torch.Tensor:
        """State rows of the call's requests [B, S]; without state nobody reads them."""
        return self._send(self._host_table(self.tables.rows), "rows") if self.tables.stateful else self.rows.table

    @cached_property
    def trims(self) -> list[Trim]:
        """What is evicted before the call writes: requests that lose equally many tokens together."""
        sizes = sorted({(cut.stored, cut.kept) for cut in self._cuts if cut})
        return [self._trim(*size) for size in sizes]

    def _trim(self, stored: int, kept: int) -> Trim:
        assert self._eviction is not None
        cuts = [(i, cut) for i, cut in enumerate(self._cuts) if cut and (cut.stored, cut.kept) == (stored, kept)]
        recent = [self.entries[i].evicted + self.rows.starts[i] - self._eviction.recent for i, _ in cuts]
        blocks, rows = (torch.tensor([getattr(cut, name) for _, cut in cuts]) for name in ("blocks", "rows"))
        return Trim(
            self._send(blocks, f"blocks of {stored}"),
            self._send(rows, f"rows of {stored}"),
            stored,
            kept,
            self._eviction.sink,
            self._send(recent, f"recent of {stored}"),
        )

    def pages(self, place: int) -> Pages:
        """The pages of a request."""
        return Pages(self.rows.table[place], self.mass.table[place])

    def before(self, place: int) -> Pages:
        """The pages of a request before the call trimmed it."""
        cut = self._cuts[place] if self._cuts else None
        if cut is None:
            return self.pages(place)
        return Pages(self._send(cut.blocks, "blocks before"), self._send(cut.rows, "rows before"))

    def quota(self, budget: Budget, scores: bool, stateful: bool) -> Quota:
        """The quota of a decode step under ``budget`` for a flow that scores and keeps state, or not."""
        key = budget, scores, stateful
        if key not in self._quotas:
            self._quotas[key] = self._quota(budget, scores, stateful)
        return self._quotas[key]

    def _block_table(self) -> torch.Tensor:
        return self._send(self._host_table(self.tables.blocks), "blocks")

    def _host_table(self, table: torch.Tensor) -> torch.Tensor:
        slots = torch.tensor([entry.slot for entry in self.entries])
        return table[slots, : max(self.tables.pages(entry.stored) for entry in self.entries)]

    def _writes(self, entered: Sequence[BlockId]) -> Writes:
        new = self._send(self._entered(entered), "entered")
        if all(count == 1 for count in self.rows.counts):
            return self._step_writes(new)
        p, counts = self.page_size, torch.tensor(self.rows.counts)
        request = torch.repeat_interleave(torch.arange(len(counts)), counts)
        first = torch.cumsum(counts, 0) - counts
        token = torch.arange(len(request)) - first[request] + torch.tensor(self.rows.starts)[request]
        blocks, offsets = self._host_table(self.tables.blocks)[request, token // p], token % p
        rows = self._host_table(self.tables.rows)[request, token // p]
        positions = token + torch.tensor([entry.evicted for entry in self.entries])[request]
        return self._sent_writes(blocks, offsets, blocks[offsets == p - 1], rows, positions, new)

    def _step_writes(self, entered: torch.Tensor) -> Writes:
        """One token per request: few integers, and no tensor op is as fast."""
        p = self.page_size
        blocks = [entry.blocks[-1] for entry in self.entries]
        rows = self._newest_rows()
        offsets = [start % p for start in self.rows.starts]
        full = [block for block, offset in zip(blocks, offsets, strict=True) if offset == p - 1]
        positions = [entry.length - 1 for entry in self.entries]
        return replace(self._sent_writes(blocks, offsets, self._filled(full), rows, positions, entered), step=True)

    def _newest_rows(self) -> list[BlockId]:
        """State rows of the requests' last pages; null without state."""
        return [entry.rows[-1] if entry.rows else NULL_BLOCK for entry in self.entries]

    def _sent_writes(
        self, blocks: Host, offsets: Host, filled: Host, rows: Host, positions: Host, entered: torch.Tensor
    ) -> Writes:
        sent = self._send(offsets, "new offsets")
        slots = None
        if self._eviction is not None:
            slots = self._send(rows, "new rows"), sent, self._send(positions, "new positions")
        return Writes(self._send(blocks, "new blocks"), sent, self._send(filled, "filled"), entered, slots)

    def _filled(self, blocks: list[BlockId]) -> list[BlockId]:
        """The blocks that a step summarizes."""
        return blocks

    def _entered(self, rows: Sequence[BlockId]) -> Sequence[BlockId]:
        """The state rows that a step begins."""
        return rows

    def _quota(self, budget: Budget, scores: bool, stateful: bool) -> Quota:
        pages = [self.tables.pages(length) for length in self.rows.lengths]
        counts = [min(s, budget.kept(s)) for s in pages]
        needed = [scores and (s > count or stateful) for s, count in zip(pages, counts, strict=True)]
        widths = [budget.window(s) if need else 0 for s, need in zip(pages, needed, strict=True)]
        topk = [count - budget.sink - budget.recent if s > count else 0 for s, count in zip(pages, counts, strict=True)]
        longest = self._longest(pages)
        kept = budget.kept(longest)
        scored = self._scored(widths, scores and (longest > kept or stateful) and budget.window(longest) > 0)
        window = None
        if scored:
            window = self._window(budget, scored, [widths[i] for i in scored], [topk[i] for i in scored], longest)
        return Quota(
            budget.sink,
            budget.recent,
            self._send(pages, "pages"),
            self._send(counts, f"count {budget}"),
            min(longest, kept),
            longest > kept,
            window,
            # The last page, the only one that may be partial, is always attended.
            sum(self.rows.lengths) - self.page_size * (sum(pages) - sum(counts)),
            self.rows.table,
        )

    def _window(self, budget: Budget, scored: list[int], widths: list[int], topk: list[int], longest: int) -> Window:
        kept = budget.kept(longest)
        return Window(
            requests=self._send(scored, "scored"),
            table=self.rows.table,
            row_table=self.row_table,
            lengths=self.rows.lengths_tensor,
            widths=self._send(widths, f"widths {budget}"),
            width=budget.window(longest),
            sink=budget.sink,
            page_size=self.page_size,
            topk=self._send(topk, f"topk {budget}"),
            max_topk=kept - budget.sink - budget.recent if longest > kept else 0,
            total_pages=sum(widths),
            mass_scale=self._scales(scored),
            settled=budget.recent > 0,
            most_pages=self._most_pages(budget, widths),
        )

    def _most_pages(self, budget: Budget, widths: list[int]) -> int:
        """Window pages of all requests; of a plan that others follow in one graph, as many as there may be."""
        return sum(widths)

    def _longest(self, pages: list[int]) -> int:
        """Pages of the longest request. What is kept of a request, and its window, grow with it."""
        return max(pages)

    def _scored(self, widths: list[int], any_scored: bool) -> list[int]:
        """Places of the requests that are scored, whose windows have so many pages."""
        return [place for place, width in enumerate(widths) if width]

    def _scales(self, scored: list[int]) -> torch.Tensor | None:
        if not self._masses:
            return None
        return self._send(_floats([self._scale(self._masses[i]) for i in scored]), "scales")[:, None]

    def _scale(self, mass: RequestMass) -> float:
        return mass.scale

    def _send(self, values: Host, name: str) -> torch.Tensor:
        """Host values on the plan's device; a CUDA copy is queued, never waited for. One name, one use."""
        tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.int64)
        if self.device.type == "cpu":
            return tensor
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.contiguous().pin_memory().to(self.device, non_blocking=True)


def _floats(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)
