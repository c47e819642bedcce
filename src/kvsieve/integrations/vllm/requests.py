"""Which row of state belongs to which request, when vLLM's metadata names no requests.

A request is known by the physical block that holds its newest token. Only the request itself writes to that block (vLLM
shares a block when it is full, and computes at least the last prompt token anew), so the block of the token before the
new one was last written by the same request. A decode step hands its row on to the block that it writes; whatever a
prompt writes to loses its row. Rows thus follow a request through any order of the batch, end when its blocks are
written by another, and start afresh after a preemption, which vLLM answers by computing all tokens anew as a prompt.

Where prompts have rows too, because they seed the state, the block before a later chunk must be the request's own: that
holds while no prefix is shared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvsieve.integrations.vllm.plan import Batch, BatchPlan, ragged

NOBODY = 0


@dataclass(frozen=True)
class StateRows:
    """State rows of a step's requests.

    ``places`` [R]: their places in the batch; ``rows`` [R]; ``first`` [R]: the state row of each one's first page (its
    page ``i`` lies ``i`` further). ``new`` [R]: who got a row in this step. ``entered`` [C]: state rows of pages that
    are new to their request.
    """

    places: torch.Tensor
    rows: torch.Tensor
    first: torch.Tensor
    new: torch.Tensor
    entered: torch.Tensor


class RequestRows:
    """Rows of ``max_pages`` pages each; row 0 is nobody's. Twice as many as there are ``requests`` at a time.

    Nobody says that a request has ended. A new one is given a row whose block another request has written since; if
    there is none, the row that has not been used for longest, so that a request may sit out some steps. Should it lose
    its row all the same, its state starts afresh: it never becomes another's.

    ``prompts``: whether requests have a row from their first prompt token on, or from their first decode step.
    """

    def __init__(self, requests: int, max_pages: int, page_size: int, block_size: int, prompts: bool = False) -> None:
        self.rows, self.max_pages = 2 * requests, max_pages
        self.page_size, self.block_size, self.prompts = page_size, block_size, prompts
        self._owner = torch.zeros(0, dtype=torch.int64)  # by block: the row of the request that wrote its newest token
        self._used = torch.zeros(self.rows + 1, dtype=torch.int64)
        self._clock = 0

    @property
    def total(self) -> int:
        """State rows in all, the null ones included."""
        return (self.rows + 1) * self.max_pages

    def step(self, batch: Batch, plan: BatchPlan) -> StateRows | None:
        """Rows of the step's requests; new requests get one. Call it once a step, in order."""
        written = batch.slots[batch.slots >= 0] // self.block_size
        self._grow(int(max(batch.blocks.max(), written.max() if len(written) else 0)) + 1)
        places = self._tracked(plan)
        if places is None:
            self._owner[written] = NOBODY
            return None
        table, lengths = batch.blocks[places].to(torch.int64), batch.lengths[places].to(torch.int64)
        starts = lengths - (batch.starts[1:] - batch.starts[:-1])[places]
        before, newest = (
            table.gather(1, ((end - 1).clamp(min=0) // self.block_size)[:, None])[:, 0] for end in (starts, lengths)
        )
        rows = torch.where(starts > 0, self._owner[before], NOBODY)
        self._owner[written] = NOBODY
        self._owner[before[starts > 0]] = NOBODY
        new = rows == NOBODY
        self._clock += 1
        self._used[rows] = self._clock
        if bool(new.any()):
            self._take(rows, new)
        self._owner[newest] = rows
        first = rows * self.max_pages
        return StateRows(places, rows, first, new, self._entered(first, torch.where(new, 0, starts), lengths))

    def _tracked(self, plan: BatchPlan) -> torch.Tensor | None:
        """Places of the requests that have rows: decoding ones first."""
        found = [] if plan.decoding is None else [plan.decoding.places]
        if self.prompts and plan.prefilling is not None:
            found.append(plan.prefilling)
        return torch.cat(found) if found else None

    def _take(self, rows: torch.Tensor, new: torch.Tensor) -> None:
        owned = torch.zeros_like(self._used, dtype=torch.bool)
        owned[self._owner] = True
        age = torch.where(owned | (self._used == self._clock), self._used, -1)
        longest = torch.topk(age[1:], int(new.sum()), largest=False).indices + 1
        taken = torch.isin(self._owner, longest)
        self._owner[taken] = NOBODY
        rows[new] = longest
        self._used[longest] = self._clock

    def _entered(self, first: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """State rows of pages that begin with a token of this step; of a new request, of all its pages."""
        begun, pages = ((end + self.page_size - 1) // self.page_size for end in (starts, lengths))
        row, place = ragged(pages - begun)
        return first[row] + begun[row] + place

    def _grow(self, blocks: int) -> None:
        if len(self._owner) < blocks:
            self._owner = torch.cat([self._owner, self._owner.new_zeros(blocks - len(self._owner))])
