"""The pages that a step scores, in the forms in which backends read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from kvsieve.paging.allocator import NULL_BLOCK
from kvsieve.paging.pool import LayerPool


@dataclass(frozen=True)
class Window:
    """The window pages of the requests that are scored, padded to the widest.

    ``requests`` [Bs]: their places in the batch. ``table``, ``row_table`` [B, S], ``lengths`` [B]: of the whole batch.
    ``widths`` [Bs]: window pages of each; the first is page ``sink``. ``width``: as many columns as the window has.
    ``topk`` [Bs]: pages to choose, 0 for requests under budget. ``mass_scale`` [Bs, 1]: what stored mass is multiplied
    by; None without mass. ``settled``: no page that the call itself fills or writes to is among them. ``most_pages``:
    what ``total_pages`` may be where the same launch serves other steps.
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
    settled: bool = False
    most_pages: int | None = None
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

    def by_segment(self, pool: LayerPool) -> SegmentWindow:
        """The window for layers with pools like this one, made once."""
        key = pool.num_kv_heads, pool.k.shape[1], pool.rows, pool.page_major
        if key not in self._flat:
            self._flat[key] = SegmentWindow(self, pool)
        return self._flat[key]


class SegmentWindow:
    """A window per segment, ``N = H * Bs`` head-major, as indices into flat storage (:meth:`LayerPool.flat`).

    Every tensor is [N, W], W at least 2: a width of 1 would be compiled apart; ``mass_scale`` is [N, 1].
    """

    def __init__(self, window: Window, pool: LayerPool) -> None:
        self._window, self._pool = window, pool

    @cached_property
    def valid(self) -> torch.Tensor:
        return self._repeated(self._window.valid)

    @cached_property
    def blocks(self) -> torch.Tensor:
        return self._index(self._window.blocks, self._pool.k.shape[1])

    @cached_property
    def rows(self) -> torch.Tensor:
        return self._index(self._window.rows, self._pool.rows)

    @cached_property
    def position(self) -> torch.Tensor:
        return self._repeated(self._window.position)

    @cached_property
    def age(self) -> torch.Tensor:
        return self._repeated(self._window.age)

    @cached_property
    def mass_scale(self) -> torch.Tensor:
        assert self._window.mass_scale is not None
        return self._window.mass_scale.repeat(self._pool.num_kv_heads, 1)

    def _index(self, places: torch.Tensor, size: int) -> torch.Tensor:
        places = self._pool.places(_two_wide(places)[:, None], size)  # [Bs, H, W]
        return places.transpose(0, 1).flatten(0, 1)

    def _repeated(self, values: torch.Tensor) -> torch.Tensor:
        return _two_wide(values).repeat(self._pool.num_kv_heads, 1)


def _two_wide(values: torch.Tensor) -> torch.Tensor:
    """[Bs, W] with a padded column if W is 1: index 0 is the null block or row, False is not valid."""
    return values if values.shape[1] > 1 else torch.nn.functional.pad(values, (0, 1))
