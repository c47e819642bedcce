"""The narrow interface of a backend: summarize, score, select, attend, prefill. Nothing else knows how they run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvsieve.errors import ConfigError
from kvsieve.graph import FlowGraphs
from kvsieve.mass import AttentionMass
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.slots import Trim, occupy, trim
from kvsieve.plan import MassRows, Quota, Rows, Writes
from kvsieve.window import Window

Increment = Any
"""What a step adds to the mass of the selected tokens: float32 [B, H, K, p], 0 for tokens that are not there; or what a
backend makes that of."""
PHASES = ("write", "summarize", "score", "select", "attend", "mass")
"""What a step does to a layer, in order."""


@dataclass(frozen=True)
class AttentionOptions:
    """How logits are made: ``scale``, optional ``softcap`` and sink logits ``[H, G]``. Honoured by every backend.

    ``mass``: the attention mass that is wanted, if any. ``mass_rows``: where it is to be added; a backend that does so
    in the same pass returns no increment.
    """

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    mass: AttentionMass | None = None
    mass_rows: MassRows | None = None


@dataclass(frozen=True)
class Selection:
    """Pages attended per segment: ``pages`` [B, H, K] ascending, of which the first ``count`` [B] are real."""

    pages: torch.Tensor
    count: torch.Tensor
    _blocks: list[torch.Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    def blocks(self, table: torch.Tensor) -> torch.Tensor:
        """Blocks [B, H, K] of the listed pages by the block table [B, S]; the first entry's where nothing is listed."""
        if not self._blocks:
            pages = torch.where(self.listed(), self.pages, 0)
            self._blocks.append(torch.gather(table[:, None].expand(-1, self.pages.shape[1], -1), 2, pages))
        return self._blocks[0]

    def in_blocks(self, blocks: torch.Tensor) -> Selection:
        """The same selection, whose blocks [B, H, K] are known."""
        same = Selection(self.pages, self.count)
        same._blocks.append(blocks)
        return same

    def listed(self) -> torch.Tensor:
        """Which entries of ``pages`` are real: bool [B, 1, K]."""
        return (torch.arange(self.pages.shape[-1], device=self.count.device) < self.count[:, None])[:, None]

    def tokens(self, page_size: int, lengths: torch.Tensor) -> torch.Tensor:
        """Bool [B, H, K, p]: tokens that exist, in listed pages. ``lengths`` [B]."""
        offsets = torch.arange(page_size, device=self.pages.device)
        position = self.pages[..., None] * page_size + offsets
        return (position < lengths[:, None, None, None]) & self.listed()[..., None]


@dataclass(frozen=True)
class Tuning:
    """Tilings of a phase's kernels, a row (pages, warps, stages, heads) a kernel: by rule, and the best of ``tried``,
    each with the seconds of a launch."""

    phase: str
    by_rule: tuple[tuple[int, ...], ...]
    by_rule_seconds: float
    best: tuple[tuple[int, ...], ...]
    seconds: float
    tried: int


