"""The vortex_torch surface on a GPU: the same as on a CPU, and steps that wait for the device once, in the planner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvsieve.compat.vortex.indexer as indexer
from kvsieve.compat.vortex.abs import as_vtensor
from kvsieve.compat.vortex.bridge import registered
from kvsieve.compat.vortex.indexer.context import PAGE_LISTS, WORK_LIST
from test_vortex_ops import BINARY, INDEXER_BINARY, INDEXER_ONLY, SCANS, SOURCES, UNARY
from vortex_world import BATCHED, RAGGED, World, bare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ONE: dict[str, tuple[Any, tuple[tuple[int, int], ...], str]] = {
    **{name: (make, ((4, 3),), "r") for name, (make, _) in {**UNARY, **INDEXER_ONLY}.items()},
    **{name: (make, (x, y), "bp") for name, (make, x, y, _) in {**BINARY, **INDEXER_BINARY}.items()},
    **{name: (lambda module, make=make: make(), ((1, 2),), "r") for name, (make, _) in SCANS.items()},
}


def result(name: str, device: str, dtype: torch.dtype) -> torch.Tensor:
    make, shapes, kinds = ONE[name]
    world = World(device=device, dtype=dtype)
    ctx = world.plan()
    out = make(indexer)(*(SOURCES[kind](world, *shape) for kind, shape in zip(kinds, shapes, strict=True)), ctx=ctx)
    return bare(out)[[place for _, place, _ in world.scored()]].cpu().double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ONE)
def test_ops(name: str, dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype is torch.float32 else 2.0**-7
    torch.testing.assert_close(result(name, "cuda", dtype), result(name, "cpu", dtype), rtol=tolerance, atol=1e-5)


def test_plan() -> None:
    plans = [World(device=device).plan() for device in ("cuda", "cpu")]
    for name in (*PAGE_LISTS, *WORK_LIST):
        assert torch.equal(getattr(plans[0], name).cpu(), getattr(plans[1], name)), name


def stepped(name: str, device: str, watched: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Three steps of a flow on a caller's pool: the last list of pages, and the pool."""
    flow = registered(name).vflow()
    world = World(device=device, page_size=1 if "token" in name else 5, lengths=(61, 9, 40), dtype=torch.bfloat16)
    shapes = flow.get_cache_meta_info(world.page_size, world.head_dim)
    pool = {key: world.paged(*shape, all_pages=True) for key, shape in shapes.items()}
    loc = torch.tensor([slot for slots in world.slots for slot in slots], device=device)
    flow.forward_cache(cache=pool, loc=loc, ctx=world.cache_context(len(loc)))
    for _ in range(3):
        ctx = world.plan()
        q = as_vtensor(world.random_tensor(world.segments, world.group, world.head_dim), BATCHED)
        o = as_vtensor(ctx.sparse_kv_indices.view(-1, 1, 1), RAGGED)
        torch.cuda.set_sync_debug_mode("error" if watched else "default")
        try:
            flow.forward_indexer(q, o, pool, ctx=ctx)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return ctx.sparse_kv_indices.cpu(), {key: bare(field).cpu().float() for key, field in pool.items()}


@pytest.mark.parametrize("name", ["gqa_h2o_sparse_attention", "h2o_token_sparse_attention"])
def test_steps_agree_and_do_not_wait(name: str) -> None:
    pages, pool = stepped(name, "cuda", watched=True)
    expected, expected_pool = stepped(name, "cpu", watched=False)
    assert torch.equal(pages, stepped(name, "cuda", watched=False)[0]), "the same in every run"
    assert float((pages == expected).float().mean()) > 0.9  # bfloat16 scores may tie or round differently
    for key, field in pool.items():
        torch.testing.assert_close(field, expected_pool[key], rtol=0.02, atol=1e-3, equal_nan=True)
