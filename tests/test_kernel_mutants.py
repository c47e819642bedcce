"""Faults put into the source of the Triton kernels: each changes a result that the tests of the kernels compare.

A mutant counts if it runs and its result is finite and wrong. The kernel as it is must pass the same comparison.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import triton_world as world
from kvsieve.backends.attention import attend_selected, column_sums
from kvsieve.backends.base import AttentionOptions
from kvsieve.backends.eager import EagerBackend
from kvsieve.backends.select import select_pages
from kvsieve.backends.triton import attend, evict, longrow, ranking, seed, select, store
from kvsieve.mass import AttentionMass
from kvsieve.paging.slots import trim
from kvsieve.plan import MassRows
from triton_device import DEVICE, NEEDS_GPU_OR_INTERPRETER

pytestmark = [NEEDS_GPU_OR_INTERPRETER, pytest.mark.slow]
Judge = Callable[[ModuleType], bool]
"""Whether what a module computes is right."""


def selects(module: ModuleType) -> bool:
    """Short windows, with ties, of scored and other requests."""
    right = True
    torch.manual_seed(0)
    for k, many in itertools.product((6, 150, 240), (0, 1000)):
        quota = world.quota_of([300, 7, 250], k, [0, 2])
        assert quota.table is not None
        for scores in world.rankings(2, 2, 300):
            scores[1, :, 250:] = float("inf")
            with mock.patch.object(module, "multiprocessors", return_value=many):  # by a bit a pass, and by two
                got = module.select(scores.to(DEVICE), quota, 2)
            want = select_pages(scores.to(DEVICE), quota, 2)
            listed = want.listed().expand(want.pages.shape)
            right &= torch.equal(got.pages[listed], want.pages[listed])
            right &= torch.equal(got.blocks(quota.table)[listed], want.blocks(quota.table)[listed])
    return right


def selects_among_thousands(module: ModuleType) -> bool:
    """Windows of more pages than a count of ten bits holds, a page or two fewer than wanted above the others."""
    quota = world.quota_of([2046], 64, [0])
    torch.manual_seed(0)
    right = True
    for scores in (world.a_bit_apart(2046, 1100, 63), world.all_but_tied(2046, 62)):
        got, want = module.select(scores.to(DEVICE), quota, 1), select_pages(scores.to(DEVICE), quota, 1)
        right &= torch.equal(got.pages, want.pages)
    return right


def selects_in_long_windows(module: ModuleType) -> bool:
    """Windows that no program holds: scores of which few reach the bound, the last pages among them; and equal ones."""
    quota = world.quota_of([9000], 70, [0])
    torch.manual_seed(0)
    right = True
    ascending = torch.arange(9000.0)[None, None]
    for scores in (torch.randn(1, 1, 9000), ascending, torch.where(ascending > 4000, 1.0, 0.0), ascending * 0):
        got, want = (one(scores.to(DEVICE), quota, 1) for one in (module.select, select_pages))
        right &= torch.equal(got.pages, want.pages)
    return right


def adds_mass(module: ModuleType) -> bool:
    """A program that attends a whole list adds its mass; all requests but one in their units of before."""
    one = world.World(world.LENGTHS, 5, 3, 3, (20, 20), torch.float32)
    rows = MassRows(one.rows.table, torch.rand(len(world.LENGTHS), device=DEVICE) + 0.5, {2: 0.5})
    options = AttentionOptions(0.3, mass=AttentionMass(group="max"))
    _, _, increment = attend_selected(one.q, one.pool, one.rows, one.selection, options)
    state, results, usual = one.pool.state, [], module.shape_for
    module.shape_for = lambda *_: module.Shape(16, 4, 2, 32, 1)
    own = replace(options, mass_rows=rows)
    for run in (
        lambda: module.attend(one.q, one.pool, one.rows, one.selection, own),
        lambda: EagerBackend().add_mass(one.pool, one.rows, rows, one.selection, increment),
    ):
        for name in ("mass", "mass_sum"):
            state[name].fill_(0.25)
        run()
        results.append([state[name].clone() for name in ("mass", "mass_sum")])
    module.shape_for = usual
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(*results, strict=True))


def adds_mass_in_tiles(module: ModuleType) -> bool:
    """As above, a page at a time."""
    usual = module.mass_arguments
    module.mass_arguments = lambda *given: usual(*given[:-1], 8)
    try:
        return adds_mass(module)
    finally:
        module.mass_arguments = usual


def attends(module: ModuleType) -> bool:
    """Ragged lists in one and in several chunks, soft-capped, with sink logits."""
    one = world.World(world.LENGTHS, 5, 3, 3, (20, 20), torch.float32)
    options = AttentionOptions(0.3, 3.0, torch.randn(3, 3, device=DEVICE))
    want = attend_selected(one.q, one.pool, one.rows, one.selection, options)
    right, usual = True, module.shape_for
    for splits in (1, 2):
        chunk = 32 // splits
        module.shape_for = lambda *_, chunk=chunk, splits=splits: module.Shape(16, 4, 2, chunk, splits)
        got = module.attend(one.q, one.pool, one.rows, one.selection, options)
        right &= all(torch.allclose(x, y, rtol=1e-5, atol=2e-6) for x, y in zip(got[:2], want[:2], strict=True))
    module.shape_for = usual
    return right


def sums_finely(module: ModuleType) -> bool:
    """Many probabilities in 16 bits, beside float32 ones."""
    one = world.World([320, 321], 16, 2, 4, (64, 64), torch.float16)
    options = AttentionOptions(0.2)
    out, _, _ = module.attend(one.q, one.pool, one.rows, one.selection, options)
    exact, _, _ = attend_selected(one.q.float(), one.pool, one.rows, one.selection, options)
    return world.within_one_rounding(out, exact)


def stores_mass(module: ModuleType) -> bool:
    """Mean of a group of three, units per request, and the page sums."""
    one = world.World(world.LENGTHS, 5, 3, 3, (20, 20), torch.float32)
    options = AttentionOptions(0.3, mass=AttentionMass(group="mean"))
    _, lse, raw = attend.attend(one.q, one.pool, one.rows, one.selection, options)
    _, _, increment = attend_selected(one.q, one.pool, one.rows, one.selection, options)
    rows = MassRows(one.rows.table, torch.rand(len(world.LENGTHS), device=DEVICE) + 0.5, {})
    state, results = one.pool.state, []
    for run in (
        lambda: module.add_mass(one.pool, one.rows, rows, one.selection, module.Logits(raw, lse, "mean")),
        lambda: EagerBackend().add_mass(one.pool, one.rows, rows, one.selection, increment),
    ):
        for name in ("mass", "mass_sum"):
            state[name].fill_(0.25)
        run()
        results.append([state[name].clone() for name in ("mass", "mass_sum")])
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(*results, strict=True))


def evicts(module: ModuleType) -> bool:
    """Ties between old and young, protected sinks and recent tokens."""
    pool, one = world.full_slots(5, 31, True)
    fields = [pool.k, pool.v, *pool.state.values()]
    before = [field.clone() for field in fields]
    module.evict_one(pool, one)
    mine = [field.clone() for field in fields]
    for field, value in zip(fields, before, strict=True):
        field.copy_(value)
    trim(pool, one)
    return all(world.same_slots(got, want, one) for got, want in zip(mine, fields, strict=True))


def seeds(module: ModuleType) -> bool:
    """A chunk with a past, decayed; the largest of a group of three."""
    one = world.World([101], 5, 3, 3, (20, 20), torch.float32)
    q = torch.randn(70, 3, 3, 20, device=DEVICE)
    options = AttentionOptions(0.4, None, torch.randn(3, 3, device=DEVICE), AttentionMass(0.9, "max"))
    keys = one.pool.k[:, one.rows.table[0]].flatten(1, 2)[:, :101]
    got = module.prompt_mass(q, one.pool, one.rows.table[0], 31, options)
    return torch.allclose(got, column_sums(q, keys, options), rtol=1e-5, atol=1e-5)


def with_a_high_bound(module: ModuleType) -> bool:
    """A bitmap in which fewer pages stand than are chosen: the row must be read whole then."""
    quota = world.quota_of([9000], 70, [0])
    scores = torch.randn(1, 1, 9000, device=DEVICE)
    right = module.bitmap_of

    def few(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        bitmap, found = right(*arguments)
        return torch.where(torch.arange(bitmap.shape[2], device=DEVICE) < 9, bitmap, 0), found

    module.bitmap_of = few
    try:
        return torch.equal(module.select(scores, quota, 1).pages, select_pages(scores, quota, 1).pages)
    finally:
        module.bitmap_of = right


@dataclass(frozen=True)
class Mutant:
    """``old`` in the source of a module becomes ``new``; ``judge`` must then find a wrong result. Where the module is
    used by another, that one is loaded anew on top of it."""

    name: str
    module: ModuleType
    old: str
    new: str
    judge: Judge
    above: ModuleType | None = None


MUTANTS = [
    Mutant("minus zero lies below zero", ranking, "(scores + 0.0)", "(scores * 1.0)", selects, select),
    Mutant("NaN is the best score", ranking, "scores != scores, 1,", "scores != scores, 0xFFFFFFFF,", selects, select),
    Mutant("negative scores are upside down", ranking, "bits ^ 0x7FFFFFFF", "bits", selects, select),
    Mutant("the younger page stays at equal rank", ranking, "(equals <= ties)", "(equals > 1)", selects, select),
    Mutant("one page of those at the edge is left out", ranking, "ties = k - tl.sum", "ties = k - 1 - tl.sum", selects,
           select),
    Mutant("padding of a shorter window competes", select,
           "there = page < tl.where((k > 0) & (total > kept), width, 0)", "there = page < BLOCK", selects),
    Mutant("recent pages are the first ones", select, "one + total - sink - recent", "one - sink + 0 * recent",
           selects),
    Mutant("blocks are those of the window's places", select, "tl.load(table + sink + page, mask=there",
           "tl.load(table + page, mask=there", selects),
    Mutant("the search begins a bit too low", ranking, ">> 23) - 127", ">> 23) - 128", selects, select),
    Mutant("a list begins a place too late", ranking, "place = tl.cumsum(chosen.to(tl.int32), 0) - 1",
           "place = tl.cumsum(chosen.to(tl.int32), 0)", selects, select),
    Mutant("three counts flow into each other", ranking, "(count >= 1024)", "(count >= 65536)",
           selects_among_thousands, select),
    Mutant("the lower of two bits lets too few through", ranking, "elif firsts >= k:", "elif firsts >= k - 1:", selects,
           select),
    Mutant("the last of the bits is searched alone", ranking, "tl.where(half > 0, found | half, second)",
           "found | half", selects_among_thousands, select),
    Mutant("a request reads the scores of the next", longrow, "< b).to(tl.int64), 0)", "<= b).to(tl.int64), 0)",
           selects, select),
    Mutant("a word of the bitmap is lost", longrow, "mask=word * 32 < width", "mask=word * 32 < width - 64",
           selects_in_long_windows, select),
    Mutant("pages of a word change places", longrow, "_ones(lowest - 1)", "(_ones(lowest - 1) ^ 1)",
           selects_in_long_windows, select),
    Mutant("the bound keeps too few and nobody looks", longrow, "(total >= k) & (total <= MOST)", "total <= MOST",
           with_a_high_bound, select),
    Mutant("ties before a piece are forgotten", longrow, "ties, greaters, equals)", "ties, greaters, 0)",
           selects_in_long_windows, select),
    Mutant("the partial page is attended whole", store, "* P + length", "* P + (length + P - 1) // P * P", attends,
           attend),
    Mutant("a chunk forgets the first ones' scale", attend, "            acc = acc * fade[:, None]\n", "", attends),
    Mutant("probabilities are rounded to 16 bits", attend, "rest -= part", "rest -= rest", sums_finely),
    Mutant("every part holds all of a probability", attend, "rest -= part", "rest -= 0.0", sums_finely),
    Mutant("parts are merged without their weight", attend, "values * weight[:, :, None]",
           "values + 0 * weight[:, :, None]", attends),
    Mutant("sink logits are ignored in the output", attend, "total = total * fade + exp(sink - now)",
           "total = total * fade", attends),
    Mutant("the soft-cap forgets the sign", attend, "tanh(logits / softcap)", "tanh(tl.abs(logits) / softcap)",
           attends),
    Mutant("mass is the sum where the mean is asked for", store, 'if REDUCTION == "mean":', "if False:", stores_mass),
    Mutant("mass counts tokens that are not there", store, "(offset < P)[None, :] & (token < tokens)",
           "(offset < P)[None, :] & (place < listed)[:, None]", stores_mass),
    Mutant("mass is stored in one request's unit", store, "tl.load(unit + b)", "tl.load(unit)", stores_mass),
    Mutant("the page sum forgets what it was", store,
           'tl.atomic_add(mass_sum + h * s_h + row * s_r, tl.sum(new, 1), mask=place < listed, sem="relaxed")',
           "tl.store(mass_sum + h * s_h + row * s_r, tl.sum(new, 1), mask=place < listed)", stores_mass),
    Mutant("the page sum counts one token", store, "tl.sum(new, 1), mask", "tl.max(new, 1), mask", stores_mass),
    Mutant("attend adds the mass and rebases nothing", attend, "        rebase(pool, rows, added)", "        pass",
           adds_mass),
    Mutant("attend leaves out the mass of the last page", attend, "range(0, listed, PAGES)",
           "range(0, listed - 1, PAGES)", adds_mass_in_tiles),
    Mutant("the younger token stays at equal mass", evict, "rank = 2147483647 - where", "rank = where", evicts),
    Mutant("sinks may go", evict, "(where < sink) | ", "", evicts),
    Mutant("V stays behind when a token moves", evict, "to_block * v_b + to_place * v_t + d, value",
           "from_block * v_b + from_place * v_t + d, value", evicts),
    Mutant("queries see one token too many", seed, "seen = token[None, :] <= position[:, None]",
           "seen = token[None, :] <= position[:, None] + 1", seeds),
    Mutant("all queries count alike", seed, "p = p * tl.load(weights + query", "p = p + 0 * tl.load(weights + query",
           seeds),
    Mutant("padded heads of a group vote", seed, "& real[:, None]\n", "& (query < rows)[:, None]\n", seeds),
]  # fmt: skip


def load(source: str, name: str, folder: Path) -> ModuleType:
    """A module from source: Triton reads kernels from files."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_faulty_kernel_is_found(mutant: Mutant, tmp_path: Path) -> None:
    source = inspect.getsource(mutant.module)
    assert mutant.old in source, "the fault has lost its place"
    name = f"mutant_{MUTANTS.index(mutant)}"
    faulty = load(source.replace(mutant.old, mutant.new), name, tmp_path)
    if mutant.above is not None:
        text = inspect.getsource(mutant.above).replace(f"from {mutant.module.__name__} import", f"from {name} import")
        if mutant.module is ranking:  # the long rows rank by the same functions
            long = inspect.getsource(longrow).replace(f"from {ranking.__name__} import", f"from {name} import")
            load(long, f"{name}_long", tmp_path)
            text = text.replace(f"from {longrow.__name__} import", f"from {name}_long import")
        faulty = load(text, f"{name}_above", tmp_path)
    assert not mutant.judge(faulty), "nobody noticed"


SOUND = {one.judge: one.above or one.module for one in MUTANTS}


@pytest.mark.parametrize("judge", SOUND, ids=lambda judge: judge.__name__)
def test_the_kernel_as_it_is_passes(judge: Judge) -> None:
    assert judge(SOUND[judge])
