"""A batch of samples through the real stack: one dense prefill, then every contender decodes the rest sparsely."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvsieve.backends import get_backend
from kvsieve.backends.base import Selection
from kvsieve.budget import Budget
from kvsieve.evaluate.choosers import at_random, oracle
from kvsieve.evaluate.contenders import ORACLE, RANDOM, RECENT_FLOW, Contender
from kvsieve.evaluate.coverage import Coverage
from kvsieve.evaluate.probe import Chooser, Probe, Step
from kvsieve.evaluate.tasks import Sample
from kvsieve.flow import Flow
from kvsieve.flows.mass_alone import MassAlone, twin_budget
from kvsieve.retention import Evict

LayerChooser = Callable[[Callable[[Step], int]], Chooser]
"""Makes a chooser, given how a step's layer is found."""


@dataclass(frozen=True)
class Outcome:
    """One sample under one contender.

    Attributes:
        nll: negative log-likelihood per answer token, in nats. exact: every answer token was the likeliest.
        accuracy: share of answer tokens that were the likeliest.
        answer_tokens: tokens of the answer.
        kv_bytes, field_bytes, dense_bytes: read per decode step and sequence, all layers together, by the runtime's
            counters: K/V attended; what scoring read and wrote; K/V that dense attention reads. A batch's mean.
        layers: layers that the shares are about. shares: ``captured``, ``window`` and ``recall`` of :class:`Coverage`.
    """

    nll: float
    exact: bool
    accuracy: float
    answer_tokens: int
    kv_bytes: float
    field_bytes: float
    dense_bytes: float
    layers: list[int]
    shares: dict[str, list[list[float]]]


