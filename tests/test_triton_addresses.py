"""No kernel touches an address outside of the tensors that it is given: every load and store is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton_world as world
from generated_world import close, make_world, run_beside_float64
from kvsieve.backends.base import AttentionOptions
from kvsieve.backends.triton import TritonBackend, attend
from kvsieve.backends.triton.generate import tuning
from kvsieve.backends.triton.launch import INTERPRETED
from kvsieve.backends.triton.select import select
from kvsieve.budget import Budget
from kvsieve.flow import build_flow
from kvsieve.graph import Geometry, trace_flow
from kvsieve.mass import AttentionMass
from test_triton_graph import Everything, lives

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tests/gpu.sh runs compute-sanitizer")


def tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors(value)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the loads, stores and sums in memory of kernels, and refuses those outside of a kernel's arguments."""
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    allowed: list[tuple[int, int]] = []
    seen: list[int] = []
    run = InterpretedFunction.run

    def run_watched(self: Any, *given: Any, **named: Any) -> Any:
        storages = [one.untyped_storage() for one in tensors([*given, *named.values()])]
        allowed[:] = [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]
        return run(self, *given, **named)

    def watch(name: str, pointers_at: int, mask_at: int) -> None:
        usual = getattr(InterpreterBuilder, name)

        def checked(self: Any, *given: Any) -> Any:
            pointers = given[pointers_at]
            at = torch.from_numpy(pointers.data.astype("int64").reshape(-1))
            wanted = at[torch.from_numpy(given[mask_at].data.astype(bool).reshape(-1))]
            size = pointers.get_element_ty().primitive_bitwidth // 8
            inside = torch.zeros(len(wanted), dtype=torch.bool)
            for first, end in allowed:
                inside |= (wanted >= first) & (wanted + size <= end)
            assert bool(inside.all()), f"{name}: {int((~inside).sum())} of {len(wanted)} addresses lie outside"
            seen.append(len(wanted))
            return usual(self, *given)

        monkeypatch.setattr(InterpreterBuilder, name, checked)

    monkeypatch.setattr(InterpretedFunction, "run", run_watched)
    watch("create_masked_load", 0, 1)
    watch("create_masked_store", 0, 2)
    watch("create_atomic_rmw", 1, 3)
    return seen


@pytest.mark.parametrize("splits", [1, 3])
def test_attention(splits: int, watched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    one = world.World([1, 6, 34, 99], 5, 3, 3, (20, 12), torch.float32)
    monkeypatch.setattr(attend, "shape_for", lambda *_: attend.Shape(16, 4, 2, 48 // splits, splits))
    TritonBackend().attend(one.q, one.pool, one.rows, one.selection, AttentionOptions(0.3, mass=AttentionMass()))
    last = one.rows.table[-1]
    TritonBackend().prompt_mass(one.q[:, :, :, :20], one.pool, last, 95, AttentionOptions(0.3, mass=AttentionMass()))
    assert len(watched) > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gqa_quest_sparse_attention", "h2o"])
@pytest.mark.parametrize(("page", "width", "group", "heads"), [(5, 20, 3, 3), (4, 32, 4, 2)])
def test_scores(
    name: str, page: int, width: int, group: int, heads: int, dtype: torch.dtype, watched: list[int]
) -> None:
    graphs = trace_flow(build_flow(name), Geometry(page, width, width, group))
    run_beside_float64(make_world(graphs, (1, 9, 0, 20), heads, dtype), close(2.0**-6))
    assert len(watched) > 20


def test_chunks_that_are_dealt_out(watched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program finds its request by the widths of all of them, which are no power of two."""
    monkeypatch.setattr(tuning, "MOST_PAGES", 64)
    graphs = trace_flow(build_flow("block_sparse_attention"), Geometry(1, 16, 16, 2))
    run_beside_float64(make_world(graphs, (3, 1, 900, 0, 65), 2), close(2e-6))
    assert len(watched) > 20


@pytest.mark.parametrize("widths", [[300, 7, 250], [9000, 8200]])
def test_selection(widths: list[int], watched: list[int]) -> None:
    quota = world.quota_of(widths, 6, [0, len(widths) - 1])
    assert quota.window is not None
    select(torch.randn(2, 2, quota.window.width), quota, 2)
    assert watched


@pytest.mark.parametrize("with_mass", [True, False])
def test_eviction(with_mass: bool, watched: list[int]) -> None:
    TritonBackend().trim(*world.full_slots(5, 31, with_mass))
    assert watched


def test_lives(watched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsieve.backends.triton.generate.stages.HOISTED_PRODUCTS", 64)
    lives(Everything(), 2, [9, 1, 6], budget=Budget(2, 1, 2))
    assert len(watched) > 100
