"""The specification: what a flow means, for one segment, in float64, with plain loops.

It has never heard of pages in a pool, batches or devices, and imports nothing but torch, flow, budget and retention.
Every backend is held against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvsieve.budget import Budget
from kvsieve.flow import (
    DoublePrecision,
    Flow,
    PageFields,
    check_evicting,
    check_flow,
    choose_page_size,
    extra_parameters,
    initial_state,
    with_dtype,
)
from kvsieve.retention import Evict

F64 = torch.float64


@dataclass(frozen=True)
class ReferenceStep:
    """What one decode step did: ``out [G, Dv]``, ``lse [G]``, ascending ``selection``, ``scores [W]`` or None."""

    out: torch.Tensor
    lse: torch.Tensor
    selection: list[int]
    scores: torch.Tensor | None


class ReferenceSegment:
    """One (request, KV head) pair.

    Args:
        flow: the algorithm.
        budget: pages attended per step.
        page_size: tokens per page.
        scale: attention scale; None: ``head_dim ** -0.5``.
        softcap: logits become ``softcap * tanh(logits / softcap)`` if given.
        sinks: sink logit per query head [G], added to the softmax's denominator if given.
        layer: layer index, seen by flows that ask for it.
    """

    def __init__(
        self,
        flow: Flow,
        budget: Budget,
        page_size: int,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        layer: int = 0,
    ) -> None:
        check_flow(flow, page_size, budget)
        self.flow, self.budget, self.page_size = with_dtype(flow, F64), budget, page_size
        self.accumulates = flow.mass
        self.scale, self.softcap, self.layer = scale, softcap, layer
        self.sinks = None if sinks is None else sinks.to(F64)
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        self.summaries: list[Mapping[str, torch.Tensor]] = []
        self.state: list[dict[str, torch.Tensor]] = []
        self.mass: list[float] = []
        self.pending: list[tuple[torch.Tensor, int]] = []

    def extend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Prefill, dense and exact: q [n, G, D], k [n, D], v [n, Dv] -> out [n, G, Dv], lse [n, G]."""
        rows = []
        if self.accumulates is not None and self.accumulates.seed == "all":
            self.count_pending()
        for query, key, value in zip(q, k, v, strict=True):
            self.write(key, value)
            self.keep(query)
            rows.append(self.attend(query, self.visible(len(self.k) - 1)))
        return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> ReferenceStep:
        """One decode step: q [G, D], k [D], v [Dv]."""
        self.count_pending()
        self.write(k, v)
        pages = len(self.state)
        window = range(self.budget.sink, pages - self.budget.recent)
        always = pages > self.budget.kept(pages)
        scores, new_state = (None, {}) if not len(window) else self._score(q, window, always)
        for name, rows in new_state.items():
            for page, row in zip(window, rows, strict=True):
                self.state[page][name] = row
        selection = select(scores, pages, self.budget)
        out, lse = self.attend(q, self.tokens(selection))
        if self.accumulates is not None and self.accumulates.update == "steps":
            self.count(q, self.tokens(selection))
        return ReferenceStep(out, lse, selection, scores)

    def crop(self, length: int) -> None:
        """Forget the tokens from ``length`` on. State stays as it is, so the caller must not crop into a step."""
        pages = -(-length // self.page_size)
        del self.mass[length:]
        self.pending = [(q, last) for q, last in self.pending if last < length]
        del self.k[length:], self.v[length:], self.state[pages:], self.summaries[length // self.page_size :]

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store a token, k [D] and v [Dv], without attending it; a page that it fills is summarised."""
        if len(self.k) % self.page_size == 0:
            initial = initial_state(self.flow, self.page_size, k.shape[-1])
            self.state.append({name: _widen(value) for name, value in initial.items()})
        self.k.append(k.to(F64))
        self.v.append(v.to(F64))
        self.mass.append(0.0)
        if len(self.k) % self.page_size == 0 and self.flow.summarize:
            page = slice(len(self.k) - self.page_size, len(self.k))
            with DoublePrecision():
                self.summaries.append(self.flow.summarize(torch.stack(self.k[page]), torch.stack(self.v[page])))

    def keep(self, q: torch.Tensor) -> None:
        """The newest token's query [G, D] counts when the next call comes: until then a crop takes it back."""
        if self.accumulates is not None and self.accumulates.seed != "none":
            self.pending.append((q, len(self.k) - 1))

    def count_pending(self) -> None:
        """Count the prompt queries that were kept: all, or the last of them where the mass has a window."""
        window = self.accumulates.window if self.accumulates is not None else None
        for q, last in self.pending[-(window or len(self.pending)) :]:
            self.count(q, self.visible(last))
        self.pending = []

    def visible(self, last: int) -> list[int]:
        """The tokens that the prompt query of token ``last`` attends."""
        return list(range(last + 1))

    def count(self, q: torch.Tensor, tokens: list[int]) -> None:
        """``m <- decay * m + p``: the attention that a query [G, D] gives to tokens (H2O, Algorithm 1)."""
        assert self.accumulates is not None
        logits, lse = self._logits(q, tokens)
        received = reduce_group(torch.exp(logits - lse[:, None]), self.accumulates.group, 0)
        decay = self.accumulates.factor
        self.mass = [decay * m for m in self.mass]
        for token, p in zip(tokens, received.tolist(), strict=True):
            self.mass[token] += p

    def _score(
        self, q: torch.Tensor, window: range, always: bool
    ) -> tuple[torch.Tensor | None, Mapping[str, torch.Tensor]]:
        """Scores of the window and new state; nothing when the flow neither ranks nor keeps state in this step."""
        if self.flow.score is None or not (always or self.flow.init_state):
            return None, {}
        p, length = self.page_size, len(self.k)
        fields = {
            "k": torch.stack([torch.stack(self.k[i * p : i * p + p]) for i in window]),
            "v": torch.stack([torch.stack(self.v[i * p : i * p + p]) for i in window]),
            "position": torch.tensor([i * p for i in window], dtype=F64),
            "age": torch.tensor([length - (i + 1) * p for i in window], dtype=F64),
        }
        if self.flow.mass is not None:
            fields["mass"] = torch.tensor([self.mass[i * p : i * p + p] for i in window], dtype=F64)
            fields["mass_sum"] = fields["mass"].sum(1)
        for rows in (self.summaries, self.state):
            for name in rows[window[0]] if rows else ():
                fields[name] = torch.stack([rows[i][name] for i in window])
        numbers = {"layer": self.layer, "scale": self.attention_scale(q.shape[-1])}
        extra = {name: numbers[name] for name in extra_parameters(self.flow)}
        with DoublePrecision():
            result = self.flow.score(q.to(F64), PageFields(fields), **extra)
        return result if isinstance(result, tuple) else (result, {})

    def attention_scale(self, head_dim: int) -> float:
        """``scale``, or what None stands for."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def tokens(self, pages: Sequence[int]) -> list[int]:
        """The stored tokens of some pages, of which the last may be partial."""
        p = self.page_size
        return [t for page in pages for t in range(page * p, min((page + 1) * p, len(self.k)))]

    def attend(self, q: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact softmax attention of q [G, D] over the listed tokens -> out [G, Dv], lse [G]."""
        logits, lse = self._logits(q, tokens)
        return torch.exp(logits - lse[:, None]) @ torch.stack([self.v[t] for t in tokens]), lse

    def _logits(self, q: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = q.to(F64) @ torch.stack([self.k[t] for t in tokens]).T * self.attention_scale(q.shape[-1])
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        lse = torch.logsumexp(logits, -1)
        if self.sinks is not None:
            lse = torch.logaddexp(lse, self.sinks)
        return logits, lse


class EvictingSegment(ReferenceSegment):
    """One (request, KV head) pair whose tokens are evicted: H2O, arXiv 2306.14048, Algorithm 1, with sinks.

    Args:
        flow: says which attention mass is kept; its ``score`` is not used.
        retention: how many tokens stay.

    The others as in :class:`ReferenceSegment`; a ``selection`` is a list of tokens here. ``alive``: the tokens that are
    left, ascending.
    """

    def __init__(
        self,
        flow: Flow,
        retention: Evict,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        page_size = choose_page_size(flow, None)
        check_evicting(flow, page_size, retention, ())
        unscored = Flow()
        super().__init__(unscored, Budget(0), page_size, scale=scale, softcap=softcap, sinks=sinks)
        self.accumulates = flow.mass and flow.mass.where_evicted()
        self.retention, self.alive, self.stepped = retention, list[int](), False

    def extend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Prefill over what is left: q [n, G, D], k [n, D], v [n, Dv] -> out [n, G, Dv], lse [n, G]."""
        if self.stepped:
            self.evict()
        self.stepped = False
        return super().extend(q, k, v)

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> ReferenceStep:
        """One decode step: q [G, D], k [D], v [Dv]."""
        self.count_pending()
        self.evict()
        self.stepped = True
        self.write(k, v)
        out, lse = self.attend(q, self.alive)
        if self.accumulates is not None and self.accumulates.update == "steps":
            self.count(q, self.alive)
        return ReferenceStep(out, lse, list(self.alive), None)

    def evict(self) -> None:
        """Drop the token of least mass that is neither sink nor recent, at equal mass the youngest, until all fit.

        NaN is less than any mass.
        """
        recent = len(self.k) - self.retention.recent
        mass = [-1.0 if m != m else m for m in self.mass]
        while len(self.alive) > self.retention.capacity:
            candidates = [t for t in self.alive if self.retention.sink <= t < recent]
            self.alive.remove(min(candidates, key=lambda t: (mass[t], -t)))

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        super().write(k, v)
        self.alive.append(len(self.k) - 1)

    def crop(self, length: int) -> None:
        """Forget the tokens from ``length`` on, none of which may have been decoded or trimmed."""
        super().crop(length)
        self.alive = [token for token in self.alive if token < length]

    def visible(self, last: int) -> list[int]:
        return [token for token in self.alive if token <= last]


def reduce_group(probabilities: torch.Tensor, how: str, dim: int) -> torch.Tensor:
    """Probabilities of a group's query heads as one number a token: their sum, mean or maximum over ``dim``."""
    return {"sum": probabilities.sum(dim), "mean": probabilities.mean(dim), "max": probabilities.amax(dim)}[how]


def select(scores: torch.Tensor | None, pages: int, budget: Budget) -> list[int]:
    """What a segment of ``pages`` pages attends, ascending; ``scores`` [W] rank its window, None ranks nothing."""
    kept, sink, recent = budget.kept(pages), budget.sink, budget.recent
    if pages <= kept:
        return list(range(pages))
    best = [] if scores is None else rank(scores)[: kept - sink - recent]
    return sorted([*range(sink), *(sink + i for i in best), *range(pages - recent, pages)])


def rank(scores: torch.Tensor) -> list[int]:
    """Window pages, best first: higher score, -0 equals +0, NaN below -inf, the older page at equal rank."""
    values = [float(score) for score in scores]
    return sorted(
        range(len(values)), key=lambda i: (values[i] != values[i], -values[i] if values[i] == values[i] else 0.0, i)
    )


def _widen(value: torch.Tensor) -> torch.Tensor:
    return value.to(F64) if value.is_floating_point() else value
