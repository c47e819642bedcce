"""Queries and new tokens that lie in wider memory: whatever surrounds them is NaN, and nothing of it is multiplied."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

import triton_world as world
from generated_world import close, make_world, run_beside_float64
from kvsieve.backends.attention import attend_selected, column_sums
from kvsieve.backends.base import AttentionOptions
from kvsieve.backends.triton import TritonBackend, attend
from kvsieve.flow import build_flow
from kvsieve.graph import Geometry, trace_flow
from kvsieve.mass import AttentionMass
from triton_device import DEVICE, NEEDS_GPU_OR_INTERPRETER

pytestmark = NEEDS_GPU_OR_INTERPRETER


def surrounded(x: torch.Tensor) -> torch.Tensor:
    """The same values with NaN before and after each axis; features stay side by side."""
    around = torch.full([size + 2 for size in x.shape], math.nan, dtype=x.dtype, device=x.device)
    inner = around[tuple(slice(1, size + 1) for size in x.shape)]
    inner.copy_(x)
    return inner


@pytest.mark.parametrize(("splits", "dtype"), [(1, torch.float32), (3, torch.float16)])
def test_attention_and_mass(splits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    one = world.World([1, 6, 34, 99], 5, 3, 3, (20, 12), dtype)
    monkeypatch.setattr(attend, "shape_for", lambda *_: attend.Shape(16, 4, 2, 48 // splits, splits))
    options = AttentionOptions(0.3, mass=AttentionMass())
    results = [
        TritonBackend().attend(q, one.pool, one.rows, one.selection, options) for q in (one.q, surrounded(one.q))
    ]
    (out, lse, _), (again, lse_again, _) = results
    want, _, _ = attend_selected(one.q.float(), one.pool, one.rows, one.selection, options)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-3
    assert torch.allclose(again.float(), want, rtol=tolerance * 10, atol=tolerance)
    assert torch.equal(again, out) and torch.equal(lse_again, lse)


def test_prompt_mass() -> None:
    one = world.World([101], 5, 3, 3, (20, 20), torch.float32)
    q = surrounded(torch.randn(70, 3, 3, 20, device=DEVICE))
    options = AttentionOptions(0.4, mass=AttentionMass(0.9, "max"))
    keys = one.pool.k[:, one.rows.table[0]].flatten(1, 2)[:, :101]
    got = TritonBackend().prompt_mass(q, one.pool, one.rows.table[0], 31, options)
    assert torch.allclose(got, column_sums(q, keys, options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("page", "width", "group", "heads", "dtype"), [(5, 20, 3, 3, torch.bfloat16), (4, 32, 4, 2, torch.float32)]
)
@pytest.mark.parametrize("name", ["gqa_quest_sparse_attention", "h2o"])
def test_scores(name: str, page: int, width: int, group: int, heads: int, dtype: torch.dtype) -> None:
    graphs = trace_flow(build_flow(name), Geometry(page, width, width, group))
    one = make_world(graphs, (1, 9, 0, 20), heads, dtype, device=DEVICE)
    one.q = surrounded(one.q)
    run_beside_float64(one, close(2e-6 if dtype == torch.float32 else 2.0**-6))
