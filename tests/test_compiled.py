"""The compiled backend's own parts: CPU kernels beside float64, what is compiled, and the missing compiler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvsieve.backends.attention import attend_selected
from kvsieve.backends.base import AttentionOptions, Selection
from kvsieve.backends.compiled import native
from kvsieve.backends.compiled.products import einsum, matmul
from kvsieve.backends.select import select_pages
from kvsieve.budget import Budget
from kvsieve.graph import FieldSpec
from kvsieve.mass import AttentionMass
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import MassRows, Quota, Rows
from kvsieve.reference import reduce_group
from kvsieve.runtime import Runtime
from support import bare_window

F64 = torch.float64


def poisoned_pool(heads: int, blocks: int, page: int, widths: tuple[int, int], dtype: torch.dtype) -> LayerPool:
    """A pool of NaN."""
    pool = LayerPool(heads, page, *widths, dtype, torch.device("cpu"), {}, {})
    pool.reserve(blocks, 1)
    pool.k.fill_(math.nan), pool.v.fill_(math.nan)
    return pool


def filled(
    lengths: list[int], heads: int, page: int, widths: tuple[int, int], dtype: torch.dtype, seed: int, runs: bool
) -> tuple[LayerPool, Rows]:
    """Requests in a pool whose other tokens, those of partial pages included, are NaN; blocks in a row or anywhere."""
    random = torch.Generator().manual_seed(seed)
    pages = [-(-length // page) for length in lengths]
    pool = poisoned_pool(heads, sum(pages) + 3, page, widths, dtype)
    order = torch.arange(sum(pages)) if runs else torch.randperm(sum(pages), generator=random)
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int64)
    first = 0
    for i, (count, length) in enumerate(zip(pages, lengths, strict=True)):
        table[i, :count] = order[first : first + count] + 1
        first += count
        token = torch.arange(length)
        for field in (pool.k, pool.v):
            field[:, table[i, token // page], token % page] = torch.randn(
                heads, length, field.shape[-1], generator=random
            ).to(dtype)
    ones = (1,) * len(lengths)
    return pool, Rows(tuple(n - 1 for n in lengths), ones, tuple(lengths), table, torch.tensor(lengths))


def choose(rows: Rows, page: int, heads: int, keep: int, seed: int) -> Selection:
    """The last page of each request and some others, different ones for each head."""
    random = torch.Generator().manual_seed(seed)
    pages = [-(-length // page) for length in rows.lengths]
    count = torch.tensor([min(keep, s) for s in pages])
    listed = torch.zeros(len(pages), heads, int(count.max()), dtype=torch.int64)
    for i, s in enumerate(pages):
        for h in range(heads):
            some = torch.randperm(s - 1, generator=random)[: int(count[i]) - 1]
            listed[i, h, : int(count[i])] = torch.cat([some, torch.tensor([s - 1])]).sort().values
    return Selection(listed, count)


def exact(
    q: torch.Tensor, pool: LayerPool, rows: Rows, selection: Selection, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention in float64, segment by segment, and what the listed tokens [B, H, K, p] receive."""
    out = torch.zeros(*q.shape[:3], pool.v.shape[-1], dtype=F64)
    lse = torch.zeros(q.shape[:3], dtype=F64)
    mass = torch.zeros(*selection.pages.shape, pool.page_size, dtype=F64)
    for i, length in enumerate(rows.lengths):
        for h in range(q.shape[1]):
            pages = selection.pages[i, h, : int(selection.count[i])].tolist()
            tokens = [t for page in pages for t in range(page * pool.page_size, (page + 1) * pool.page_size)]
            token = torch.tensor([t for t in tokens if t < length])
            places = rows.table[i, token // pool.page_size], token % pool.page_size
            k, v = pool.k[h][places].to(F64), pool.v[h][places].to(F64)
            logits = q[i, h].to(F64) @ k.T * options.scale
            if options.softcap:
                logits = options.softcap * torch.tanh(logits / options.softcap)
            lse[i, h] = torch.logsumexp(logits, -1)
            if options.sinks is not None:
                lse[i, h] = torch.logaddexp(lse[i, h], options.sinks[h].to(F64))
            received = torch.exp(logits - lse[i, h][:, None])
            out[i, h] = received @ v
            if options.mass is not None:
                mass[i, h].flatten()[: len(token)] = reduce_group(received, options.mass.group, 0)
    return out, lse, mass


GEOMETRIES = [  # group, width of K, width of V, page size
    (1, 16, 16, 1),
    (3, 20, 20, 5),
    (4, 128, 128, 16),
    (7, 80, 48, 33),
    (8, 64, 17, 16),
    (9, 5, 130, 3),
    (24, 96, 96, 2),
]
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture
def poisoned_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten is NaN."""
    empty = torch.empty

    def poisoned(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*arguments, **options)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(native.torch, "empty", poisoned)


@pytest.mark.usefixtures("poisoned_results")
@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("dtype", ROUNDOFF)
@pytest.mark.parametrize(("group", "width_k", "width_v", "page"), GEOMETRIES)
def test_attention_kernel(group: int, width_k: int, width_v: int, page: int, dtype: torch.dtype, runs: bool) -> None:
    lengths, heads = [1, page, page + 1, 7 * page - 1, 300 + page, 1500], 3
    pool, rows = filled(lengths, heads, page, (width_k, width_v), dtype, group, runs)
    random = torch.Generator().manual_seed(width_k)
    sinks = torch.randn(heads, group, generator=random)
    q = torch.randn(len(lengths), heads, group, width_k, generator=random).to(dtype)
    cases = ((4, None, None, "max"), (1000 // page + 1, 3.0, sinks, "sum"), (10**6, None, sinks, "mean"))
    for keep, softcap, sink, reduction in cases:
        selection = choose(rows, page, heads, keep, seed=keep)
        options = AttentionOptions(width_k**-0.5, softcap, sink, AttentionMass(group=reduction))
        out, lse, mass = native.attend(q, pool, rows, selection, options)
        wanted, wanted_lse, wanted_mass = exact(q, pool, rows, selection, options)
        assert out.dtype == dtype and lse.dtype == mass.dtype == torch.float32
        without = native.attend(q, pool, rows, selection, replace(options, mass=None))
        assert torch.equal(without[0], out) and torch.equal(without[1], lse) and without[2] is None
        # Sums in float32 of at most 1500 terms that are at most |v| <= 6; the output is rounded once.
        assert ((out.to(F64) - wanted).abs() <= ROUNDOFF[dtype] * wanted.abs() + 4e-6).all()
        assert ((lse.to(F64) - wanted_lse).abs() <= 4e-6).all()
        # A logit is a sum of at most 128 products; tokens that do not exist received exactly nothing.
        assert ((mass.to(F64) - wanted_mass).abs() <= 4e-6 * wanted_mass).all()


def test_queries_may_lie_anywhere() -> None:
    """Strided queries, as models hand them over, are the same queries."""
    pool, rows = filled([50, 9], 2, 5, (20, 20), torch.float32, 0, False)
    q = torch.randn(2, 3, 2, 20).transpose(1, 2)
    apart = torch.randn(2, 2, 20, 3).transpose(2, 3)
    selection, options = choose(rows, 5, 2, 4, 0), AttentionOptions(0.3)
    for one in (q, apart):
        out, _, _ = native.attend(one, pool, rows, selection, options)
        assert torch.equal(out, native.attend(one.contiguous(), pool, rows, selection, options)[0])
        assert (out - attend_selected(one, pool, rows, selection, options)[0]).abs().max() < 1e-5


@pytest.mark.parametrize("length", [700, 20_000])
def test_results_depend_on_nothing_but_the_segment(length: int) -> None:
    """The same bits with any number of threads, alone or beside others, in a row or scattered."""
    pool, rows = filled([length, 40], 2, 16, (64, 64), torch.bfloat16, 1, False)
    q = torch.randn(2, 2, 3, 64).bfloat16()
    selection, options = choose(rows, 16, 2, 10**6, 0), AttentionOptions(0.125, mass=AttentionMass())
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(native.attend(q, pool, rows, selection, options))
    torch.set_num_threads(threads)
    alone = Rows(rows.starts[:1], (1,), rows.lengths[:1], rows.table[:1], rows.lengths_tensor[:1])
    results.append(native.attend(q[:1], pool, alone, Selection(selection.pages[:1], selection.count[:1]), options))
    for result in results[1:]:
        assert all(torch.equal(one[:1], first[:1]) for one, first in zip(result, results[0], strict=True))


@pytest.mark.parametrize("token", [3, 500])
def test_a_logit_far_above_those_of_other_chunks(token: int) -> None:
    """Further above than exponentials reach."""
    pool, rows = filled([700], 2, 5, (20, 12), torch.float32, 2, False)
    q = torch.randn(1, 2, 3, 20).abs()
    pool.k[:, rows.table[0, token // 5], token % 5] = 100.0
    selection, options = choose(rows, 5, 2, 10**6, 0), AttentionOptions(1.0, mass=AttentionMass())
    wanted = exact(q, pool, rows, selection, options)
    for one, right in zip(native.attend(q, pool, rows, selection, options), wanted, strict=True):
        assert one is not None and torch.allclose(one.to(F64), right, rtol=1e-5, atol=1e-5)


def test_nan_in_attended_keys_is_seen() -> None:
    """What is attended is never hidden: a NaN in a listed key reaches the output of its segment, and no other."""
    pool, rows = filled([40, 40], 2, 8, (16, 16), torch.float32, 1, False)
    pool.k[0, rows.table[0, 1], 3, 5] = math.nan
    q = torch.randn(2, 2, 3, 16)
    for reduction in ("sum", "mean", "max"):
        options = AttentionOptions(0.25, mass=AttentionMass(group=reduction))
        for one in native.attend(q, pool, rows, choose(rows, 8, 2, 9, 0), options):
            assert one is not None and one[0, 0].isnan().all()
            assert one[0, 1].isfinite().all() and one[1].isfinite().all()


def test_nan_of_one_query_head_is_seen_in_the_mass() -> None:
    pool, rows = filled([40], 2, 8, (16, 16), torch.float32, 1, False)
    q = torch.randn(1, 2, 3, 16)
    q[0, 0, 1] = math.nan
    for reduction in ("sum", "mean", "max"):
        options = AttentionOptions(0.25, mass=AttentionMass(group=reduction))
        mass = native.attend(q, pool, rows, choose(rows, 8, 2, 9, 0), options)[2]
        assert mass is not None and mass[0, 0].isnan().all() and mass[0, 1].isfinite().all()


@pytest.mark.usefixtures("poisoned_results")
@pytest.mark.parametrize("dtype", ROUNDOFF)
@pytest.mark.parametrize(("group", "width_k", "width_v", "page"), GEOMETRIES)
def test_seeding_kernel(group: int, width_k: int, width_v: int, page: int, dtype: torch.dtype) -> None:
    """Column sums beside float64: whole prompts, chunks and windows, every decay and reduction."""
    heads, length = 3, 5 * page + (101 if dtype is torch.float32 and page > 5 else 701)  # short prompts and long
    pool, rows = filled([length], heads, page, (width_k, width_v), dtype, group, False)
    random = torch.Generator().manual_seed(width_k)
    sinks = torch.randn(heads, group, generator=random)
    token = torch.arange(length)
    k = pool.k[:, rows.table[0, token // page], token % page].to(F64)
    for n, decay, reduction, softcap in ((length, 1.0, "sum", None), (77, 0.5, "max", 3.0), (1, 0.0, "mean", None)):
        q = torch.randn(heads, n, group, width_k, generator=random).to(dtype).transpose(0, 1)
        options = AttentionOptions(width_k**-0.5, softcap, sinks if softcap else None, AttentionMass(decay, reduction))
        received = native.prompt_mass(q, pool, rows.table[0], length - n, options)
        logits = torch.einsum("nhgd,hld->hgnl", q.to(F64), k) * options.scale
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(torch.ones(n, length, dtype=torch.bool).triu(length - n + 1), -torch.inf)
        lse = torch.logsumexp(logits, -1)
        lse = torch.logaddexp(lse, sinks.to(F64)[..., None]) if softcap else lse
        reduced = reduce_group(torch.exp(logits - lse[..., None]), reduction, 1)
        expected = torch.einsum("n,hnl->hl", decay ** torch.arange(n - 1, -1, -1, dtype=F64), reduced)
        # Queries that count for less than 2**-32 may be left out.
        assert ((received.to(F64) - expected).abs() <= 4e-6 * expected + 2.0**-31).all()
        threads = torch.get_num_threads()
        torch.set_num_threads(3)
        assert torch.equal(native.prompt_mass(q, pool, rows.table[0], length - n, options), received)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("page", [1, 5, 33])
@pytest.mark.parametrize("rebase", [{}, {0: 0.25, 2: 0.0}])
def test_stored_mass_is_rebased_and_added_to(
    page: int, rebase: dict[int, float], sums: bool, generator: torch.Generator
) -> None:
    """Beside float64: rows of the lists grow, other rows of rebased requests are multiplied, no other row changes."""
    heads, lengths = 3, [4 * page, 7 * page - page // 2, page]
    pages = [-(-length // page) for length in lengths]
    specs = {"mass": FieldSpec((page,), torch.float32, torch.zeros(page)),
             "mass_sum": FieldSpec((), torch.float32, torch.tensor(0.0))}  # fmt: skip
    pool = LayerPool(heads, page, 4, 4, torch.float32, torch.device("cpu"), {}, specs)
    pool.reserve(1, sum(pages) + 4)
    table = torch.zeros(3, max(pages) + 2, dtype=torch.int64)  # wider than needed, null behind
    order = torch.randperm(sum(pages), generator=generator) + 2
    for i, part in enumerate(order.split(pages)):
        table[i, : pages[i]] = part
    pool.state["mass"].fill_(math.nan), pool.state["mass_sum"].fill_(math.nan)
    pool.state["mass"][:, order] = torch.rand(heads, len(order), page, generator=generator)
    pool.state["mass"][:, order[::3]] = 0.0
    pool.state["mass_sum"][:, order] = pool.state["mass"][:, order].sum(-1)
    rows = Rows((0,) * 3, (1,) * 3, tuple(lengths), table, torch.tensor(lengths))
    mass = MassRows(table, torch.tensor([2.0, 1.0, 0.5]), rebase)
    selection = choose(rows, page, heads, 3, 0)
    increment = torch.rand(3, heads, selection.pages.shape[2], page, generator=generator)
    wanted = {name: field.to(F64) for name, field in pool.state.items()}
    for i, h in itertools.product(range(3), range(heads)):
        for field in wanted.values():
            field[h, table[i, : pages[i]]] *= rebase.get(i, 1.0)
        for place, number in enumerate(selection.pages[i, h, : int(selection.count[i])].tolist()):
            added = increment[i, h, place].to(F64) * mass.unit[i]
            wanted["mass"][h, table[i, number]] += added
            wanted["mass_sum"][h, table[i, number]] += added.sum()
    if not sums:
        del pool.state["mass_sum"], wanted["mass_sum"]
    native.add_mass(pool, rows, mass, selection, increment)
    for name, field in wanted.items():
        assert torch.allclose(pool.state[name].to(F64), field, rtol=1e-6, atol=1e-7, equal_nan=True)
        assert pool.state[name][:, [0, 1, -1]].isnan().all()


@pytest.mark.parametrize("width", [3, 511, 513, 5000, 70_001])
def test_selection_kernel_on_long_windows(width: int, generator: torch.Generator) -> None:
    """Beside the sort of the eager backend, on random, tied, constant and special scores."""
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-42, -1e-42])
    rows = (
        torch.randn(width, generator=generator),
        torch.randint(0, 3, (width,), generator=generator).float(),
        torch.full((width,), -2.5),
        special[torch.randint(len(special), (width,), generator=generator)],
        1.0 + torch.arange(width) * 2.0**-23,
    )
    scores = torch.stack([torch.stack([row, row.flip(0)]) for row in rows])
    for k in {1, 2, width // 2, width - 1}:
        ks = torch.full((len(rows),), k)
        window = bare_window([width] * len(rows), ks)
        count = ks + 3
        quota = Quota(1, 2, torch.full((len(rows),), width + 3), count, k + 3, True, window)
        assert torch.equal(native.select(scores, quota, 2).pages, select_pages(scores, quota, 2).pages)


# What is compiled


def run_steps(
    runtime: Runtime, lengths: list[int], steps: int, heads: int = 3, group: int = 2, width: int = 20
) -> None:
    requests = [runtime.admit() for _ in lengths]
    total = sum(lengths)
    sizes = heads * group, heads, heads
    runtime.extend(requests, lengths).attend(0, *(torch.randn(total, h, width) for h in sizes))
    for _ in range(steps):
        runtime.step(requests).attend(0, *(torch.randn(len(lengths), h, width) for h in sizes))
    runtime.finish(requests)


@pytest.fixture
def compilations() -> Iterator[list[object]]:
    """Grows by one with every graph that is compiled."""
    compiled: list[object] = []
    handler = torch._dynamo.callback.callback_handler
    handler.register_start_callback(compiled.append)
    yield compiled
    handler.remove_start_callback(compiled.append)


def test_shapes_of_a_batch_compile_nothing_anew(compilations: list[object]) -> None:
    """Batches, windows (of one page too), filled pages and pools of many sizes: two compilations for one flow."""
    runtime = Runtime("gqa_quest_sparse_attention", Budget(1, 1, 1), page_size=4, backend="compiled")
    for lengths in ([15], [70], [33, 5, 150], [400], [9] * 7):
        run_steps(runtime, lengths, 6)
    assert len(compilations) == 2


def test_gathered_pages_are_not_copied() -> None:
    """Scoring allocates less than the pages that it reads would take in float32: an eighth here."""
    runtime = Runtime("gqa_quest_sparse_attention", Budget(4, 1, 1), page_size=2, backend="compiled")
    request = runtime.admit()
    sizes = (6, 3, 3)
    runtime.extend([request], [8000]).attend(0, *(torch.randn(8000, h, 20) for h in sizes))
    runtime.step([request]).attend(0, *(torch.randn(1, h, 20) for h in sizes))
    with torch.profiler.profile(profile_memory=True) as profile:
        runtime.step([request]).attend(0, *(torch.randn(1, h, 20) for h in sizes))
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events() if event.name == "[memory]")
    pages_in_float32 = 2 * 3 * 4000 * 20 * 4
    assert 0 < allocated < pages_in_float32 / 3


@pytest.mark.parametrize(
    "equation", ["ngd,nwd->ngw", "nwpd,ngd->nwpg", "nd,nwd->nw", "ngd,nwd->nwg", "ngd,nhd->ngh", "nw,nw->nw"]
)
def test_thin_contractions(equation: str, generator: torch.Generator) -> None:
    sizes = {"n": 2, "g": 3, "d": 8, "w": 50, "p": 4, "h": 40}
    a, b = (torch.randn([sizes[x] for x in term], generator=generator) for term in equation.split("->")[0].split(","))
    assert (einsum(equation, a, b) - torch.einsum(equation, a, b)).abs().max() < 1e-5


@pytest.mark.parametrize("shapes", [((2, 3, 8), (2, 8, 50)), ((2, 50, 8), (2, 8, 1)), ((2, 50, 8), (2, 8, 60)),
                                    ((2, 5, 3, 8), (2, 1, 8, 4)), ((50, 8), (8, 3))])  # fmt: skip
def test_thin_products(shapes: tuple[tuple[int, ...], tuple[int, ...]], generator: torch.Generator) -> None:
    a, b = (torch.randn(shape, generator=generator) for shape in shapes)
    assert (matmul(a, b) - torch.matmul(a, b)).abs().max() < 1e-5
