"""Attention and the mass that it stores beside PyTorch ops, on page-major poisoned pools."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kvsieve.backends.attention import attend_selected
from kvsieve.backends.base import AttentionOptions, Selection
from kvsieve.backends.eager import EagerBackend
from kvsieve.backends.triton import TritonBackend, attend, store
from kvsieve.backends.triton.launch import INTERPRETED
from kvsieve.mass import AttentionMass
from kvsieve.plan import MassRows
from triton_device import DEVICE, NEEDS_GPU_OR_INTERPRETER
from triton_world import LENGTHS, World, within_one_rounding

pytestmark = NEEDS_GPU_OR_INTERPRETER
GEOMETRIES = [  # page, heads, group, widths
    (5, 3, 3, (20, 20)),
    (33, 2, 7, (80, 48)),
    (1, 1, 24, (64, 64)),
    (16, 2, 4, (128, 128)),
]


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
