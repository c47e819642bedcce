"""What a call does to every layer, worked out once on the host: where tokens go, who is scored, how many pages stay.

Tensors are built from integers the host knows, so no backend ever waits for the device. A plan belongs to its call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from kvsieve.budget import Budget
from kvsieve.mass import RequestMass
from kvsieve.paging.allocator import NULL_BLOCK, BlockId
from kvsieve.paging.pool import flat_places
from kvsieve.paging.slots import Trim
from kvsieve.paging.table import Cut, RequestId, RequestTables
from kvsieve.retention import Evict


@dataclass(frozen=True)
class Writes:
    """Where the call's tokens go: ``blocks`` and ``offsets`` [T]; blocks of pages it fills; state rows that enter.

    ``slots``, where tokens are evicted: state rows, offsets and positions in the request [T].
    """

    blocks: torch.Tensor
    offsets: torch.Tensor
    filled: torch.Tensor
    entered: torch.Tensor
    slots: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


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
    (``unit`` [B] float32), and what stored mass is multiplied by beforehand, by place in the batch (host)."""

    table: torch.Tensor
    unit: torch.Tensor
    rebase: dict[int, float]


@dataclass(frozen=True)
class Window:
    """The window pages of the requests that are scored, padded to the widest.

    ``requests`` [Bs]: their places in the batch. ``table``, ``row_table`` [B, S], ``lengths`` [B]: of the whole batch.
    ``widths`` [Bs]: window pages of each; the first is page ``sink``. ``width``: as many columns as the window has.
    ``topk`` [Bs]: pages to choose, 0 for requests under budget. ``mass_scale`` [Bs, 1]: what stored mass is multiplied
    by; None without mass.
    """

    requests: torch.Tensor
    table: torch.Tensor
    row_table: torch.Tensor
    lengths: torch.Tensor
    widths: torch.Tensor
    width: int
    sink: int
    page_size: int
    topk: torch.Tensor
    max_topk: int
    total_pages: int
    mass_scale: torch.Tensor | None = None
    _flat: dict[tuple[int, int, int, bool], SegmentWindow] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def valid(self) -> torch.Tensor:
        """Which columns are pages: bool [Bs, W]."""
        return torch.arange(self.width, device=self.widths.device) < self.widths[:, None]

    @cached_property
    def blocks(self) -> torch.Tensor:
        """Blocks [Bs, W], null where not valid."""
        return self._columns(self.table)

    @cached_property
    def rows(self) -> torch.Tensor:
        """State rows [Bs, W], null where not valid."""
        return self.blocks if self.row_table is self.table else self._columns(self.row_table)

    @cached_property
    def position(self) -> torch.Tensor:
        """Positions of the pages' first tokens: float32 [Bs, W]."""
        return self._positions.float().expand(len(self.requests), -1)

    @cached_property
    def age(self) -> torch.Tensor:
        """Tokens since the pages' last ones: float32 [Bs, W]."""
        return (self.lengths[self.requests, None] - self.page_size - self._positions).float()

    @cached_property
    def _positions(self) -> torch.Tensor:
        return (self.sink + torch.arange(self.width, device=self.widths.device)) * self.page_size

    def _columns(self, table: torch.Tensor) -> torch.Tensor:
        columns = table[self.requests, self.sink : self.sink + self.width]
        return torch.where(self.valid, columns, int(NULL_BLOCK))

    def by_segment(self, heads: int, blocks: int, rows: int, page_major: bool = False) -> SegmentWindow:
        """The window for layers with so many KV heads and pools of so many blocks and state rows, made once."""
        key = heads, blocks, rows, page_major
        if key not in self._flat:
            self._flat[key] = SegmentWindow(self, heads, blocks, rows, page_major)
        return self._flat[key]


