"""vFlows as kvsieve flows: the same as the native forms, the same as direct execution, refusals, names."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsieve.backends import backend_names
from kvsieve.budget import Budget
from kvsieve.compat.vortex.abs import as_vtensor
from kvsieve.compat.vortex.bridge import registered, registered_names
from kvsieve.compat.vortex.flow import registry
from kvsieve.errors import ConfigError, FlowError, UnknownName
from kvsieve.flow import Flow, build_flow, load_flow
from kvsieve.graph import Geometry, trace_flow
from kvsieve.runtime import Runtime
from kvsieve.verify.accumulator import run_accumulator
from kvsieve.verify.accumulator_options import AccumulatorOptions
from kvsieve.verify.data import BulkData, LayerShape
from kvsieve.verify.subject import Subject
from kvsieve.verify.suite import drive
from vortex_world import BATCHED, RAGGED, World, bare

FILE = Path(__file__).parent / "vortex_flows.py"
NATIVE: dict[str, dict[str, Any]] = {
    "block_sparse_attention": {},
    "gqa_block_sparse_attention": {"scale": 0.09},  # fixed in v1
    "gqa_quest_sparse_attention": {},
    "h2o_sparse_attention": {},
    "gqa_h2o_sparse_attention": {},
    "h2o_token_sparse_attention": {},
    "gqa_h2o_token_sparse_attention": {},
}
BUDGET = Budget(3, 1, 2)


class Engine:
    """kvsieve's runtime over a World's requests: prompts, then steps; returns scores by segment and selected pages."""

    def __init__(self, flow: Flow, world: World, backend: str = "eager") -> None:
        self.world, self.runtime = world, Runtime(flow, BUDGET, page_size=world.page_size, backend=backend)
        self.requests = [self.runtime.admit() for _ in world.lengths]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, counts: list[int] | None = None) -> Any:
        call = self.runtime.step(self.requests) if counts is None else self.runtime.extend(self.requests, counts)
        return call.attend(0, q, k, v)

    def pages(self, attended: Any, b: int, h: int) -> set[int]:
        count = int(attended.selection.count[b])
        return set(attended.selection.pages[b, h, :count].tolist())

    def window_scores(self, scores: torch.Tensor) -> list[torch.Tensor]:
        """Scores [H, W] of the window of each request that is scored; what lies beyond is undefined."""
        pages = [-(-self.runtime.length(request) // self.world.page_size) for request in self.requests]
        scored = [count for count in pages if len(scores) == len(pages) or count > BUDGET.kept(count)]
        ends = BUDGET.sink + BUDGET.recent
        return [row[:, : count - ends] for row, count in zip(scores, scored, strict=True)]

    def state(self, name: str, b: int, pages: int) -> torch.Tensor:
        """State [H, pages, ...] of a request."""
        rows = self.runtime.tables[self.requests[b]].rows[:pages]
        return self.runtime.layers[0].pool.state[name][:, rows]


def tokens(world: World, count: int, seed: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    heads, width = world.heads, world.head_dim
    sizes = (count, heads * world.group, width), (count, heads, width), (count, heads, width)
    return tuple(torch.randn(size, generator=random) for size in sizes)


def world_of(flow: Flow) -> World:
    size = flow.page_size or 5
    return World(lengths=(63, 29, 48) if size > 1 else (40, 6, 22), page_size=size)


STEPS = 4


def prompts(world: World) -> list[int]:
    return [length - STEPS for length in world.lengths]


BACKENDS = [name if name == "eager" else pytest.param(name, marks=pytest.mark.slow) for name in backend_names()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NATIVE)
def test_op_form_and_native_form_agree(name: str, backend: str) -> None:
    forms = build_flow(name, **NATIVE[name]), build_flow(f"vortex:{name}")
    assert type(forms[0]).__module__.startswith("kvsieve.flows") and "vortex" in type(forms[1]).__module__
    world = world_of(forms[0])
    engines = [Engine(flow, world, backend) for flow in forms]
    counts = prompts(world)
    first = [engine.attend(*tokens(world, sum(counts), 0), counts).out for engine in engines]
    assert torch.equal(*first)
    for step in range(STEPS):
        drawn = tokens(world, len(counts), 1 + step)
        one, other = (engine.attend(*drawn) for engine in engines)
        assert torch.equal(*(torch.where(run.selection.listed(), run.selection.pages, -1) for run in (one, other)))
        torch.testing.assert_close(one.out, other.out, rtol=1e-5, atol=1e-6)
        scores = [engine.window_scores(run.scores) for engine, run in zip(engines, (one, other), strict=True)]
        for mine, theirs in zip(*scores, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
    if engines[0].runtime.layers[0].pool.state:
        pools = [engine.runtime.layers[0].pool.state for engine in engines]
        torch.testing.assert_close(pools[0]["heavy"], pools[1]["hh_score"].flatten(2)[..., 0], equal_nan=True)


@pytest.mark.parametrize("name", [*NATIVE, "t_running", "t_centered", "t_smoothed", "t_energy"])
def test_direct_execution_agrees_above_the_budget(name: str) -> None:
    """forward_cache and forward_indexer on a caller's pool choose the pages that the runtime chooses."""
    load_flow(f"{FILE}:RunningAverage")  # registers the file's flows
    bridged = registered(name)()
    world = world_of(bridged)
    engine, flow = Engine(bridged, world), bridged.vflow()
    pool = world.pool(flow.get_cache_meta_info(world.page_size, world.head_dim))
    counts = prompts(world)
    over = [-(-count // world.page_size) > BUDGET.kept(0) for count in counts]
    assert any(over) and not all(over)
    q, k, v = tokens(world, sum(counts), 0)
    engine.attend(q, k, v, counts)
    for b, (own_k, own_v) in enumerate(zip(k.split(counts), v.split(counts), strict=True)):
        loc = world.write_kv(pool, b, 0, own_k, own_v)
        flow.forward_cache(cache=pool, loc=loc, ctx=world.cache_context(len(loc)))
    for step in range(STEPS):
        q, k, v = tokens(world, len(counts), 1 + step)
        attended = engine.attend(q, k, v)
        chosen = direct_step(world, flow, pool, (q, k, v), [count + step for count in counts])
        for b, h in ((b, h) for b in range(len(counts)) for h in range(world.heads)):
            assert chosen[b, h] == engine.pages(attended, b, h), (step, b, h)
    for field in bridged._analysis.states:
        for b in range(len(counts)):
            full = slice(0, world.lengths[b] // world.page_size)
            rows = [[block * world.heads + h for block in world.blocks[b][full]] for h in range(world.heads)]
            stored = bare(pool[field])[torch.tensor(rows)].flatten(2)
            mine = engine.state(field, b, len(world.blocks[b]))[:, full].flatten(2)
            if over[b]:
                torch.testing.assert_close(stored, mine, rtol=1e-5, atol=1e-5)
            else:  # as v1: below the budget nothing is scored or saved
                assert bool((stored == bridged._analysis.states[field]).all())
                assert not torch.equal(stored, mine), "kvsieve accumulates from the start"


def direct_step(
    world: World, flow: Any, pool: dict[str, Any], drawn: tuple[torch.Tensor, ...], lengths: list[int]
) -> dict[tuple[int, int], set[int]]:
    """One step as an engine of vortex_torch runs it: pages attended by (request, head)."""
    q, k, v = drawn
    locs = [world.write_kv(pool, b, length, k[b : b + 1], v[b : b + 1]) for b, length in enumerate(lengths)]
    flow.forward_cache(cache=pool, loc=torch.cat(locs), ctx=world.cache_context(len(locs)))
    ctx = world.plan([length + 1 for length in lengths])
    segments = q.view(len(lengths), world.heads, world.group, -1).flatten(0, 1)
    o = as_vtensor(ctx.sparse_kv_indices.view(-1, 1, 1), RAGGED)
    flow.forward_indexer(as_vtensor(segments, BATCHED), o, pool, ctx=ctx)
    chosen = {}
    for b in range(len(lengths)):
        place = {block: page for page, block in enumerate(world.blocks[b])}
        for h in range(world.heads):
            first, last = ctx.sparse_kv_indptr[b * world.heads + h : b * world.heads + h + 2].tolist()
            rows = ctx.sparse_kv_indices[first:last].tolist()
            assert all(row % world.heads == h for row in rows) and len(set(rows)) == len(rows)
            chosen[b, h] = {place[row // world.heads] for row in rows}
    return chosen


def flow_file(tmp_path: Path, body: str) -> str:
    head = """
        import vortex_torch.cache as C
        import vortex_torch.indexer as I
        from vortex_torch.flow import register, vFlow

        class Base(vFlow):
            def create_cache(self, page_size, head_dim):
                return {"c": (1, head_dim), "s": (1, 1)}
            def forward_cache(self, cache, loc, ctx):
                C.Mean(1)(cache["k"], cache["c"], loc=loc, ctx=ctx)
            def score(self, q, cache, ctx):
                return I.Max(2)(I.GeMM()(q, cache["c"], ctx=ctx), ctx=ctx)
            def forward_indexer(self, q, o, cache, ctx):
                I.topK()(self.score(q, cache, ctx), o, ctx=ctx)

        class Mine(Base):
    """
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(head) + textwrap.indent(textwrap.dedent(body), "    "))
    return f"{path}:Mine"


REFUSED = {
    "state from the page": (
        """
        def forward_cache(self, cache, loc, ctx):
            super().forward_cache(cache, loc, ctx)
            C.Max(2)(cache["c"], cache["s"], loc=loc, ctx=ctx)
        def forward_indexer(self, q, o, cache, ctx):
            score = self.score(q, cache, ctx)
            I.Save()(score, cache["s"], ctx=ctx)
            I.topK()(score, o, ctx=ctx)
        """,
        "s is computed from the page in forward_cache and overwritten by Save",
    ),
    "summary from state": (
        """
        def forward_cache(self, cache, loc, ctx):
            C.Add()(cache["s"], cache["s"], cache["c"], loc=loc, ctx=ctx)
        """,
        "reads s before it writes it",
    ),
    "saves K": (
        """
        def forward_indexer(self, q, o, cache, ctx):
            I.Save()(I.Load()(cache["k"], ctx=ctx), cache["k"], ctx=ctx)
            super().forward_indexer(q, o, cache, ctx)
        """,
        "Save writes k, the stored tokens",
    ),
    "fills V": (
        """
        def forward_cache(self, cache, loc, ctx):
            C.Fill()(cache["v"], loc=loc, ctx=ctx)
        """,
        "writes v, the stored tokens",
    ),
    "no topK": ("def forward_indexer(self, q, o, cache, ctx): pass", "expected a final topK"),
    "two topK": (
        """
        def forward_indexer(self, q, o, cache, ctx):
            super().forward_indexer(q, o, cache, ctx)
            super().forward_indexer(q, o, cache, ctx)
        """,
        "expected one topK a flow, received a second",
    ),
    "score of heads": (
        """
        def forward_indexer(self, q, o, cache, ctx):
            I.topK()(I.GeMM()(q, cache["c"], ctx=ctx), o, ctx=ctx)
        """,
        r"topK: score: expected inner shape \(1, 1\)",
    ),
    "mixed formats": (
        """
        def forward_indexer(self, q, o, cache, ctx):
            I.topK()((q * cache["c"]).sum(dim=2, keepdim=True), o, ctx=ctx)
        """,
        "expected tensors of one format, received BATCHED, PAGED",
    ),
    "step fields": (
        """
        def forward_indexer(self, q, o, cache, ctx):
            I.topK()(I.Add(1.0, float(ctx.batch_sizes))(self.score(q, cache, ctx), cache["s"], ctx=ctx), o, ctx=ctx)
        """,
        "ctx.batch_sizes: not known while a flow is traced",
    ),
    "reserved name": (
        "def create_cache(self, page_size, head_dim): return {'k': (1, 1)}",
        "expected fields beside k and v, received k",
    ),
    "shapes": (
        "def create_cache(self, page_size, head_dim): return {'c': head_dim}",
        r"Mine.create_cache: expected \{name: \(r, c\)\} with r, c >= 1, received \{'c': ",
    ),
    "unknown field": (
        "def forward_indexer(self, q, o, cache, ctx): cache['d']",
        r"mine.py:17: cache: expected a field of create_cache, k or v, received 'd'. Remedy: .* c, k, s, v",
    ),
    "a branch": (
        """
        def forward_indexer(self, q, o, cache, ctx):
            if self.score(q, cache, ctx).sum() > 0:
                super().forward_indexer(q, o, cache, ctx)
        """,
        "mine.py:19: .*expected a flow that does not depend on values, received a branch",
    ),
    "a constructor": (
        "def __init__(self): raise OSError('no disk')",
        "^flow Mine: .*no disk",
    ),
    "a mistake": ("def forward_indexer(self, q, o, cache, ctx): q.nothing", r"mine.py:17: AttributeError"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_why(case: str, tmp_path: Path) -> None:
    body, says = REFUSED[case]
    with pytest.raises((ConfigError, FlowError), match=says):
        load_flow(flow_file(tmp_path, body))


def test_errors_of_the_trace_name_the_users_line(tmp_path: Path) -> None:
    body = """
    def forward_indexer(self, q, o, cache, ctx):
        score = self.score(q, cache, ctx)
        if q.shape[1] == 3:
            score = I.GeMM()(score, cache["c"], ctx=ctx)
        I.topK()(score, o, ctx=ctx)
    """
    flow = load_flow(flow_file(tmp_path, body))
    with pytest.raises(
        FlowError, match=r"mine.py:21: Mine.score: GeMM: expected x \[Nx, K\] and y \[Ny, K\] with one K"
    ):
        trace_flow(flow, Geometry(5, 20, 20, 3))


def test_widths_of_values(tmp_path: Path) -> None:
    """A field as wide as keys, made of values, needs values as wide as keys; it says so."""
    body = """
    def forward_cache(self, cache, loc, ctx):
        C.Mean(1)(cache["v"], cache["c"], loc=loc, ctx=ctx)
    """
    flow = load_flow(flow_file(tmp_path, body))
    assert flow.equal_widths and not load_flow(flow_file(tmp_path, "pass")).equal_widths
    runtime = Runtime(flow, BUDGET, page_size=5)
    request = runtime.admit()
    q, k, v = torch.zeros(4, 2, 8), torch.zeros(4, 1, 8), torch.zeros(4, 1, 6)
    with pytest.raises(ConfigError, match="requires keys and values of one width, received 8 and 6"):
        runtime.extend([request], [4]).attend(0, q, k, v)


def test_fields_may_have_any_name(tmp_path: Path) -> None:
    """Names that mean something to kvsieve, or are no identifiers, are stored under others."""
    body = """
    def __init__(self, mass=0.5):
        super().__init__()
        self.keep = mass
    def create_cache(self, page_size, head_dim):
        return {"c": (1, head_dim), "mass": (1, 1), "age": (1, head_dim), "hh-score": (1, 1)}
    def forward_cache(self, cache, loc, ctx):
        super().forward_cache(cache, loc, ctx)
        C.Max(1)(cache["k"], cache["age"], loc=loc, ctx=ctx)
        C.Fill(2.0)(cache["mass"], loc=loc, ctx=ctx)
        C.L2Norm(2)(cache["age"], cache["hh-score"], loc=loc, ctx=ctx)
    def forward_indexer(self, q, o, cache, ctx):
        score = I.Max(2)(I.GeMM()(q, cache["age"], ctx=ctx), ctx=ctx)
        score = I.Add(1.0, self.keep)(I.Add()(score, cache["hh-score"], ctx=ctx), cache["mass"], ctx=ctx)
        I.Save()(score, cache["mass"], ctx=ctx)
        I.topK()(score, o, ctx=ctx)
    """
    flow = load_flow(flow_file(tmp_path, body), mass=0.25)
    drive(Subject(flow), [LayerShape(2, 3, 20, 12)], BulkData(0), [41, 33], 2)
    graphs = trace_flow(flow, Geometry(5, 20, 20, 3))
    assert set(graphs.summary_fields) == {"c", "field_age", "field_hh_score"}
    assert float(graphs.state_fields["field_mass"].initial) == 2.0


def test_page_sizes() -> None:
    sub_blocks = load_flow(f"{FILE}:SubBlocks")
    assert sub_blocks.page_size == 16 and load_flow(f"{FILE}:SubBlocks", page_size=6).page_size == 6
    assert build_flow("vortex:h2o_token_sparse_attention").page_size == 1
    assert build_flow("vortex:h2o_sparse_attention").page_size is None


def test_names() -> None:
    flow = load_flow(f"{FILE}:RunningAverage", keep=0.25)
    assert repr(flow) == "RunningAverage(keep=0.25)" and flow.name == "vortex:t_running"
    assert build_flow("vortex:t_running").keep == build_flow("t_running").keep == 0.5
    assert registry.has("t_running") and "vortex:t_running" in registered_names()
    assert type(build_flow("h2o_sparse_attention")) is not type(build_flow("vortex:h2o_sparse_attention"))
    with pytest.raises(UnknownName, match="vortex:t_running"):
        build_flow("vortex:t_runing")
    with pytest.raises(UnknownName, match="did you mean vortex:t_running"):
        load_flow("t_runnin")
    with pytest.raises(ConfigError, match=r"its arguments are \(keep=0.5, page_size=None\)|its arguments are"):
        load_flow(f"{FILE}:RunningAverage", kep=1)
    with pytest.raises(UnknownName, match="flow class"):
        load_flow(f"{FILE}:vFlow")


def test_accumulators_are_recognised() -> None:
    """The bridged flow in the accumulator harness: bfloat16 state passes with decay and fails without."""
    flow = build_flow("vortex:h2o_token_sparse_attention")
    options = AccumulatorOptions(steps=300, state_dtype=torch.bfloat16)
    assert run_accumulator(flow, options).passed
    assert not run_accumulator(flow, replace(options, decay=1.0)).passed
