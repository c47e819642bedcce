"""Where the state of pages starts, on the Triton backend."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvsieve.backends import get_backend
from kvsieve.graph import FieldSpec
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import MassRows, Rows
from triton_device import DEVICE, NEEDS_GPU_OR_INTERPRETER

pytestmark = NEEDS_GPU_OR_INTERPRETER


@pytest.mark.parametrize("page_major", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_enter_at_the_initial_values(page_major: bool, dtype: torch.dtype) -> None:
    """State of any dtype and size, more than a program fills at a time too; null rows, and all others, stay."""
    initial = {
        "ones": torch.ones(3),
        "count": torch.tensor(-7),
        "seen": torch.tensor([[True, False], [False, True]]),
        "long": torch.randn(2, 900),
        "as K": torch.full((5,), 0.1),
    }
    fields = {name: FieldSpec(tuple(value.shape), value.dtype, value) for name, value in initial.items()}
    fields["as K"] = FieldSpec((5,), None, initial["as K"])
    pool = LayerPool(3, 5, 20, 12, dtype, DEVICE, {}, fields, page_major)
    pool.reserve(2, 9)
    for field in pool.state.values():
        field.zero_()
    get_backend("triton").enter(pool, torch.tensor([4, 0, 8, 1, 0], device=DEVICE))
    entered = torch.zeros(9, dtype=torch.bool)
    entered[[1, 4, 8]] = True
    for name, value in initial.items():
        stored = pool.state[name].cpu()
        wanted = value.to(stored.dtype).expand(3, 3, *value.shape)
        assert torch.equal(stored[:, entered], wanted) and not stored[:, ~entered].any()


@pytest.mark.parametrize("page_major", [True, False])
@pytest.mark.parametrize(("page", "heads"), [(1, 1), (5, 3), (16, 8), (130, 3)])
def test_mass_is_forgotten_wherever_there_is_any(page: int, heads: int, page_major: bool) -> None:
    """Of one head or of all, NaN too; what no request names stays."""
    torch.manual_seed(page)
    zero = torch.zeros(())
    fields = {
        "mass": FieldSpec((page,), torch.float32, torch.zeros(page)),
        "mass_sum": FieldSpec((), torch.float32, zero),
    }
    pool = LayerPool(heads, page, 20, 12, torch.float32, DEVICE, {}, fields, page_major)
    pool.reserve(2, 200)
    held = torch.rand(heads, 200, device=DEVICE) < 0.2
    mass = torch.where(held[:, :, None], torch.rand(heads, 200, page, device=DEVICE), 0.0)
    mass[0, 7] = float("nan")
    for name, value in (("mass", mass), ("mass_sum", mass.sum(-1))):
        pool.state[name].copy_(value)
    named = torch.arange(1, 200, device=DEVICE)[: 3 * 41].view(3, 41)
    rows = Rows((), (), (41 * page,) * 3, named, torch.full((3,), 41 * page, device=DEVICE))
    get_backend("triton").rebase(
        pool, rows, MassRows(named, torch.ones(3, device=DEVICE), dict.fromkeys(range(3), 0.0), True)
    )
    assert held[:, 1:124].any() and held[:, 124:].any()
    for name, value in (("mass", mass), ("mass_sum", mass.sum(-1))):
        assert not pool.state[name][:, 1:124].any()
        for place in (slice(0, 1), slice(124, 200)):
            assert torch.equal(pool.state[name][:, place], value[:, place])
