"""Offsets beyond 2**31 elements, without a GPU: pools whose blocks and rows lie far apart in sparse files.

What kernels make of them is, bit for bit, what they make of the same pages side by side.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kvsieve.backends import get_backend
from kvsieve.backends.base import AttentionOptions, Selection
from kvsieve.backends.triton import TritonBackend, attend
from kvsieve.backends.triton.launch import INTERPRETED
from kvsieve.flow import build_flow
from kvsieve.graph import Geometry, trace_flow
from kvsieve.mass import AttentionMass
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.slots import POSITION, Trim, slot_fields
from kvsieve.plan import MassRows, Rows, Writes
from kvsieve.window import Window

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tests/test_cuda.py fills a GPU's memory instead")
PAGE, HEADS, GROUP, WIDTH, BLOCKS = 3, 2, 3, 20, 10
APART = 2**31 // (BLOCKS - 2) + 32
"""Elements from a block to the next: the last two of a pool begin beyond 2**31."""
FAR = [9, 1, 8, 3, 7, 2, 6]
CPU = torch.device("cpu")


def near_and_far(pool: LayerPool, folder: Path) -> tuple[LayerPool, LayerPool]:
    """The pool, and one with the same content whose blocks lie far apart."""
    far = deepcopy(pool)
    for fields in (vars(far), far.summaries, far.state):
        for name, field in list(fields.items()):
            if isinstance(field, torch.Tensor):
                size = APART * BLOCKS + field.stride(0) * HEADS
                file = torch.from_file(str(folder / f"{name} {len(fields)}"), True, size, dtype=field.dtype)
                fields[name] = file.as_strided(field.shape, (field.stride(0), APART, *field.stride()[2:]))
                fields[name].copy_(field)
    assert far.k[:, -2].storage_offset() > 2**31
    return pool, far


def filled(fields: Any, state: Any) -> LayerPool:
    """Random content everywhere; blocks are as many as rows."""
    pool = LayerPool(HEADS, PAGE, WIDTH, WIDTH, torch.float32, CPU, fields, state, page_major=True)
    pool.reserve(BLOCKS, BLOCKS)
    torch.manual_seed(0)
    for field in (pool.k, pool.v, *pool.summaries.values(), *pool.state.values()):
        field.copy_(torch.rand(field.shape) if field.dtype.is_floating_point else torch.zeros(field.shape))
    return pool


def contents(pool: LayerPool) -> list[torch.Tensor]:
    return [field.clone() for field in (pool.k, pool.v, *pool.summaries.values(), *pool.state.values())]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(-7.0), y.nan_to_num(-7.0)) for x, y in zip(first, second, strict=True))


def test_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing and summarizing, scores that read summaries, K, state and mass, attention, and the mass it adds."""
    graphs = trace_flow(build_flow("h2o"), Geometry(PAGE, WIDTH, WIDTH, GROUP))
    backend = get_backend("triton")
    flow = backend.prepare(graphs, CPU)
    table, length = torch.tensor([FAR]), torch.tensor([7 * PAGE])
    q, k, v = torch.randn(1, HEADS, GROUP, WIDTH), torch.randn(2, HEADS, WIDTH), torch.randn(2, HEADS, WIDTH)
    ends, more = (torch.tensor([9, 8]), torch.tensor([PAGE - 1] * 2)), (torch.tensor([8, 9]), torch.tensor([0, 1]))
    topk, widths = torch.tensor([2]), torch.tensor([5])
    one = Window(torch.tensor([0]), table, table, length, widths, 5, 1, PAGE, topk, 2, 5, torch.ones(1, 1))
    rows = Rows((), (), (7 * PAGE,), table, length)
    selection = Selection(torch.arange(7).expand(1, HEADS, 7), torch.tensor([7]))
    options = AttentionOptions(0.3, mass=AttentionMass())
    results = []
    for pool in near_and_far(filled(graphs.summary_fields, graphs.state_fields), tmp_path):
        backend.store(flow, pool, Writes(*ends, ends[0], ends[0][:0], step=True), k, v)
        backend.write(pool, Writes(*more, ends[0], ends[0][:0]), v, k)
        backend.summarize(flow, pool, ends[0])
        made = [backend.score(flow, q, pool, one)]
        for fused in (False, True):
            mass = MassRows(table, torch.ones(1), {})
            shape = attend.Shape(16, 4, 2, 32 if fused else 16, 1 if fused else 2)
            monkeypatch.setattr(attend, "shape_for", lambda *_, shape=shape: shape)
            given = replace(options, mass_rows=mass if fused else None)
            out, lse, logits = backend.attend(q, pool, rows, selection, given)
            made += [out, lse]
            assert (logits is None) == fused
            if logits is not None:
                backend.add_mass(pool, rows, mass, selection, logits)
        made.append(backend.prompt_mass(q.expand(4, -1, -1, -1), pool, table[0], 7 * PAGE - 4, options))
        results.append([*made, *contents(pool)])
        assert all(math.isfinite(float(x.float().sum())) for x in made)
    assert same(*results)


def test_eviction(tmp_path: Path) -> None:
    """Tokens enter slots and leave them."""
    kept = 6 * PAGE + 1
    pool = filled({}, slot_fields(PAGE, True))
    table, slots = torch.tensor([FAR]), torch.arange(kept + 1)
    pool.state[POSITION][:, table[0, slots // PAGE], slots % PAGE] = torch.cat([torch.randperm(kept), slots[-1:]])
    trim = Trim(table, table, kept + 1, kept, 2, torch.tensor([kept - 1]))
    places = torch.tensor([9, 8]), torch.tensor([1, 2])
    new = torch.randn(2, HEADS, WIDTH)
    results = []
    for one in near_and_far(pool, tmp_path):
        backend = TritonBackend()
        backend.write(one, Writes(*places, places[0], places[0][:0], (*places, torch.tensor([77, 78]))), new, -new)
        backend.trim(one, trim)
        results.append(contents(one))
    assert same(*results)
