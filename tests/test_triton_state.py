"""Where the state of pages starts, on the Triton backend."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvsieve.backends import get_backend
from kvsieve.graph import FieldSpec
from kvsieve.paging.pool import LayerPool
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
