"""The attention mass of one segment under test: what the runtime's store must hold after every call."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch

from kvsieve.mass import FIELDS as MASS_FIELDS
from kvsieve.mass import AttentionMass
from kvsieve.paging.table import CROP_ROWS
from kvsieve.reference import ReferenceSegment, reduce_group
from kvsieve.verify.checks import Numbers, compare, unchanged
from kvsieve.verify.rounding import F64, SIGMAS, NoisyArithmetic, growth, noisy_logits, spread

U = 2.0**-24
READ = 4 * U
"""A stored value is scaled when it is read, and rounded when it is decayed and added to."""
SHARP = 100_000
"""Probabilities of which a bound is derived from the data at most; of more it is a flat one."""
LEAST_WEIGHT = 2.0**-45
"""Queries that count for less are left out here; a runtime may leave out those below 2**-32."""


class MassTwin:
    """Float64 mass beside the stored one.

    ``values`` [T] is what the pool held when it was last checked, carried on in float64 by what the call must have
    done, with ``bound`` [T]; ``raw`` holds the stored fields as they were then. ``own`` [T] has not seen the pool since
    the two last chose different pages.
    """

    def __init__(self, mass: AttentionMass, reference: ReferenceSegment) -> None:
        self.mass, self.reference = mass, reference
        self.values, self.bound, self.own = (torch.zeros(0, dtype=F64) for _ in range(3))
        self.pending: list[tuple[torch.Tensor, int]] = []
        self.raw: dict[str, torch.Tensor] = {}
        self.sharp = True

    def fork(self, reference: ReferenceSegment) -> MassTwin:
        """A copy with a future of its own."""
        twin = copy.copy(self)
        twin.reference, twin.pending = reference, list(self.pending)
        return twin

    def crop(self, length: int) -> None:
        """Tokens from ``length`` on, and their queries, are taken back."""
        self.values, self.bound, self.own = (x[:length] for x in (self.values, self.bound, self.own))
        self.pending = [(q, last) for q, last in self.pending if last < length]
        self.raw = {name: rows[: -(-length // self.reference.page_size)] for name, rows in self.raw.items()}

    def lose(self, tokens: list[int]) -> None:
        """Tokens are evicted: nothing is stored of them any more."""
        for x in (self.values, self.bound, self.own):
            x[tokens] = 0.0

    def begin(self, decode: bool) -> None:
        """A call begins: queries that were kept count now."""
        if decode or self.mass.window is None:
            self.commit()

    def commit(self) -> None:
        """Queries that were kept count from now on: the last ones, where a window of them is asked for."""
        self._count(self.pending[-(self.mass.window or len(self.pending)) :])
        self.pending = []

    def write(self, count: int) -> None:
        """Tokens enter with no mass."""
        self.values, self.bound, self.own = (
            torch.cat([x, torch.zeros(count, dtype=F64)]) for x in (self.values, self.bound, self.own)
        )

    def prompt(self, q: torch.Tensor) -> None:
        """The newest tokens are prompt tokens with queries q [n, G, D]."""
        if self.mass.seed == "none":
            return
        first = len(self.values) - len(q)
        self.pending += [(row, first + i) for i, row in enumerate(q.to(F64))]
        if len(q) > CROP_ROWS and self.mass.window is None:
            self.commit()

    def step(self, q: torch.Tensor, tokens: list[int], agreed: bool) -> None:
        """A decode step of query q [G, D] attended some tokens; ``own`` follows the reference's step instead."""
        own = torch.tensor(self.reference.mass, dtype=F64)
        if self.mass.update == "steps":
            self._add(q.to(F64)[None], torch.tensor(tokens), torch.ones(1, len(tokens), dtype=torch.bool), 1)
        self.own = own if agreed else self.values.clone()

    def inputs(self, window: range) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """What ``score`` reads of the window's pages, and the standard deviation that is left to it."""
        p = self.reference.page_size
        tokens = slice(window.start * p, window.stop * p)
        mass, sigma = (x[tokens].unflatten(0, (-1, p)) for x in (self.values, self.bound / SIGMAS))
        sigma = sigma + READ / SIGMAS * mass
        return {"mass": mass, "mass_sum": mass.sum(1)}, {"mass": sigma, "mass_sum": sigma.sum(1)}

    def unchanged(self, place: str, raw: Mapping[str, torch.Tensor]) -> None:
        """The stored fields are what they were after the last call, bit for bit; pages since then start at 0."""
        for name, stored in raw.items():
            wanted = torch.zeros_like(stored)
            if name in self.raw:
                wanted[: len(self.raw[name])] = self.raw[name]
            unchanged("state", place, name, stored, wanted)

    def check(self, numbers: Numbers, place: str, raw: Mapping[str, torch.Tensor], scale: float) -> None:
        """The stored mass [S, p] and page sums [S] after a call, times ``scale``; the next call goes on from it."""
        self.raw = {name: rows.clone() for name, rows in raw.items()}
        stored, stored_sum = (raw[name].to(F64) * scale for name in MASS_FIELDS)
        p, length = self.reference.page_size, len(self.values)
        pad = (0, stored.numel() - length)
        values, bound = (torch.nn.functional.pad(x, pad) for x in (self.values, self.bound + READ * self.values))
        if bool(torch.isfinite(torch.stack(self.reference.k)).all()):
            compare(numbers, "mass", place, stored.flatten(), values, bound)
            limit = bound.unflatten(0, (-1, p)).sum(1) + 8 * U * values.unflatten(0, (-1, p)).sum(1)
            compare(numbers, "mass", f"{place} page sums", stored_sum, values.unflatten(0, (-1, p)).sum(1), limit)
            largest = float(self.own.abs().max().clamp(min=1e-30)) if length else 1.0
            drift = float((stored.flatten()[:length] - self.own).abs().max()) / largest if length else 0.0
            numbers.drift = max(numbers.drift, drift if drift == drift else 0.0)
        self.go_on_from(stored)

    def go_on_from(self, stored: torch.Tensor) -> None:
        """Judge the next call on what is stored now, in units of mass: [S, p]."""
        self.values = stored.flatten()[: len(self.values)].clone()
        self.bound = torch.zeros_like(self.values)

    def _count(self, rows: list[tuple[torch.Tensor, int]]) -> None:
        if rows:
            last = rows[-1][1]
            few = [(q, place) for q, place in rows if self._weight(last - place) >= LEAST_WEIGHT]
            tokens = torch.tensor(self.reference.visible(last))
            places = torch.tensor([place for _, place in few])
            self._add(torch.stack([q for q, _ in few]), tokens, tokens <= places[:, None], len(rows))

    def _weight(self, age: int) -> float:
        return self.mass.factor**age

    def _add(self, q: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, queries: int) -> None:
        """Decay by ``queries`` and add the attention of the last ones, q [n, G, D], to tokens under mask [n, T]."""
        weights = torch.tensor([self._weight(len(q) - 1 - i) for i in range(len(q))], dtype=F64)
        exact, bound = self._received(q, tokens, mask, weights)
        decay = self._weight(queries)
        self.bound = decay * self.bound + READ * decay * self.values
        self.values, self.own = decay * self.values, decay * self.own
        self.values = self.values.index_add(0, tokens, exact)
        self.own = self.own.index_add(0, tokens, exact)
        self.bound = self.bound.index_add(0, tokens, bound)
        if queries > 1 and 0 < self.mass.factor < 1:  # what may be left out
            self.bound = self.bound + 2.0**-32 * q.shape[1] / (1 - self.mass.factor)

    def _received(
        self, q: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        reference = self.reference
        k = torch.stack(reference.k)[tokens]
        scale, hidden = reference.attention_scale(q.shape[-1]), torch.where(mask, 0.0, -torch.inf)[:, None]

        def attend(arithmetic: NoisyArithmetic) -> dict[str, torch.Tensor]:
            logits = noisy_logits(arithmetic, q, k, scale, reference.softcap) + hidden
            lse = torch.logsumexp(logits, -1)
            if reference.sinks is not None:
                lse = torch.logaddexp(lse, reference.sinks)
            lse = arithmetic.shifted(arithmetic(lse))
            received = reduce_group(arithmetic(torch.exp(logits - lse[..., None]), 2.0), self.mass.group, -2)
            return {"mass": arithmetic(weights @ arithmetic(received, growth(len(q))))}

        exact, bound = spread(attend, U, self.sharp and mask.numel() * q.shape[1] <= SHARP)
        return exact["mass"], bound["mass"]