class SegmentWindow:
    """A window per segment, ``N = H * Bs`` head-major, as indices into flat storage (:meth:`LayerPool.flat`).

    Every tensor is [N, W], W at least 2: a width of 1 would be compiled apart; ``mass_scale`` is [N, 1].
    """

    def __init__(self, window: Window, heads: int, num_blocks: int, num_rows: int, page_major: bool) -> None:
        self._window, self._heads, self._num_blocks, self._num_rows = window, heads, num_blocks, num_rows
        self._page_major = page_major

    @cached_property
    def valid(self) -> torch.Tensor:
        return self._repeated(self._window.valid)

    @cached_property
    def blocks(self) -> torch.Tensor:
        return self._index(self._window.blocks, self._num_blocks)

    @cached_property
    def rows(self) -> torch.Tensor:
        return self._index(self._window.rows, self._num_rows)

    @cached_property
    def position(self) -> torch.Tensor:
        return self._repeated(self._window.position)

    @cached_property
    def age(self) -> torch.Tensor:
        return self._repeated(self._window.age)

    @cached_property
    def mass_scale(self) -> torch.Tensor:
        assert self._window.mass_scale is not None
        return self._window.mass_scale.repeat(self._heads, 1)

    def _index(self, places: torch.Tensor, size: int) -> torch.Tensor:
        places = flat_places(_two_wide(places)[:, None], self._heads, size, self._page_major)  # [Bs, H, W]
        return places.transpose(0, 1).flatten(0, 1)

    def _repeated(self, values: torch.Tensor) -> torch.Tensor:
        return _two_wide(values).repeat(self._heads, 1)


