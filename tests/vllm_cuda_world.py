"""vLLM's CUDA cache without vLLM: blocks in random order, tokens outermost in a block, NaN where nothing is stored.

On a GPU if there is one, where captured steps are CUDA graphs; else Triton's interpreter runs the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from kvsieve import Budget
from kvsieve.backends.triton.launch import INTERPRETED
from kvsieve.integrations.vllm.config import parse
from kvsieve.integrations.vllm.engine import Engine
from kvsieve.integrations.vllm.group import LayerGroup
from kvsieve.integrations.vllm.plan import Batch
from kvsieve.integrations.vllm.planner import Facts, Step, StepPlanner
from kvsieve.integrations.vllm.tokenmajor import TokenMajorLayer
from kvsieve.verify.engine_steps import StepOracle

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")


@dataclass
class Cache:
    """A layer's cache ``[blocks, H, block_size, 2 * D]``, in memory ``[blocks, block_size, H, 2 * D]``, and who has
    which of its blocks. Block 0 is nobody's."""

    heads: int
    width: int
    block_size: int
    blocks: int
    dtype: torch.dtype = torch.float32
    tables: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.blocks, self.block_size, self.heads, 2 * self.width
        self.memory = torch.full(shape, float("nan"), dtype=self.dtype, device=DEVICE)
        self.draw = torch.Generator().manual_seed(self.blocks)
        self.free = (torch.randperm(self.blocks - 1, generator=self.draw) + 1).tolist()

    @property
    def tensor(self) -> torch.Tensor:
        """The cache as vLLM hands it over."""
        return self.memory.transpose(1, 2)

    def admit(self, length: int) -> int:
        """A request with so many random tokens; its place."""
        self.tables.append([])
        self.lengths.append(0)
        self.grow(len(self.tables) - 1, length)
        return len(self.tables) - 1

    def grow(self, request: int, count: int) -> torch.Tensor:
        """Store random tokens; their slots."""
        first, table = self.lengths[request], self.tables[request]
        while len(table) * self.block_size < first + count:
            table.append(self.free.pop(0))
        at = torch.arange(first, first + count)
        slots = torch.tensor(table, dtype=torch.int64)[at // self.block_size] * self.block_size + at % self.block_size
        values = torch.randn(count, self.heads, 2 * self.width, generator=self.draw).to(self.dtype)
        self.memory.flatten(0, 1)[slots.to(DEVICE)] = values.to(DEVICE)
        self.lengths[request] += count
        return slots

    def end(self, request: int) -> None:
        """Its blocks are the next that others get; what they hold stays."""
        self.free = self.tables[request] + self.free
        self.tables[request], self.lengths[request] = [], 0

    def chunk(self, request: int, count: int, columns: int) -> Batch:
        """Part of a prompt, stored: what vLLM says of it."""
        slots = self.grow(request, count)
        table = torch.zeros(1, columns, dtype=torch.int32)
        table[0, : len(self.tables[request])] = torch.tensor(self.tables[request], dtype=torch.int32)
        length = torch.tensor([self.lengths[request]], dtype=torch.int32)
        return Batch(torch.tensor([0, count], dtype=torch.int32), length, torch.tensor([True]), table, slots)

    def step(self, requests: list[int], rows: int, columns: int) -> Batch:
        """Each request gets a token: what vLLM says of that, padded to so many rows, its table full of old numbers."""
        slots = torch.full((rows,), -1)
        table = torch.randint(0, self.blocks, (rows, columns), generator=self.draw).to(torch.int32)
        lengths = torch.zeros(rows, dtype=torch.int32)
        for row, request in enumerate(requests):
            slots[row] = self.grow(request, 1)
            table[row, : len(self.tables[request])] = torch.tensor(self.tables[request], dtype=torch.int32)
            lengths[row] = self.lengths[request]
        table[len(requests) :] = 0
        starts = torch.arange(rows + 1).clamp(max=len(requests)).to(torch.int32)
        return Batch(starts, lengths, torch.zeros(rows, dtype=torch.bool), table, slots)


def around(page: int, block: int, budget: Budget) -> list[int]:
    """Lengths about the ends of pages, blocks and the budget."""
    edges = {page, block, 2 * block, budget.kept(1) * page, (budget.kept(1) + 1) * page}
    return sorted({max(2, edge + more) for edge in edges for more in (-1, 0, 1)})


class Watched:
    """Keeps what a decode step worked with, which a graph works with again, and has it checked on the CPU."""

    def __init__(self) -> None:
        self.oracle, self.seen = StepOracle([0]), ()

    def step(self, *seen: Any) -> None:
        self.seen = seen
        if DEVICE.type == "cpu" or not torch.cuda.is_current_stream_capturing():
            self.check()

    def check(self) -> None:
        impl, pool, rows, quota, *tensors, scales = self.seen
        q, scores, selection, out, lse = tensors
        listed = quota.window and SimpleNamespace(**{n: getattr(quota.window, n).cpu() for n in ("requests", "widths")})
        self.oracle.step(
            SimpleNamespace(
                index=0, budget=impl.budget, scale=impl.scale, graphs=impl.graphs, logits_soft_cap=impl.logits_soft_cap,
                sinks=None if impl.sinks is None else impl.sinks.cpu(),
            ),
            SimpleNamespace(
                page_size=pool.page_size, num_kv_heads=pool.num_kv_heads, dtype=pool.dtype, k=pool.k.cpu(),
                v=pool.v.cpu(), summaries={name: field.cpu() for name, field in pool.summaries.items()}, state={},
            ),
            SimpleNamespace(lengths=rows.lengths.cpu(), table=rows.table.cpu(), state=None),
            SimpleNamespace(sink=quota.sink, recent=quota.recent, window=listed),
            q.cpu(), None if scores is None else scores.cpu(),
            SimpleNamespace(pages=selection.pages.cpu(), count=selection.count.cpu()), out.cpu(), lse.cpu(), scales,
        )  # fmt: skip


class Layer(TokenMajorLayer):
    """A layer of vLLM without vLLM."""

    alibi_slopes = None
    kv_sharing_target_layer_name = None
    attn_type = "decoder"

    def __init__(self, engine: Engine, cache: Cache, group: int, softcap: float | None = None, sinks: bool = False):
        self.num_kv_heads, self.num_heads, self.head_size = cache.heads, cache.heads * group, cache.width
        self.scale, self.sliding_window, self.logits_soft_cap = cache.width**-0.5, (-1, -1), softcap
        self.sinks = torch.randn(self.num_heads, generator=cache.draw).to(DEVICE) if sinks else None
        self.join(engine)


class World:
    """One layer, its cache and its planner, watched by the oracle."""

    NAME = "layers.0.attn"

    def __init__(
        self,
        settings: dict[str, Any],
        cache: Cache,
        group: int,
        *,
        longest: int,
        rows: int = 8,
        graphs: bool = True,
        **options: Any,
    ) -> None:
        self.engine = Engine(parse({"backend": "triton", **settings}))
        self.cache, self.longest = cache, longest
        self.layer = Layer(self.engine, cache, group, **options)
        vllm_layer = SimpleNamespace(impl=self.layer, head_size=cache.width)
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=rows),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
            model_config=SimpleNamespace(max_model_len=longest),
        )
        self.group = LayerGroup(self.engine, {self.NAME: vllm_layer}, config, cache.block_size, cache.dtype, DEVICE)
        self.planner = StepPlanner(self.group, rows, longest, cache.block_size, graphs, DEVICE)
        self.engine.recorder = self.watched = Watched()
        self.oracle = self.watched.oracle

    def admit(self, length: int) -> int:
        """A request whose prompt vLLM attends: its pages are summarized, chunk by chunk."""
        request = self.cache.admit(0)
        for count in (length // 3, length - length // 3):
            if count:
                batch = self.cache.chunk(request, count, self.columns)
                step = self.planner.step(self.facts(batch))
                assert count == 1 or (step.decoding is None and step.dense is not None)
                self.layer.prepare_step(self.cache.tensor, step, self.queries(count))
        return request

    @property
    def columns(self) -> int:
        """Of vLLM's block table."""
        return -(-self.longest // self.cache.block_size)

    def queries(self, tokens: int) -> torch.Tensor:
        """Random queries, as a part of a wider row."""
        both = torch.randn(tokens, 2 * self.layer.num_heads, self.cache.width, generator=self.cache.draw)
        return both[:, : self.layer.num_heads].to(self.cache.dtype).to(DEVICE)

    def facts(self, batch: Batch) -> Facts:
        """What the planner is told of a batch."""
        return Facts(
            batch.starts,
            batch.lengths,
            batch.prefilling,
            int(batch.lengths.max()),
            len(batch.slots),
            batch.lengths.to(DEVICE),
            batch.blocks.to(DEVICE),
            batch.slots.to(DEVICE),
        )

    def run(self, step: Step, tokens: int, q: torch.Tensor | None = None) -> torch.Tensor:
        """Attend the rows of a step that the flow decides: out [T, Hq, D], NaN in other rows."""
        q = self.queries(tokens) if q is None else q
        out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=DEVICE)
        pool = self.layer.prepare_step(self.cache.tensor, step, q)
        self.layer.decode_step(pool, step, self.NAME, q, out)
        return out


class Captured:
    """A decode step of a world that vLLM captures on a dummy batch of so many rows. Each later run fills the same
    memory and calls the same objects again; on a GPU it replays a CUDA graph."""

    def __init__(self, world: World, rows: int) -> None:
        dummy = Batch(
            torch.arange(rows + 1, dtype=torch.int32),
            torch.ones(rows, dtype=torch.int32),
            torch.zeros(rows, dtype=torch.bool),
            torch.zeros(rows, world.columns, dtype=torch.int32),
            torch.full((rows,), -1),
        )
        self.world, self.rows = world, rows
        self.q = world.queries(rows)
        self.out = torch.zeros_like(self.q)
        recorder, world.engine.recorder = world.engine.recorder, None  # dummies hold no tokens
        self.step = world.planner.captured(world.facts(dummy))
        self._call()
        world.engine.recorder = recorder
        self.graph: torch.cuda.CUDAGraph | None = None
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._call()

    def run(self, batch: Batch) -> torch.Tensor:
        """The step of a later batch: out [rows, Hq, D]."""
        self.world.planner.step(self.world.facts(batch))
        self.q.copy_(self.world.queries(self.rows))
        self.out.fill_(float("nan"))
        if self.graph is None:
            self._call()
        else:
            self.graph.replay()
            torch.cuda.synchronize()
            self.world.watched.check()
        return self.out

    def _call(self) -> None:
        world = self.world
        pool = world.layer.prepare_step(world.cache.tensor, self.step, self.q)
        world.layer.decode_step(pool, self.step, world.NAME, self.q, self.out)
