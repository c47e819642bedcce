"""The hand-written Triton kernels beside PyTorch ops in float64 or as exact integers, on page-major poisoned pools.

On a machine with a GPU they run there, else in Triton's interpreter.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kvsieve import Budget, Runtime
from kvsieve.backends import get_backend
from kvsieve.backends.attention import attend_selected, column_sums
from kvsieve.backends.base import AttentionOptions, Selection
from kvsieve.backends.eager import EagerBackend
from kvsieve.backends.select import select_pages
from kvsieve.backends.triton import TritonBackend, attend, longrow, store
from kvsieve.backends.triton.launch import INTERPRETED
from kvsieve.backends.triton.select import select
from kvsieve.errors import ConfigError
from kvsieve.mass import AttentionMass
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.slots import POSITION, Trim, slot_fields, trim
from kvsieve.plan import MassRows, Quota, Rows, Writes
from kvsieve.retention import Evict
from kvsieve.window import Window
from test_eager_grid import both_widths, compare_with_reference

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1"
)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-42])


def quota_of(widths: list[int], k: int, scored: list[int]) -> Quota:
    """Sink 1, recent 2, window pages of all requests; those that are not scored attend everything."""
    pages = [width + 3 for width in widths]
    count = [k + 3 if i in scored else width + 3 for i, width in enumerate(widths)]
    table = torch.randperm(len(widths) * max(pages), device=DEVICE).view(len(widths), -1) + 1
    send = [torch.tensor(x, device=DEVICE) for x in (pages, count, scored, [widths[i] for i in scored])]
    topk = torch.full((len(scored),), k, device=DEVICE)
    width = max(widths[i] for i in scored)
    window = Window(send[2], table, table, send[0], send[3], width, 1, 1, topk, k, sum(widths))
    return Quota(1, 2, send[0], send[1], max(count), True, window, 0, table)


def rankings(rows: int, heads: int, width: int) -> list[torch.Tensor]:
    """Scores: random, tied, equal, special, ascending, neighbours in float32, and all the best in one place."""
    shape = rows, heads, width
    bunched = torch.randn(shape)
    bunched[..., width // 3 : width // 3 + 99] += 9
    return [
        torch.randn(shape),
        torch.randint(0, 3, shape).float(),
        torch.full(shape, -2.5),
        SPECIAL[torch.randint(len(SPECIAL), shape)],
        torch.arange(width).float().expand(shape).contiguous(),
        (1.0 + torch.randperm(width) * 2.0**-23).expand(shape).contiguous(),
        bunched,
    ]


@pytest.mark.parametrize(
    ("widths", "k", "scored"),
    [
        ([2, 2], 1, [0, 1]),
        ([3, 64], 2, [0, 1]),
        ([65, 7, 70], 6, [0, 2]),
        ([2046, 300], 64, [0, 1]),
        ([2049, 2048], 2000, [0, 1]),
        ([8192], 100, [0]),
        ([8193, 5, 9001], 64, [0, 2]),
        ([20000, 8200], 1024, [0, 1]),
        pytest.param([33000], 8000, [0], marks=pytest.mark.slow),
        pytest.param([33000], 9000, [0], marks=pytest.mark.slow),
    ],
)
def test_selection_is_exact(widths: list[int], k: int, scored: list[int]) -> None:
    """Pages and blocks as by a sort on (score, age); padding of shorter windows holds the best scores."""
    torch.manual_seed(sum(widths))
    quota = quota_of(widths, k, scored)
    assert quota.window is not None and quota.table is not None
    for scores in rankings(len(scored), 2, quota.window.width):
        for row, width in enumerate(widths[i] for i in scored):
            scores[row, :, width:] = math.inf
        chosen, wanted = select(scores.to(DEVICE), quota, 2), select_pages(scores.to(DEVICE), quota, 2)
        listed = wanted.listed().expand(wanted.pages.shape)
        assert torch.equal(chosen.pages[listed], wanted.pages[listed])
        assert torch.equal(chosen.blocks(quota.table)[listed], wanted.blocks(quota.table)[listed])


def test_a_bound_that_lets_too_many_or_too_few_through_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    quota = quota_of([9000], 64, [0])
    scores = torch.randn(1, 1, 9000)
    right = longrow.bitmap_of

    def wrong(word: int) -> object:
        def bitmap_of(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
            bitmap, found = right(*arguments)  # type: ignore[arg-type]
            return torch.full_like(bitmap, word), found

        return bitmap_of

    wanted = select_pages(scores.to(DEVICE), quota, 1).pages
    for word in (0, -1):
        monkeypatch.setattr("kvsieve.backends.triton.select.bitmap_of", wrong(word))
        assert torch.equal(select(scores.to(DEVICE), quota, 1).pages, wanted)


@pytest.mark.parametrize(("width", "k"), [(9000, 64), (20000, 4096), (60000, 6000)])
def test_a_bound_lets_the_best_pages_through(width: int, k: int) -> None:
    """Also where many are chosen: else every row is read once per bit."""
    quota = quota_of([width], k, [0])
    assert quota.window is not None
    torch.manual_seed(k)
    bitmap, _ = longrow.bitmap_of(torch.randn(1, 2, width).to(DEVICE), quota, quota.window)
    for words in bitmap[0].tolist():
        assert k <= sum((word & 0xFFFFFFFF).bit_count() for word in words) <= longrow.MOST


class World:
    """Ragged requests on a page-major pool of NaN, each with a selection of its own per head."""

    def __init__(
        self,
        lengths: list[int],
        page: int,
        heads: int,
        group: int,
        widths: tuple[int, int],
        dtype: torch.dtype,
        page_major: bool = True,
    ) -> None:
        torch.manual_seed(page * 100 + group)
        pages = [-(-length // page) for length in lengths]
        total, fields = sum(pages) + 2, slot_fields(page, True)
        sums = replace(fields["mass"], shape=(), initial=torch.zeros(()))
        self.pool = LayerPool(heads, page, *widths, dtype, DEVICE, {}, {**fields, "mass_sum": sums}, page_major)
        self.pool.reserve(total, total)
        for field in (self.pool.k, self.pool.v):
            field.fill_(math.nan)
        order = (torch.randperm(total - 1) + 1).tolist()
        table = torch.zeros(len(lengths), max(pages), dtype=torch.int64)
        for row, count in zip(table, pages, strict=True):
            row[:count] = torch.tensor([order.pop() for _ in range(count)])
        for request, length in enumerate(lengths):
            places = torch.arange(length)
            blocks, offsets = table[request, places // page], places % page
            for field in (self.pool.k, self.pool.v):
                field[:, blocks, offsets] = torch.randn(heads, length, field.shape[3]).to(dtype).to(DEVICE)
        self.rows = Rows((), (), tuple(lengths), table.to(DEVICE), torch.tensor(lengths, device=DEVICE))
        kept = [min(count, 5) for count in pages]
        chosen = torch.zeros(len(lengths), heads, max(kept), dtype=torch.int64)
        for request, (count, keep) in enumerate(zip(pages, kept, strict=True)):
            for head in range(heads):
                some = torch.randperm(count - 1)[: keep - 1].sort().values
                chosen[request, head, :keep] = torch.cat([some, torch.tensor([count - 1])])
        self.selection = Selection(chosen.to(DEVICE), torch.tensor(kept, device=DEVICE))
        self.q = torch.randn(len(lengths), heads, group, widths[0]).to(dtype).to(DEVICE)


GEOMETRIES = [  # page, heads, group, widths
    (5, 3, 3, (20, 20)),
    (33, 2, 7, (80, 48)),
    (1, 1, 24, (64, 64)),
    (16, 2, 4, (128, 128)),
]
LENGTHS = [1, 4, 5, 6, 32, 33, 34, 66, 99, 161]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("reduction", ["sum", "mean", "max"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_attention_and_mass(geometry: tuple, reduction: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside PyTorch ops on the same selection, with soft-cap and sink logits in turn; then the mass that is stored."""
    page, heads, group, widths = geometry
    world = World(LENGTHS, page, heads, group, widths, torch.float32, page_major=reduction != "max")
    longest = 5 * page
    chunk = -(-longest // splits // 16) * 16
    shape = attend.Shape(16, 4, 2, chunk, -(-longest // chunk))
    monkeypatch.setattr(attend, "shape_for", lambda *_: shape)
    softcap, sinks = (3.0, None) if reduction == "mean" else (None, torch.randn(heads, group, device=DEVICE))
    options = AttentionOptions(0.3, softcap, sinks, AttentionMass(group=reduction))
    backend = TritonBackend()
    out, lse, logits = backend.attend(world.q, world.pool, world.rows, world.selection, options)
    want_out, want_lse, increment = attend_selected(world.q, world.pool, world.rows, world.selection, options)
    assert torch.allclose(out, want_out, rtol=1e-5, atol=2e-6) and torch.allclose(lse, want_lse, rtol=1e-5, atol=2e-6)
    _expect_same_mass(world, logits, increment)


def test_parts_are_merged_a_few_at_a_time() -> None:
    """More programs a segment than one tile of a merge holds: V and groups are wide."""
    world = World([700], 16, 1, 24, (16, 256), torch.float32)
    world.selection = Selection(torch.arange(44, device=DEVICE).view(1, 1, 44), torch.tensor([44], device=DEVICE))
    options = AttentionOptions(0.3)
    out, lse, _ = TritonBackend().attend(world.q, world.pool, world.rows, world.selection, options)
    want_out, want_lse, _ = attend_selected(world.q, world.pool, world.rows, world.selection, options)
    assert attend.shape_for(world.pool, 1, 44).splits > 4
    assert torch.allclose(out, want_out, rtol=1e-5, atol=2e-6) and torch.allclose(lse, want_lse, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("reduction", ["sum", "mean", "max"])
@pytest.mark.parametrize("tile", [16, attend.MASS_TILE])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_mass_that_attend_adds_itself(
    geometry: tuple, tile: int, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program attends a whole list: no logits are returned, and the same mass is stored, a rebased request's too. Its
    pages are taken at once, or in several turns."""
    monkeypatch.setattr(attend, "MASS_TILE", tile)
    monkeypatch.setattr(store, "THREADS", tile)
    page, heads, group, widths = geometry
    world = World(LENGTHS, page, heads, group, widths, torch.float32)
    options = AttentionOptions(0.3, None, torch.randn(heads, group, device=DEVICE), AttentionMass(group=reduction))
    _expect_mass_added(world, options, monkeypatch)


def _expect_mass_added(world: World, options: AttentionOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an attend in one piece stores itself, in units of each request's own."""
    longest = -(-5 * world.pool.page_size // 16) * 16
    monkeypatch.setattr(attend, "shape_for", lambda *_: attend.Shape(16, 4, 2, longest, 1))
    _, _, increment = attend_selected(world.q, world.pool, world.rows, world.selection, options)
    rows = MassRows(world.rows.table, torch.rand(len(world.q), device=DEVICE) + 0.5, {1: 0.5})
    names, stored = ("mass", "mass_sum"), []
    start = {name: torch.rand_like(world.pool.state[name]) for name in names}
    for fused in (False, True):
        for name in names:
            world.pool.state[name].copy_(start[name])
        if fused:
            own = replace(options, mass_rows=rows)
            assert TritonBackend().attend(world.q, world.pool, world.rows, world.selection, own)[2] is None
        else:
            EagerBackend().add_mass(world.pool, world.rows, rows, world.selection, increment)
        stored.append([world.pool.state[name].clone() for name in names])
    assert all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(*stored, strict=True))


@pytest.mark.parametrize("page", [160, 600])
def test_mass_of_a_list_in_several_tiles(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages so large that a tile holds the mass of two of them, or of one."""
    world = World([5 * page, 4 * page + 1, page + 1], page, 2, 3, (16, 16), torch.float32)
    options = AttentionOptions(0.3, mass=AttentionMass())
    _, _, logits = TritonBackend().attend(world.q, world.pool, world.rows, world.selection, options)
    _, _, increment = attend_selected(world.q, world.pool, world.rows, world.selection, options)
    _expect_same_mass(world, logits, increment)
    _expect_mass_added(world, options, monkeypatch)


def _expect_same_mass(world: World, logits: object, increment: object) -> None:
    """What both backends store of a step's mass, in units of each request's own."""
    backend, eager = TritonBackend(), EagerBackend()
    rows = MassRows(world.rows.table, torch.rand(len(world.q), device=DEVICE) + 0.5, {})
    start = {name: torch.rand_like(world.pool.state[name]) for name in ("mass", "mass_sum")}
    stored = []
    for one, gain in ((backend, logits), (eager, increment)):
        for name, value in start.items():
            world.pool.state[name].copy_(value)
        one.add_mass(world.pool, world.rows, rows, world.selection, gain)
        stored.append({name: world.pool.state[name].clone() for name in start})
    for name in start:
        assert torch.allclose(stored[0][name], stored[1][name], rtol=1e-5, atol=1e-6)


def within_one_rounding(out: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether 16-bit values are float32 ones, rounded once."""
    unit = torch.finfo(out.dtype).eps * (1 if INTERPRETED else 0.5)  # the interpreter cuts where a GPU rounds
    return bool(((out.float() - exact).abs() <= 1.2 * unit * exact.abs() + 2e-5).all())


@pytest.mark.parametrize("group", [4, 8, 9])
@pytest.mark.parametrize("dtype", [torch.float16, *([] if INTERPRETED else [torch.bfloat16])])
def test_probabilities_are_not_rounded_to_sixteen_bits(dtype: torch.dtype, group: int) -> None:
    """Many values of one sign and a small result: the error stays that of one rounding of the output."""
    world = World([320, 321], 16, 2, group, (64, 64), dtype)
    options = AttentionOptions(0.2)
    out, _, _ = TritonBackend().attend(world.q, world.pool, world.rows, world.selection, options)
    _expect_one_rounding(out, world, options)


@pytest.mark.parametrize("dtype", [torch.float16, *([] if INTERPRETED else [torch.bfloat16])])
def test_small_probabilities_of_large_values_count(dtype: torch.dtype) -> None:
    """Values a million times those of most tokens: float16 has no bits of its own for such probabilities."""
    world = World([320, 321], 16, 2, 4, (64, 64), dtype)
    large = torch.rand(world.pool.v.shape[:3], device=DEVICE)[..., None] < 0.1
    world.pool.v *= torch.where(large, 1e3, 1e-3)
    options = AttentionOptions(0.8)
    out, _, _ = TritonBackend().attend(world.q, world.pool, world.rows, world.selection, options)
    _expect_one_rounding(out, world, options)


def _expect_one_rounding(out: torch.Tensor, world: World, options: AttentionOptions) -> None:
    exact, _, _ = attend_selected(world.q.float(), world.pool, world.rows, world.selection, options)
    assert within_one_rounding(out, exact)


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_tiles_of_infinite_keys(splits: int, all_of_them: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of probability 0 come first; where there are no others, the output is no number."""
    world = World([160, 155, 400], 16, 2, 3, (20, 12), torch.float32)
    world.q[..., 0] = 1
    for request, count in enumerate(world.selection.count.tolist()):
        listed = world.selection.pages[request, 0, : count if all_of_them else 3]
        world.pool.k[0, world.rows.table[request, listed], :, 0] = -math.inf
    chunk = 80 // splits
    monkeypatch.setattr(attend, "shape_for", lambda *_: attend.Shape(16, 4, 2, chunk, splits))
    out, lse, _ = TritonBackend().attend(world.q, world.pool, world.rows, world.selection, AttentionOptions(0.3))
    want_out, want_lse, _ = attend_selected(world.q, world.pool, world.rows, world.selection, AttentionOptions(0.3))
    assert torch.allclose(out, want_out, rtol=1e-5, atol=2e-6, equal_nan=True)
    assert torch.allclose(lse, want_lse, rtol=1e-5, atol=2e-6) and bool(out.isnan().any()) == all_of_them


def test_attending_again_gives_the_same_bits() -> None:
    world = World(LENGTHS, 5, 3, 3, (20, 20), torch.float32)
    first = TritonBackend().attend(world.q, world.pool, world.rows, world.selection, AttentionOptions(0.3))
    for _ in range(5):
        again = TritonBackend().attend(world.q, world.pool, world.rows, world.selection, AttentionOptions(0.3))
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_tokens_are_stored_from_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of strided K and V, whose memory the next kernel might have while this one reads it."""
    pool = LayerPool(3, 5, 20, 12, torch.float32, DEVICE, {}, {}, True)
    pool.reserve(9, 0)
    k, v = (torch.randn(3, width, 7, device=DEVICE).permute(2, 0, 1) for width in (20, 12))
    blocks, offsets = (torch.tensor(x, device=DEVICE) for x in ([8, 2, 2, 1, 5, 5, 7], [0, 4, 1, 2, 3, 0, 4]))
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self: pytest.fail("copied"))
    TritonBackend().write(pool, Writes(blocks, offsets, blocks[:0], blocks[:0]), k, v)
    assert torch.equal(pool.k[:, blocks, offsets], k.transpose(0, 1))
    assert torch.equal(pool.v[:, blocks, offsets], v.transpose(0, 1))


def full_slots(page: int, kept: int, with_mass: bool) -> tuple[LayerPool, Trim]:
    """Requests with one token more than they keep, the newest in the last slot; mass is tied, and NaN in one head."""
    heads, requests = 3, 4
    pages = -(-(kept + 1) // page)
    pool = LayerPool(heads, page, 20, 12, torch.float32, DEVICE, {}, slot_fields(page, with_mass), True)
    pool.reserve(requests * pages + 1, requests * pages + 1)
    torch.manual_seed(kept)
    for field in (pool.k, pool.v):
        field.copy_(torch.randn(field.shape))
    table = (torch.randperm(requests * pages) + 1).view(requests, pages).to(DEVICE)
    recent = torch.tensor([kept - 3, kept - 1, kept, kept - 9], device=DEVICE)
    slots = torch.arange(kept + 1)
    for head in range(heads):
        for row in table:
            order = torch.cat([torch.randperm(kept), torch.tensor([kept])])
            pool.state[POSITION][head, row[slots // page], slots % page] = order.to(DEVICE)
            if with_mass:
                mass = torch.randint(0, 3, (kept + 1,)).float()
                mass[kept // 2] = math.nan if head == 1 else 0.5
                if head == 2:
                    mass = torch.where(order < 2, 0.0, mass + 1)  # sinks have the least
                pool.state["mass"][head, row[slots // page], slots % page] = mass.to(DEVICE)
    return pool, Trim(table, table, kept + 1, kept, 2, recent)


def same_slots(got: torch.Tensor, want: torch.Tensor, one: Trim) -> bool:
    """Whether two fields agree in the slots that are kept."""
    slots = torch.arange(one.kept)
    page = got.shape[2]
    places = [(row[slots // page], slots % page) for row in one.blocks]
    parts = [[field[:, blocks, offsets].nan_to_num(-7) for field in (got, want)] for blocks, offsets in places]
    return all(torch.equal(*pair) for pair in parts)


@pytest.mark.parametrize(("page", "kept"), [(1, 16), (5, 31), (33, 65)])
@pytest.mark.parametrize("with_mass", [True, False])
def test_eviction_of_one_token(page: int, kept: int, with_mass: bool) -> None:
    """K, V, position and mass of every slot as by the sort, with ties and NaN."""
    pool, one = full_slots(page, kept, with_mass)
    fields = [pool.k, pool.v, *pool.state.values()]
    before = [field.clone() for field in fields]
    TritonBackend().trim(pool, one)
    mine = [field.clone() for field in fields]
    for field, value in zip(fields, before, strict=True):
        field.copy_(value)
    trim(pool, one)
    assert all(same_slots(got, want, one) for got, want in zip(mine, fields, strict=True))


def test_evicting_steps_equal_those_of_the_eager_backend() -> None:
    """From under capacity to long beyond: new tokens enter slots that others have left, with no mass and a position."""
    torch.manual_seed(7)
    runtimes = [Runtime("h2o", page_size=5, backend=name, retention=Evict(13, 2, 3)) for name in ("triton", "eager")]
    requests = [[runtime.admit() for _ in range(3)] for runtime in runtimes]
    for step in range(16):
        counts = [12, 3, 9] if not step else [1] * 3
        new = [torch.randn(sum(counts), heads, width, device=DEVICE) for heads, width in ((6, 20), (2, 20), (2, 12))]
        calls = [
            runtime.step(mine) if step else runtime.extend(mine, counts)
            for runtime, mine in zip(runtimes, requests, strict=True)
        ]
        got, want = (call.attend(0, *new).out for call in calls)
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5), step
    for mine, other in zip(*requests, strict=True):
        rows = [runtime.tables[one].rows for runtime, one in zip(runtimes, (mine, other), strict=True)]
        for name in (POSITION, "mass"):
            got, want = (
                runtime.layers[0].pool.state[name][:, row].flatten(1)[:, :13]
                for runtime, row in zip(runtimes, rows, strict=True)
            )
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("reduction", ["sum", "mean", "max"])
@pytest.mark.parametrize(("decay", "first", "rows"), [(1.0, 0, 97), (0.9, 31, 70), (0.5, 40, 1), (0.0, 9, 12)])
def test_prompt_mass(decay: float, first: int, rows: int, reduction: str) -> None:
    """Decayed column sums beside float64, also of a chunk with a past, of grouped heads that are no power of two."""
    world = World([first + rows], 5, 3, 3, (20, 20), torch.float32)
    q = torch.randn(rows, 3, 3, 20, device=DEVICE)
    sinks = torch.randn(3, 3, device=DEVICE) if reduction == "sum" else None
    options = AttentionOptions(0.4, 5.0 if reduction == "max" else None, sinks, AttentionMass(decay, reduction))
    got = TritonBackend().prompt_mass(q, world.pool, world.rows.table[0], first, options)
    keys = world.pool.k[:, world.rows.table[0]].flatten(1, 2)[:, : first + rows]
    want = column_sums(q, keys, options)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="draws on the CPU; kvsieve verify --device cuda does it on a GPU")
@pytest.mark.parametrize(
    ("name", "page_size", "group", "head_dim"),
    [
        ("gqa_quest_sparse_attention", 5, 7, 20),
        ("gqa_h2o_token_sparse_attention", 1, 3, 20),
        ("h2o", 1, 7, 20),
        pytest.param("h2o", 5, 3, 20, marks=pytest.mark.slow),
        pytest.param("block_sparse_attention", 33, 7, 80, marks=pytest.mark.slow),
        pytest.param("gqa_block_sparse_attention", 5, 3, 20, marks=pytest.mark.slow),
        pytest.param("streaming_llm", 5, 24, 80, marks=pytest.mark.slow),
    ],
)
def test_whole_steps_equal_the_reference(name: str, page_size: int, group: int, head_dim: int) -> None:
    compare_with_reference("triton", name, page_size, both_widths(group, head_dim), group * 1000 + head_dim)


def test_a_device_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsieve.backends.triton.backend.INTERPRETED", False)
    runtime = Runtime("streaming_llm", Budget(0, 1, 1), page_size=5, backend="triton")
    call = runtime.extend([runtime.admit()], [3])
    with pytest.raises(ConfigError, match=r"backend triton: expected tensors on a CUDA device, received cpu"):
        call.attend(0, *(torch.randn(3, 2, 8) for _ in range(3)))


def test_names() -> None:
    assert get_backend("triton").name == "triton" and get_backend("triton+compiled").name == "triton+compiled"


def test_kernels_compile_for_a_gpu() -> None:
    """The interpreter accepts what the compiler refuses: types that change in a loop, shapes that do not fit."""
    where = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    ran = subprocess.run([sys.executable, str(script)], env=where, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0 and "25 kernels and 31 generated ones, 0 failed" in ran.stdout, ran.stdout + ran.stderr
