"""Eviction on a GPU beside the sort, and evicting steps beside those of the eager backend."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvsieve.backends.triton import TritonBackend
from kvsieve.paging.slots import POSITION, trim
from kvsieve.retention import Evict
from kvsieve.runtime import Runtime
from triton_device import DEVICE, NEEDS_GPU_OR_INTERPRETER
from triton_world import full_slots, same_slots

pytestmark = NEEDS_GPU_OR_INTERPRETER


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