def _two_wide(values: torch.Tensor) -> torch.Tensor:
    """[Bs, W] with a padded column if W is 1: index 0 is the null block or row, False is not valid."""
    return values if values.shape[1] > 1 else torch.nn.functional.pad(values, (0, 1))


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
        self._eviction, self._cuts = eviction, cuts
        entries = [tables[request] for request in requests]
        lengths = tuple(entry.stored for entry in entries)
        self._evicted = [entry.evicted for entry in entries]
        starts = tuple(length - count for length, count in zip(lengths, counts, strict=True))
        slots = torch.tensor([entry.slot for entry in entries])
        self._last_blocks = [entry.blocks[-1] if entry.blocks else NULL_BLOCK for entry in entries]
        self._stateful = tables.stateful
        self.seen = sum(entry.length for entry in entries)
        """Tokens of the call's requests, whether or not they are stored."""
        width = max(tables.pages(length) for length in lengths)
        self._block_table = tables.blocks[slots, :width]
        self._row_table = tables.rows[slots, :width]
        self.rows = Rows(starts, tuple(counts), lengths, self._send(self._block_table), self._send(lengths))
        self.writes = self._writes(entered)
        self._masses = masses
        self._quotas: dict[tuple[Budget, bool, bool], Quota] = {}

    @cached_property
    def mass(self) -> MassRows:
        """Where the attention mass of the call's requests is stored, and in which unit."""
        updates = [mass.counted for mass in self._masses]
        units = torch.tensor([update.unit if update else 0.0 for update in updates], dtype=torch.float32)
        rebase = {i: update.rebase for i, update in enumerate(updates) if update and update.rebase is not None}
        return MassRows(self.row_table, self._send(units), rebase)

    @cached_property
    def row_table(self) -> torch.Tensor:
        """State rows of the call's requests [B, S]."""
        return self._send(self._row_table)

    @cached_property
    def trims(self) -> list[Trim]:
        """What is evicted before the call writes: requests that lose equally many tokens together."""
        sizes = sorted({(cut.stored, cut.kept) for cut in self._cuts if cut})
        return [self._trim(*size) for size in sizes]

    def _trim(self, stored: int, kept: int) -> Trim:
        assert self._eviction is not None
        cuts = [(i, cut) for i, cut in enumerate(self._cuts) if cut and (cut.stored, cut.kept) == (stored, kept)]
        recent = [self._evicted[i] + self.rows.starts[i] - self._eviction.recent for i, _ in cuts]
        blocks, rows = (torch.tensor([getattr(cut, name) for _, cut in cuts]) for name in ("blocks", "rows"))
        return Trim(
            self._send(blocks), self._send(rows), stored, kept, self._eviction.sink, self._send(torch.tensor(recent))
        )

    def pages(self, place: int) -> Pages:
        """The pages of a request."""
        return Pages(self.rows.table[place], self.mass.table[place])

    def before(self, place: int) -> Pages:
        """The pages of a request before the call trimmed it."""
        cut = self._cuts[place] if self._cuts else None
        return Pages(self._send(cut.blocks), self._send(cut.rows)) if cut else self.pages(place)

    def quota(self, budget: Budget, scores: bool, stateful: bool) -> Quota:
        """The quota of a decode step under ``budget`` for a flow that scores and keeps state, or not."""
        key = budget, scores, stateful
        if key not in self._quotas:
            self._quotas[key] = self._quota(budget, scores, stateful)
        return self._quotas[key]

    def _writes(self, entered: Sequence[BlockId]) -> Writes:
        p = self.page_size
        if self._eviction is None and all(count == 1 for count in self.rows.counts):
            # a step: few integers, and no tensor op is as fast
            places = [start % p for start in self.rows.starts]
            full = [block for block, place in zip(self._last_blocks, places, strict=True) if place == p - 1]
            return Writes(self._send(self._last_blocks), self._send(places), self._send(full), self._send(entered))
        counts = torch.tensor(self.rows.counts)
        request = torch.repeat_interleave(torch.arange(len(counts)), counts)
        first = torch.cumsum(counts, 0) - counts
        token = torch.arange(len(request)) - first[request] + torch.tensor(self.rows.starts)[request]
        blocks, offsets = self._block_table[request, token // p], token % p
        filled = blocks[offsets == p - 1]
        slots = None
        if self._eviction is not None:
            rows, positions = self._row_table[request, token // p], token + torch.tensor(self._evicted)[request]
            slots = self._send(rows), self._send(offsets), self._send(positions)
        return Writes(self._send(blocks), self._send(offsets), self._send(filled), self._send(entered), slots)

    def _quota(self, budget: Budget, scores: bool, stateful: bool) -> Quota:
        pages = [-(-length // self.page_size) for length in self.rows.lengths]
        kept = [budget.kept(s) for s in pages]
        counts = [min(s, keep) for s, keep in zip(pages, kept, strict=True)]
        widths = [budget.window(s) for s in pages]
        scored = [i for i, width in enumerate(widths) if scores and width and (pages[i] > kept[i] or stateful)]
        topk = [kept[i] - budget.sink - budget.recent if pages[i] > kept[i] else 0 for i in scored]
        window = self._window(budget, scored, [widths[i] for i in scored], topk) if scored else None
        return Quota(
            budget.sink,
            budget.recent,
            self._send(pages),
            self._send(counts),
            max(counts),
            counts != pages,
            window,
            # The last page, the only one that may be partial, is always attended.
            sum(self.rows.lengths) - self.page_size * (sum(pages) - sum(counts)),
            self.rows.table,
        )

    def _window(self, budget: Budget, scored: list[int], widths: list[int], topk: list[int]) -> Window:
        return Window(
            requests=self._send(scored),
            table=self.rows.table,
            row_table=self.row_table if self._stateful else self.rows.table,  # without state nobody reads them
            lengths=self.rows.lengths_tensor,
            widths=self._send(widths),
            width=max(widths),
            sink=budget.sink,
            page_size=self.page_size,
            topk=self._send(topk),
            max_topk=max(topk),
            total_pages=sum(widths),
            mass_scale=self._scales(scored),
        )

    def _scales(self, scored: list[int]) -> torch.Tensor | None:
        if not self._masses:
            return None
        return self._send(torch.tensor([[self._masses[i].scale] for i in scored], dtype=torch.float32))

    def _send(self, values: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """Host values on the plan's device; a CUDA copy is queued, never waited for."""
        tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.int64)
        if self.device.type == "cpu":
            return tensor
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.contiguous().pin_memory().to(self.device, non_blocking=True)