class Batch:
    """Samples with prefixes of one length, on one model.

    Args:
        model: a causal LM with ``attn_implementation="kvsieve"``, in eval mode.
        samples: their questions and answers may differ in length.
        names: one per sample; the random reference draws by it.
        backend: name of the backend that flows run on.
    """

    def __init__(self, model: Any, samples: Sequence[Sample], names: Sequence[str], backend: str = "eager") -> None:
        self.model, self.samples, self.backend = model, samples, backend
        self.context = len(samples[0].prefix)
        self._salts = [int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") for name in names]
        self._prefix: Any = None

    def run(self, contender: Contender, tokens: int) -> list[Outcome]:
        """Decode every sample's question and answer under a budget of ``tokens``."""
        flow = contender.build()
        if contender.evicts:
            return self._run_evicting(flow, tokens)
        coverage = Coverage(Budget.tokens(tokens, contender.page_size), len(self.samples))
        choose = self._chooser(contender.rule, tokens, coverage)
        cache = self._watched(flow, contender.budget(flow, tokens), contender.page_size, coverage, choose)
        with torch.inference_mode():
            logprobs, best = self._decode(cache, coverage)
        return self._outcomes(logprobs.tolist(), best.tolist(), cache.stats, coverage)

    def _run_evicting(self, flow: Flow, tokens: int) -> list[Outcome]:
        """With tokens evicted. What the evicted ones would have received is measured on a twin that keeps them."""
        from kvsieve.integrations.transformers import SparseCache

        assert flow.mass is not None
        retention, coverage = Evict(tokens), Coverage(Budget.tokens(tokens, 1), len(self.samples))
        cache = SparseCache(self.model.config, flow, retention=retention, backend=self.backend)
        self._prefill(cache)
        with torch.inference_mode():
            logprobs, best = self._decode(cache, coverage)
        kept = self._watched(MassAlone(flow.mass), twin_budget(retention), 1, coverage)
        with torch.inference_mode():
            self._decode(kept, coverage)
        return self._outcomes(logprobs.tolist(), best.tolist(), cache.stats, coverage)

    def _watched(
        self, flow: Flow, budget: Budget, page_size: int, coverage: Coverage, choose: LayerChooser | None = None
    ) -> Any:
        """A cache of the prefixes whose decode steps are counted; ``choose`` selects in the flow's place."""
        layers: dict[int, int] = {}  # by the id of a layer's pool, known once the cache is there

        def layer_of(step: Step) -> int:
            return layers[id(step.pool)]

        def observe(step: Step, selection: Selection) -> None:
            coverage.add(layer_of(step), step, selection)

        probe = Probe(get_backend(self.backend), observe, choose(layer_of) if choose is not None else None)
        cache = self._start(flow, budget, page_size, probe)
        layers |= {id(layer.pool): index for index, layer in cache.runtime.layers.items()}
        return cache

    def _chooser(self, rule: str, tokens: int, coverage: Coverage) -> LayerChooser | None:
        """What selects for the references that need it."""
        if rule == ORACLE:
            return lambda layer_of: oracle(coverage.budget)
        if rule == RANDOM:
            salts = [salt ^ tokens for salt in self._salts]
            return partial(at_random, coverage.budget, lambda: [salts[row] for row in coverage.active])
        return None

    def _start(self, flow: Flow, budget: Budget, page_size: int, backend: Any) -> Any:
        """A cache that holds the prefixes: a copy of the dense ones, unless the flow must see the prompt's queries."""
        from kvsieve.integrations.transformers import SparseCache

        cache = SparseCache(self.model.config, flow, budget, page_size, backend=backend)
        if getattr(flow, "mass", None) is not None:
            self._prefill(cache)
            return cache
        if self._prefix is None:
            self._prefix = SparseCache(self.model.config, RECENT_FLOW, Budget(0, 0, 1))
            self._prefill(self._prefix)
        cache.copy_past(self._prefix)
        return cache

    def _prefill(self, cache: Any) -> None:
        ids = torch.tensor([sample.prefix for sample in self.samples], device=self.model.device)
        with torch.inference_mode():
            self.model(ids, past_key_values=cache, logits_to_keep=1)

    def _decode(self, cache: Any, coverage: Coverage) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed the tails token by token, aligned at their ends; [T, B] log-probability of each next token, and
        whether it was the likeliest. ``T`` is one less than the longest tail."""
        ids, there = self._tails()
        past = torch.ones(len(ids), self.context, dtype=torch.bool)
        mask = None if bool(there.all()) else torch.cat([past, there], 1).to(self.model.device)
        positions = (self.context + there.cumsum(1) - 1).clamp(min=0).to(self.model.device)
        ids = ids.to(self.model.device)
        logprobs, best = [], []
        for t in range(ids.shape[1] - 1):
            coverage.active = there[:, t].nonzero().flatten().tolist()
            logits = self.model(
                ids[:, t : t + 1],
                attention_mask=None if mask is None else mask[:, : self.context + t + 1].long(),
                position_ids=positions[:, t : t + 1],
                past_key_values=cache,
            ).logits[:, -1]
            following = ids[:, t + 1, None]
            logprobs.append(torch.log_softmax(logits.float(), -1).gather(-1, following)[:, 0])
            best.append(logits.argmax(-1) == following[:, 0])
        return torch.stack(logprobs).cpu(), torch.stack(best).cpu()

    def _tails(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Questions and answers, padded on the left: ids [B, T], and which are real."""
        width = max(len(sample.tail) for sample in self.samples)
        ids = torch.zeros(len(self.samples), width, dtype=torch.int64)
        there = torch.zeros(ids.shape, dtype=torch.bool)
        for row, sample in enumerate(self.samples):
            ids[row, width - len(sample.tail) :] = torch.tensor(sample.tail)
            there[row, width - len(sample.tail) :] = True
        return ids, there

    def _outcomes(
        self, logprobs: list[list[float]], best: list[list[bool]], stats: Any, coverage: Coverage
    ) -> list[Outcome]:
        steps = sum(len(sample.tail) - 1 for sample in self.samples)
        read = {name: getattr(stats, name) / steps for name in ("kv_bytes", "field_bytes", "dense_bytes")}
        outcomes = []
        for row, sample in enumerate(self.samples):
            count = len(sample.answer)
            likely = [step[row] for step in best[-count:]]
            nll = -sum(step[row] for step in logprobs[-count:]) / count
            outcomes.append(
                Outcome(
                    nll=nll,
                    exact=all(likely),
                    accuracy=sum(likely) / count,
                    answer_tokens=count,
                    **read,
                    layers=coverage.layers,
                    shares=coverage.shares(row),
                )
            )
        return outcomes
