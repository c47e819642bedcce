"""The life of a request on a pool and a backend: admit, extend, step, fork, crop, reorder, preempt, resume, finish."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvsieve.backends import Backend, get_backend
from kvsieve.budget import BudgetLike
from kvsieve.call import Attended, Call, CallRecord, ReadStats
from kvsieve.errors import ConfigError, NotCroppable
from kvsieve.flow import Flow, check_evicting, check_flow, choose_page_size, load_flow
from kvsieve.layers import Layer, Layers
from kvsieve.mass import RequestMass
from kvsieve.paging.table import CROP_ROWS, RequestId, RequestTables
from kvsieve.retention import KEEP, Evict, Retention
from kvsieve.runtime_arguments import budgets_of, check_arguments, check_distinct

__all__ = ["CROP_ROWS", "Attended", "Call", "ReadStats", "RequestId", "Runtime"]


class Runtime:
    """Runs a flow over requests; all layers share one runtime.

    Args:
        flow: a flow, the name of a registered one, or ``file.py:ClassName``.
        budget: pages attended per step, for all layers or per layer; None where tokens are evicted.
        page_size: tokens per page; None: the flow's own, else 16.
        num_blocks: blocks of the pool; None: it grows.
        dense_layers: layers that attend everything and keep no summaries; none where tokens are evicted.
        backend: a backend or its name.
        retention: ``Keep()``: all K and V stay, steps attend what the flow selects; ``Evict(capacity)``: so many tokens
            per (request, KV head) stay, by attention mass alone, and all of them are attended.

    Raises:
        ConfigError: the flow cannot honour page size, budget or retention, or the backend refuses it.
    """

    def __init__(
        self,
        flow: Flow | str,
        budget: BudgetLike | None = None,
        *,
        page_size: int | None = None,
        num_blocks: int | None = None,
        dense_layers: Collection[int] = (),
        backend: str | Backend = "eager",
        retention: Retention = KEEP,
    ) -> None:
        self.flow = load_flow(flow) if isinstance(flow, str) else flow
        check_arguments(self.flow, num_blocks)
        self.page_size = choose_page_size(self.flow, page_size)
        for one in budgets_of(budget, retention):
            check_flow(self.flow, self.page_size, one)
        self.eviction, self.mass = None, self.flow.mass
        if isinstance(retention, Evict):
            check_evicting(self.flow, self.page_size, retention, dense_layers)
            self.eviction, self.mass = retention, self.mass and self.mass.where_evicted()
        self.backend = get_backend(backend)
        # One usable block more than asked for: block 0 is the null block.
        self.tables = RequestTables(
            self.page_size,
            None if num_blocks is None else num_blocks + 1,
            self.flow.init_state is not None or self.mass is not None or self.eviction is not None,
        )
        self.layers = Layers(self.flow, budget, self.page_size, dense_layers, self.backend, self.mass)
        self.counted = ReadStats()
        self._newest: CallRecord | None = None
        self._layers_known = False  # from the second call on: a first one may end before it reached them all
        self._preempted: dict[RequestId, dict[int, dict[str, torch.Tensor]]] = {}

    @torch.inference_mode(False)  # the copy outlives a caller's inference mode
    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """A runtime with requests and memory of its own; flows, graphs and backends never change and are shared."""
        memo.update({id(thing): thing for thing in self.layers.shared()})
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return twin

    def admit(self, keys: Sequence[Hashable] = ()) -> RequestId:
        """A new request.

        Args:
            keys: a name for each full page of what is to come, such as a chain hash of token ids, model and adapter.
                Equal keys must mean equal tokens and equal pasts. The request begins with the longest run of pages
                that earlier requests stored under the same keys (see :meth:`length`); state starts afresh. A flow whose
                attention mass is seeded by the prompt must see all of it: its requests share nothing, nor do those
                whose tokens are evicted.
        """
        if self.eviction or (self.mass is not None and self.mass.seed != "none"):
            keys = ()
        if keys:
            self._settle()
        request = self.tables.admit(keys)
        for _, layer in self.layers.items() if self.tables[request].rows else ():
            pool = self._reserved(layer).pool
            pool.enter(torch.tensor(self.tables[request].rows, device=pool.device))
        return request

    def length(self, request: RequestId) -> int:
        """Tokens of a request, evicted ones included."""
        return self.tables[request].length

    def extend(self, requests: Sequence[RequestId], counts: Sequence[int]) -> Call:
        """Prefill: ``counts`` new tokens for each request, attended densely and exactly; a whole prompt or a chunk.

        Raises:
            OutOfPages: the pool is too small; nothing is changed.
        """
        return self._open(requests, counts, decode=False)

    def step(self, requests: Sequence[RequestId]) -> Call:
        """A decode step: one new token for each request, all of which have a past.

        Raises:
            OutOfPages: the pool is too small; nothing is changed.
        """
        empty = [request for request in requests if not self.length(request)]
        if empty:
            raise ConfigError(f"step: expected requests with a past, received empty ones ({empty}); use extend first")
        return self._open(requests, [1] * len(requests), decode=True)

    def fork(self, request: RequestId) -> RequestId:
        """A second request with the same past: full pages are shared, the partial one is copied when one of the two
        writes to it, state is copied now."""
        self._settle()
        self._refuse_preempted([request])
        twin, rows = self.tables.fork(request)
        self._copy([], rows)
        for _, layer in self.layers.items():
            layer.queries.copy(request, twin)
        return twin

    def adopt(self, source: Runtime, requests: Sequence[RequestId]) -> list[RequestId]:
        """New requests with the tokens that another runtime holds for ``requests``.

        Flow, budget, page size and backend may differ: K and V are copied, pages are summarized by this runtime's flow,
        and state starts as after a prefill. The other runtime and its requests stay as they are.

        Raises:
            OutOfPages: the pool is too small; nothing is changed.
            ConfigError: this runtime's flow has attention mass that is seeded by prompt queries, which nobody kept; the
                layers of the two do not fit each other; or the other runtime has evicted tokens; nothing is changed.
        """
        if self.mass is not None and self.mass.seed != "none":
            raise ConfigError(
                f"adopt: expected a flow without prompt-seeded attention mass, received {self.flow!r}; prefill with it"
            )
        self._settle()
        source._settle()
        source._refuse_preempted(requests)
        lengths = [source.length(request) for request in requests]
        if any(source.tables[request].evicted for request in requests):
            raise ConfigError("adopt: expected requests all of whose tokens are stored, received some that lost tokens")
        theirs, mine = set(source.layers), set(self.layers)
        if any(lengths) and (not theirs or (mine and theirs != mine)):
            raise ConfigError(
                f"adopt: expected a runtime that has stored layers {sorted(mine) or '0, 1, ...'}, received one with "
                f"{sorted(theirs)}"
            )
        adopted = [self.admit() for _ in requests]
        try:
            if any(lengths):
                self._take_over(source, requests, adopted, lengths)
        except BaseException:
            self.finish(adopted)
            self.layers.forget(theirs - mine)
            raise
        return adopted

    def _take_over(
        self, source: Runtime, requests: Sequence[RequestId], adopted: Sequence[RequestId], lengths: Sequence[int]
    ) -> None:
        call = self.extend(adopted, lengths)
        for index, layer in source.layers.items():
            parts = [layer.pool.tokens(source.tables[one].blocks, n) for one, n in zip(requests, lengths, strict=True)]
            k, v = (torch.cat(field) for field in zip(*parts, strict=True))
            heads = layer.pool.num_kv_heads * layer.group
            call.store(index, k, v, query_heads=heads, scale=layer.scale)

    def reserve(self, requests: Sequence[RequestId], lengths: Sequence[int]) -> None:
        """Make room now for requests that will store so many tokens each: no step until then moves a pool.

        Raises:
            OutOfPages: the pool is limited and too small.
        """
        extra = 0 if self.eviction is None else self.page_size  # blocks of a trimmed page are free a step later
        self.tables.reserve(requests, [length + extra for length in lengths])
        for _, layer in self.layers.items():
            self._reserved(layer)

    def crop(self, requests: Sequence[RequestId], lengths: Sequence[int]) -> None:
        """Forget the tokens of each request from a length on.

        K, V and summaries are exact at any length. State is exact within the request's last multi-token call of at
        most ``CROP_ROWS`` rows, if nothing came after it; so is what eviction leaves.

        Raises:
            NotCroppable: the flow keeps state, or tokens are evicted, and a length lies further back; nothing is
                changed.
        """
        check_distinct("crop", requests)
        self._settle()
        self._refuse_preempted(requests)
        for request, length in zip(requests, lengths, strict=True):
            entry = self.tables[request]
            if not 0 <= length <= entry.length:
                raise ConfigError(f"crop: expected a length in [0, {entry.length}], received {length}")
            if self.tables.stateful and length < entry.crop_floor:
                kept = "what Evict leaves" if self.eviction else "the state"
                raise NotCroppable(
                    f"crop of request {request} to {length} tokens: {kept} of flow {self.flow!r} is exact down to "
                    f"{entry.crop_floor} only (the last multi-token call of at most {CROP_ROWS} rows); fork the "
                    "request before going on, or compute it anew"
                )
        for request, length in zip(requests, lengths, strict=True):
            self.tables.crop(request, length)

    def reorder(self, requests: Sequence[RequestId], order: Sequence[int]) -> list[RequestId]:
        """Beam search: place ``i`` of the result continues ``requests[order[i]]``; sources not named are finished."""
        check_distinct("reorder", requests)
        for request in requests:
            self.length(request)  # an unknown one is refused before anything changes
        if not all(0 <= source < len(requests) for source in order):
            raise ConfigError(f"reorder: expected places in [0, {len(requests)}), received {list(order)}")
        self._settle()
        self._refuse_preempted(requests)
        used: set[int] = set()
        result = []
        for source in order:
            result.append(self.fork(requests[source]) if source in used else requests[source])
            used.add(source)
        self.finish([request for place, request in enumerate(requests) if place not in used])
        return result

    def preempt(self, request: RequestId) -> None:
        """Move a request's K, V, summaries and state to the CPU and free its blocks, until :meth:`resume`."""
        self._settle()
        self._refuse_preempted([request])
        entry = self.tables[request]
        self._preempted[request] = {
            index: layer.pool.save(entry.blocks, entry.rows) for index, layer in self.layers.items()
        }
        self.tables.release(request)

    def resume(self, request: RequestId) -> None:
        """Bring a preempted request back, bit for bit.

        Raises:
            OutOfPages: the pool is too small; nothing is changed.
        """
        if request not in self._preempted:
            raise ConfigError(f"resume: expected a preempted request, received {request}")
        self.tables.restore(request)
        entry = self.tables[request]
        for index, saved in self._preempted.pop(request).items():
            self._reserved(self.layers[index]).pool.load(saved, entry.blocks, entry.rows)

    def finish(self, requests: Sequence[RequestId]) -> None:
        """End requests and free their blocks and state.

        Raises:
            ConfigError: an unknown request, or one that is named twice; nothing is changed.
        """
        check_distinct("finish", requests)
        for request in requests:
            self.length(request)  # an unknown one is refused before anything changes
        self._remember_prefixes()
        for request in requests:
            self.tables.finish(request)
            self._preempted.pop(request, None)
            for _, layer in self.layers.items():
                layer.queries.forget(request)
        if self._newest is not None and not any(request in self.tables for request in self._newest.grown):
            self._close()

    @property
    def stats(self) -> ReadStats:
        """What decode steps have read so far."""
        return replace(self.counted)

    def is_newest(self, record: CallRecord) -> bool:
        """Whether layers may still attend this call: the places of a request that has ended may be another's by now."""
        return record is self._newest and all(request in self.tables for request in record.requests)

    def layer(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Layer:
        """A layer with room for all tokens of the tables; made when it first attends."""
        if index not in self.layers:
            self.tables.prefixes.clear()  # this layer has not stored them
            self._layers_known = False  # nor what the newest call filled, should it end here
            self._refuse_hole(index)
        return self._reserved(self.layers.get(index, q, k, v, scale))

    def _open(self, requests: Sequence[RequestId], counts: Sequence[int], decode: bool) -> Call:
        if len(set(requests)) != len(requests) or len(requests) != len(counts):
            raise ConfigError(f"expected distinct requests, one count each; received {list(requests)}, {list(counts)}")
        if not requests or min(counts) < 0 or not sum(counts):
            raise ConfigError(f"expected at least one new token and no negative count, received {list(counts)}")
        self._settle()
        self._refuse_preempted(requests)
        growth = self.tables.append(requests, counts, self._limits(requests, counts, decode))
        self._copy(growth.copied, [])
        masses = []
        for request, count, cut in zip(requests, counts, growth.cuts, strict=True):
            entry = self.tables[request]
            if count:
                entry.stepped = decode
                entry.crop_floor = entry.length - count if not decode and count <= CROP_ROWS else entry.length
            if self.mass is not None:
                start = cut.stored if cut and decode else entry.stored - count  # kept queries count before a trim
                account = entry.mass.call(self.mass, start, count, decode, CROP_ROWS) if count else RequestMass()
                masses.append(account)
        self._newest = CallRecord(tuple(requests), tuple(counts))
        self.counted.steps += decode
        return Call(self, self._newest, growth, decode, masses)

    def _limits(self, requests: Sequence[RequestId], counts: Sequence[int], decode: bool) -> list[int | None]:
        """How many of its tokens each request may bring to a call: the prompt is trimmed when decoding begins."""
        if self.eviction is None:
            return [None] * len(requests)
        capacity = self.eviction.capacity
        return [
            capacity if count and (decode or self.tables[request].stepped) else None
            for request, count in zip(requests, counts, strict=True)
        ]

    def _settle(self) -> None:
        """The newest call is over: all layers must have attended it, unless its requests are finished."""
        call = self._newest
        if call is None:
            return
        missed = sorted(set(self.layers) - call.attended)
        if missed and any(request in self.tables for request in call.grown):
            raise ConfigError(
                f"layers {missed} did not attend the previous call, so their K and V have a hole: let them attend, "
                f"or finish its requests {call.grown}"
            )
        self._layers_known |= bool(call.attended) and any(request in self.tables for request in call.grown)
        self._remember_prefixes()
        self._close()

    def _close(self) -> None:
        """No layer attends the newest call any more."""
        self._newest = None
        self.tables.settle()

    def _remember_prefixes(self) -> None:
        """Offer the pages that the newest call filled to later requests, once every layer has stored them."""
        call = self._newest
        if call is None or not self._layers_known or not call.attended.issuperset(self.layers):
            return
        for request in call.grown:
            if request in self.tables:
                entry = self.tables[request]
                full = entry.length // self.page_size
                for key, block in zip(entry.keys[:full], entry.blocks, strict=False):
                    self.tables.prefixes.insert(key, block)

    def _refuse_preempted(self, requests: Sequence[RequestId]) -> None:
        out = [request for request in requests if request in self._preempted]
        if out:
            raise ConfigError(
                f"expected requests that are in the pool, received preempted ones {out}; resume them first"
            )

    def _refuse_hole(self, index: int) -> None:
        """A layer that starts when requests have a past would never have stored that past."""
        new = dict(zip(self._newest.requests, self._newest.counts, strict=True)) if self._newest else {}
        past = [request for request in self.tables if self.length(request) > new.get(request, 0)]
        if past:
            raise ConfigError(
                f"layer {index}: expected its first attend in the first call, received requests {past} with a past "
                "that it has not stored; finish them first"
            )

    def _reserved(self, layer: Layer) -> Layer:
        layer.pool.reserve(self.tables.block_allocator.capacity, self.tables.row_allocator.capacity)
        return layer

    def _copy(self, blocks: Sequence[tuple[int, int]], rows: Sequence[tuple[int, int]]) -> None:
        if blocks or rows:
            for _, layer in self.layers.items():
                self._reserved(layer).pool.copy(blocks, rows)
