"""Counts what a step does, from the plan alone: once a step, not once a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvsieve.budget import Budget
from kvsieve.integrations.vllm.counters import Counters
from kvsieve.integrations.vllm.plan import BatchPlan, Decoding


@dataclass(frozen=True)
class LayerKind:
    """What layers that count alike have in common: a budget, and bytes of a token's K and V and of scoring a page, of
    one KV head."""

    budget: Budget
    scores: bool
    stateful: bool
    heads: int
    token_bytes: int
    score_bytes: int


class Tally:
    """Counts steps for layers of some kinds."""

    def __init__(self, kinds: Iterable[LayerKind], counters: Counters) -> None:
        self._kinds, self._counters = Counter(kinds), counters

    def count(self, plan: BatchPlan, tokens: int) -> bool:
        """Count a step of so many tokens; whether it leaves pages out."""
        decoding = plan.decoding
        self._counters.add(prefill_tokens=tokens - (0 if decoding is None else len(decoding.places)))
        return decoding is not None and self._count_rows(decoding)

    def _count_rows(self, decoding: Decoding) -> bool:
        sparse, kept, dense, read, heads = 0, 0, 0, 0, 0
        held = int(decoding.lengths.sum())
        for kind, layers in self._kinds.items():
            quota = decoding.quota(kind.budget, kind.scores, kind.stateful)
            if quota.sparse:
                sparse = max(sparse, int((quota.pages > quota.count).sum()))
            scored = quota.window.total_pages if quota.window is not None else 0
            segments = layers * kind.heads
            heads += segments
            kept += segments * int(quota.count.sum())
            dense += segments * kind.token_bytes * held
            read += segments * (kind.token_bytes * quota.tokens + kind.score_bytes * scored)
        self._counters.add(
            sparse_rows=sparse,
            dense_rows=len(decoding.places) - sparse,
            pages_seen=heads * int(decoding.pages.sum()),
            pages_kept=kept,
            bytes_dense=dense,
            bytes_read=read,
        )
        self._counters.add(**{"sparse_steps" if sparse else "dense_steps": 1})
        return sparse > 0