class Backend(ABC):
    """Runs a flow's graphs and the attention over a selection on a paged pool. Batched over (request, KV head)."""

    name: str
    page_major = False
    """How pools lie in memory (:class:`LayerPool`)."""

    def kernels(self, pool: LayerPool) -> dict[str, str]:
        """What runs each phase on a layer's pool, for reports."""
        return dict.fromkeys(PHASES, "PyTorch ops")

    @abstractmethod
    def refusal(self, graphs: FlowGraphs) -> str | None:
        """Why this backend cannot run a flow; None if it can. There is no silent fallback."""

    def check_device(self, device: torch.device) -> None:
        """Refuse a device that the backend does not run on.

        Raises:
            ConfigError: such a device.
        """
        return

    @abstractmethod
    def prepare(self, graphs: FlowGraphs, device: torch.device) -> Any:
        """The flow in the form that ``summarize`` and ``score`` run."""

    def write(self, pool: LayerPool, writes: Writes, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the call's tokens: k [T, H, D], v [T, H, Dv]; where tokens are evicted, new ones in their slots."""
        pool.write(writes.blocks, writes.offsets, k, v)
        if writes.slots is not None:
            occupy(pool, *writes.slots)

    def enter(self, pool: LayerPool, rows: torch.Tensor) -> None:
        """Start the state of pages that entered a request: state rows [C], null ones among them."""
        pool.enter(rows)

    def store(self, flow: Any, pool: LayerPool, writes: Writes, k: torch.Tensor, v: torch.Tensor) -> None:
        """:meth:`write`, then :meth:`summarize` the pages that it fills, if there is a flow."""
        self.write(pool, writes, k, v)
        if flow is not None:
            self.summarize(flow, pool, writes.filled)

    def trim(self, pool: LayerPool, one: Trim) -> None:
        """Evict tokens of requests that store too many; the others move together (:mod:`kvsieve.paging.slots`)."""
        trim(pool, one)

    @abstractmethod
    def summarize(self, flow: Any, pool: LayerPool, blocks: torch.Tensor) -> None:
        """Compute and store the summary fields of full pages, given their blocks [C]."""

    @abstractmethod
    def score(self, flow: Any, q: torch.Tensor, pool: LayerPool, window: Window) -> torch.Tensor:
        """Score window pages and write new state: q [Bs, H, G, D] -> float32 [Bs, H, W] (padding undefined)."""

    def tune(
        self,
        flow: Any,
        q: torch.Tensor,
        pool: LayerPool,
        window: Window | None,
        blocks: torch.Tensor,
        seconds: Callable[[str], float | None],
    ) -> tuple[Tuning, ...]:
        """Try other tilings of a flow's kernels for calls like these, and keep the best.

        ``seconds``: times the ``score`` or ``summarize`` of these arguments; None if the GPU cannot hold its kernels.

        Raises:
            ConfigError: nothing is generated for this backend.
        """
        raise ConfigError(f"tuning: expected backend triton, whose kernels have tilings, received {self.name}")

    @abstractmethod
    def select(self, scores: torch.Tensor | None, quota: Quota, heads: int) -> Selection:
        """Sink pages, the best of the window, recent pages; everything for requests under budget.

        Higher score first; -0 equals +0; NaN below -inf; the older page at equal rank. Exact and deterministic.
        """

    @abstractmethod
    def attend(
        self, q: torch.Tensor, pool: LayerPool, rows: Rows, selection: Selection, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor, Increment | None]:
        """Exact attention over the selection.

        q [B, H, G, D] -> out [B, H, G, Dv] in q's dtype, lse [B, H, G] float32, and with ``options.mass`` what
        :meth:`add_mass` takes, unless it has been added.
        """

    def add_mass(self, pool: LayerPool, rows: Rows, mass: MassRows, selection: Selection, increment: Increment) -> None:
        """Add what a step's attention gave the selected tokens to their stored mass.

        What the requests have stored is rebased first where ``mass`` says so.
        """
        self.rebase(pool, rows, mass)
        pages = torch.where(selection.listed(), selection.pages, 0)
        places = torch.gather(mass.table[:, None].expand(-1, pages.shape[1], -1), 2, pages)
        pool.add_mass(places, increment * mass.unit[:, None, None, None])

    @staticmethod
    def rebase(pool: LayerPool, rows: Rows, mass: MassRows) -> None:
        """Rebase the stored mass of the requests where ``mass`` says so."""
        if mass.clear:
            pool.clear_mass(mass.table)
            return
        for place, factor in mass.rebase.items():
            stored = -(-rows.lengths[place] // pool.page_size)
            pool.rebase_mass(mass.table[place, :stored], factor)

    @abstractmethod
    def prompt_mass(
        self, q: torch.Tensor, pool: LayerPool, blocks: torch.Tensor, first: int, options: AttentionOptions
    ) -> torch.Tensor:
        """Decayed column sums of the causal attention of consecutive prompt queries, for ``options.mass``.

        q [n, H, G, D] at positions ``first ..`` of the request whose pages lie in ``blocks`` [S] -> float32
        [H, first + n]: the mass of each token after the last query, of none before the first.
        """

    @abstractmethod
    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: LayerPool, rows: Rows, options: AttentionOptions
    ) -> torch.Tensor:
        """Dense causal attention of all new tokens: q [T, H, G, D], k [T, H, D], v [T, H, Dv] -> out [T, H, G, Dv].

        The tokens are already in the pool; ``k`` and ``v`` spare a gather when a request has no past.
        """
