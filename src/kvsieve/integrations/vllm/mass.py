"""Attention mass of vLLM's requests: how far each one's stored mass has decayed, and which queries count in a step.

The arithmetic is that of :class:`kvsieve.mass.MassLedger`, for a batch at a time. The store holds ``mass / decay **
age``; a step multiplies nothing, and rebases before numbers grow too large.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvsieve.integrations.vllm.plan import Batch, BatchPlan
from kvsieve.integrations.vllm.requests import StateRows
from kvsieve.mass import LARGEST_UNIT, AttentionMass, MassUpdate
from kvsieve.plan import MassRows


@dataclass(frozen=True)
class Prompt:
    """Prompt queries of one request.

    ``tokens``: their places in the flat token axis. ``row``: the request's. ``fresh``: it has just begun. ``length``:
    its tokens, these included. ``pages``, ``rows`` [S]: its physical pages and state rows. ``update``: what the queries
    do to its mass; None where they are kept, as the last of a prompt may count later.
    """

    tokens: slice
    row: int
    fresh: bool
    length: int
    pages: torch.Tensor
    rows: torch.Tensor
    update: MassUpdate | None


@dataclass(frozen=True)
class StepMass:
    """What a step does to mass.

    ``prompts`` of this step; ``committed``: kept queries of requests that begin to decode. Of the decoding requests:
    ``scale`` [R, 1] of stored mass for scores, and how their own attention is added (``rows``), if it ``counts``.
    """

    prompts: list[Prompt]
    committed: list[Prompt]
    scale: torch.Tensor | None
    rows: MassRows | None
    counts: bool = False

    def to(self, device: torch.device) -> StepMass:
        """The same on another device."""
        prompts, committed = (
            [replace(one, pages=one.pages.to(device), rows=one.rows.to(device)) for one in some]
            for some in (self.prompts, self.committed)
        )
        rows = self.rows
        if rows is not None:
            rows = replace(rows, table=rows.table.to(device), unit=rows.unit.to(device))
        scale = None if self.scale is None else self.scale.to(device)
        return StepMass(prompts, committed, scale, rows, self.counts)

    def scales_after(self) -> list[float] | None:
        """What the decoding rows' stored mass is multiplied by after the step."""
        if self.rows is None or self.scale is None:
            return None
        return (1 / self.rows.unit if self.counts else self.scale[:, 0]).tolist()


class MassClock:
    """Decays that each row's store has not seen (``age``), and its queries that are kept."""

    def __init__(self, mass: AttentionMass, rows: int, page_size: int, block_size: int) -> None:
        self.mass, self.page_size, self.share = mass, page_size, block_size // page_size
        self.age = torch.zeros(rows + 1, dtype=torch.int64)
        self.kept = torch.zeros(rows + 1, dtype=torch.int64)

    def step(self, batch: Batch, plan: BatchPlan, state: StateRows) -> StepMass:
        """Account for a step; call it once a step, in order."""
        self.age[state.rows[state.new]] = 0
        self.kept[state.rows[state.new]] = 0
        decoding = 0 if plan.decoding is None else len(plan.decoding.places)
        prompts = [self._prompt(batch, state, i) for i in range(decoding, len(state.places))]
        if plan.decoding is None:
            return StepMass(prompts, [], None, None)
        begin = self.kept[state.rows[:decoding]].nonzero().flatten().tolist()
        committed = [self._commit(batch, state, i) for i in begin]
        rows = state.rows[:decoding]
        scale = self.mass.factor ** self.age[rows].to(torch.float64)
        unit, rebase = self._advance(rows, torch.ones_like(rows)) if self.mass.update == "steps" else (scale, {})
        table = state.first[:decoding, None] + torch.arange(plan.decoding.table.shape[1])
        added = MassRows(table, unit.float(), rebase)
        return StepMass(prompts, committed, scale.float()[:, None], added, self.mass.update == "steps")

    def _prompt(self, batch: Batch, state: StateRows, i: int) -> Prompt:
        place, row = int(state.places[i]), state.rows[i : i + 1]
        first, last = int(batch.starts[place]), int(batch.starts[place + 1])
        length = int(batch.lengths[place])
        update = None
        if self.mass.window is not None:
            self.kept[row] = min(self.mass.window, int(self.kept[row]) + last - first)
        elif self.mass.seed == "all":
            update = self._update(row, last - first, length - (last - first))
        return self._of(batch, state, i, slice(first, last), length, update)

    def _commit(self, batch: Batch, state: StateRows, i: int) -> Prompt:
        row, past = state.rows[i : i + 1], int(batch.lengths[state.places[i]]) - 1
        count = int(self.kept[row])
        self.kept[row] = 0
        return self._of(batch, state, i, slice(0, 0), past, self._update(row, count, past - count))

    def _of(
        self, batch: Batch, state: StateRows, i: int, tokens: slice, length: int, update: MassUpdate | None
    ) -> Prompt:
        page = torch.arange(-(-length // self.page_size))
        blocks = batch.blocks[state.places[i]].to(torch.int64)
        physical = blocks[page // self.share] * self.share + page % self.share
        return Prompt(tokens, int(state.rows[i]), bool(state.new[i]), length, physical, state.first[i] + page, update)

    def _update(self, row: torch.Tensor, count: int, first: int) -> MassUpdate:
        unit, rebase = self._advance(row, torch.tensor([count]))
        return MassUpdate(count, first, rebase.get(0), float(unit))

    def _advance(self, rows: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, dict[int, float]]:
        """Decay rows by so many queries: what a mass of 1 is stored as then, and the factors of those rebased."""
        ages, decay = self.age[rows] + counts, self.mass.factor
        factors = decay ** ages.to(torch.float64)
        large = (factors * LARGEST_UNIT < 1) & (ages > 0)
        self.age[rows] = torch.where(large, 0, ages)
        unit = torch.where(large, 1.0, 1 / factors)
        return unit, {i: float(factors[i]) for i in large.nonzero().flatten().tolist()}
