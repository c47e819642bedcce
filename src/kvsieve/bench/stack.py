"""A runtime with requests of a given length, and a step whose phases can be run one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvsieve.backends.base import AttentionOptions, Selection, Tuning
from kvsieve.bench.setting import Setting
from kvsieve.call import DENSE, Attended
from kvsieve.flow import Flow
from kvsieve.layers import Layer
from kvsieve.mass import RequestMass
from kvsieve.plan import Plan
from kvsieve.runtime import RequestId, Runtime

Draw = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Stack:
    """Requests of ``context`` tokens, the newest of which came by a decode step, in every layer.

    ``keys``, ``values`` [B, H, L, D] per layer: what a dense cache would hold. ``first``: the results of that step;
    ``draws``: the q, k, v of it; ``before``: the requests' attention mass ahead of it, if the flow has any.
    """

    def __init__(self, flow: Flow, setting: Setting, context: int) -> None:
        self.flow, self.setting, self.context = flow, setting, context
        self.runtime = Runtime(
            flow, setting.budget_of(flow), page_size=setting.page_size_of(flow), backend=setting.backend
        )
        self.requests = [self.runtime.admit() for _ in range(setting.batch)]
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.random = torch.Generator(setting.device).manual_seed(context)
        self.origin: list[RequestId] = []
        self.masses: Sequence[RequestMass] = ()
        if flow.mass is None:
            self._fill(context - 1)
        else:  # a step more: with it the last queries of the prompt count
            self._fill(context - 2)
            self._advance()
        self.before = self.stored_mass()
        self.first = self._advance()
        device = torch.device(setting.device)
        self.plan = Plan(self.runtime.tables, self.requests, [1] * setting.batch, [], device, self.masses)
        fed = self.layer(0).fed_mass
        self.options = AttentionOptions(
            setting.head_dim**-0.5, mass=fed, mass_rows=None if fed is None else self.plan.mass
        )
        self.quota = self._quota()

    def layer(self, index: int) -> Layer:
        """A layer of the runtime."""
        return self.runtime.layers[index]

    def draw(self, tokens: int) -> Draw:
        """q [B * tokens, Hq, D], k and v [B * tokens, H, D]."""
        s = self.setting
        return self._randn(tokens, s.query_heads), self._randn(tokens, s.kv_heads), self._randn(tokens, s.kv_heads)

    def _randn(self, tokens: int, heads: int) -> torch.Tensor:
        s = self.setting
        shape = s.batch * tokens, heads, s.head_dim
        if s.on_gpu:  # no room for a float32 copy
            return torch.randn(shape, generator=self.random, device=s.device, dtype=s.dtype)
        return torch.randn(shape, generator=self.random).to(s.dtype)

    def rewind(self) -> None:
        """Keep the number of pages: steps run through the lengths of the last page, of which one in p fills it."""
        p = self.runtime.page_size
        if self.runtime.tables.stateful:  # a step cannot be undone there: each is made by a copy of the requests
            if self.origin:
                self.runtime.finish(self.requests)
            self.origin = self.origin or self.requests
            self.requests = [self.runtime.fork(request) for request in self.origin]
        elif self.runtime.length(self.requests[0]) % p == 0:
            pages = -(-self.context // p)
            self.runtime.crop(self.requests, [max(1, (pages - 1) * p)] * len(self.requests))

    def step_back(self, steps: int) -> None:
        """Forget tokens, so that so many steps lead to half a page below the context; all but one where it has no more
        of them. State cannot be undone."""
        if not self.runtime.tables.stateful:
            tokens = max(1, self.context - self.runtime.page_size // 2 - steps)
            self.runtime.crop(self.requests, [tokens] * len(self.requests))

    def step(self) -> list[Attended]:
        """A decode step through all layers."""
        call = self.runtime.step(self.requests)
        self.masses = call.masses
        return [call.attend(layer, *draw) for layer, draw in enumerate(self.draws)]

    def stored_mass(self) -> list[list[torch.Tensor]]:
        """Attention mass by layer and request, in units of mass: float64 [H, S, p]; nothing without mass."""
        mass = self.flow.mass
        if mass is None:
            return []
        entries = [self.runtime.tables[request] for request in self.requests]
        pools = [self.layer(index).pool for index in range(self.setting.layers)]
        return [[pool.state["mass"][:, e.rows].double() * mass.factor**e.mass.age for e in entries] for pool in pools]

    def _advance(self) -> list[Attended]:
        """A step whose token the dense forms attend as well."""
        self.draws = [self.draw(1) for _ in range(self.setting.layers)]
        results = self.step()
        for layer, (_, k, v) in enumerate(self.draws):
            self.keys[layer] = torch.cat([self.keys[layer], k[:, :, None]], 2)
            self.values[layer] = torch.cat([self.values[layer], v[:, :, None]], 2)
        return results

    def phases(self) -> dict[str, Callable[[int], object]]:
        """What a step does to a layer, each phase by itself."""
        backend, plan, quota = self.runtime.backend, self.plan, self.quota
        heads, queries = self.setting.kv_heads, [self._grouped(q) for q, _, _ in self.draws]
        blocks = self._full_blocks()
        scores = [self._score(layer, queries[layer]) for layer in range(self.setting.layers)]
        chosen: list[Selection] = [backend.select(one, quota, heads) for one in scores]
        attended = [self._attend(layer, queries[layer], chosen[layer]) for layer in range(self.setting.layers)]
        runs: dict[str, Callable[[int], object]] = {
            "write": lambda i: backend.write(self.layer(i).pool, plan.writes, *self.draws[i][1:]),
            "summarize": lambda i: backend.summarize(self.layer(i).flow, self.layer(i).pool, blocks),
            "score": lambda i: self._score(i, queries[i]),
            "select": lambda i: backend.select(scores[i], quota, heads),
            "attend": lambda i: self._attend(i, queries[i], chosen[i]),
            "mass": lambda i: backend.add_mass(self.layer(i).pool, plan.rows, plan.mass, chosen[i], attended[i][2]),
        }
        if all(increment is None for _, _, increment in attended):  # no mass, or attend has added it
            del runs["mass"]
        if not self.flow.summarize or self.context < 2 * self.runtime.page_size:
            del runs["summarize"]
        if quota.window is None:
            del runs["score"]
        return runs

    def tune(self, seconds: Callable[[str], float | None]) -> tuple[Tuning, ...]:
        """Try other tilings of the kernels that are generated for the flow; ``seconds`` times a phase."""
        layer, q = self.layer(0), self._grouped(self.draws[0][0])
        return self.runtime.backend.tune(layer.flow, q, layer.pool, self.quota.window, self._full_blocks(), seconds)

    def _full_blocks(self) -> torch.Tensor:
        """A full page of each request."""
        return torch.tensor([self.runtime.tables[one].blocks[0] for one in self.requests], device=self.setting.device)

    def bytes(self) -> dict[str, int]:
        """Bytes that each phase of a step has to move in one layer, by its index lists."""
        s, quota, layer = self.setting, self.quota, self.layer(0)
        token = 2 * s.head_dim * s.dtype.itemsize * s.kv_heads
        window = quota.window.total_pages * s.kv_heads if quota.window else 0
        fields = sum(spec.bytes(s.dtype) for spec in layer.graphs.summary_fields.values()) if layer.graphs else 0
        read = self._summarize_reads() * self.runtime.page_size * s.head_dim * s.dtype.itemsize
        listed = int(quota.count.sum()) * s.kv_heads * 8
        increments = quota.tokens * s.kv_heads * 4 if self.options.mass else 0
        return {
            "write": 2 * s.batch * token,
            "summarize": s.batch * s.kv_heads * (read + fields),
            "score": window * layer.score_bytes,
            "select": window * 4 + listed,
            "attend": quota.tokens * token + listed + increments,
            "mass": 3 * increments + 2 * listed + self._rebased_bytes(),
        }

    def _rebased_bytes(self) -> int:
        """What rebasing the stored mass moves: every page sum is read, pages that hold mass are rewritten."""
        rebased = self.plan.mass.rebase if self.options.mass else {}
        sums = self.layer(0).pool.state["mass_sum"] if rebased else torch.empty(0)
        stored = [sums[:, self.runtime.tables[self.requests[place]].rows] for place in rebased]
        page = 2 * 4 * self.runtime.page_size + 4
        return sum(4 * one.numel() + page * int(one.count_nonzero()) for one in stored)

    def _summarize_reads(self) -> int:
        """How many of K and V ``summarize`` reads."""
        graphs = self.layer(0).graphs
        return len(graphs.summarize.reads) if graphs and graphs.summarize else 0

    def _grouped(self, q: torch.Tensor) -> torch.Tensor:
        return q.view(len(q), self.setting.kv_heads, self.setting.group, -1)

    def _score(self, index: int, q: torch.Tensor) -> torch.Tensor | None:
        layer, window = self.layer(index), self.quota.window
        if window is None:
            return None
        scores: torch.Tensor = self.runtime.backend.score(layer.flow, q, layer.pool, window)
        return scores

    def _attend(self, index: int, q: torch.Tensor, chosen: Selection) -> Any:
        return self.runtime.backend.attend(q, self.layer(index).pool, self.plan.rows, chosen, self.options)

    def _quota(self) -> Any:
        layer = self.layer(0)
        scoring = layer.graphs is not None and layer.graphs.score is not None
        quota = self.plan.quota(layer.budget or DENSE, scoring, bool(layer.graphs and layer.graphs.state_writes))
        if quota.window is None:
            return quota
        return replace(quota, window=replace(quota.window, settled=False))  # a phase follows itself here

    def _fill(self, tokens: int) -> None:
        """Store the past without attending it: dense prefill of a long context would take minutes. Its queries seed the
        flow's attention mass, if it has any."""
        s, counts = self.setting, [tokens] * self.setting.batch
        call = self.runtime.extend(self.requests, counts)
        for layer in range(s.layers):
            q = self._randn(tokens, s.query_heads) if self.flow.mass or not s.on_gpu else None
            k, v = (self._randn(tokens, s.kv_heads) for _ in range(2))
            call.store(layer, k, v, query_heads=s.query_heads, scale=s.head_dim**-0.5, q=q if self.flow.mass else None)
            for store, x in ((self.keys, k), (self.values, v)):
                store.append(x.unflatten(0, (s.batch, tokens)).transpose(1, 2).contiguous())
