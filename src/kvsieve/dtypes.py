"""Floating dtypes by the names that users and reports write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Of q, K and V, as the command line names them."""
STATE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Of state fields, as PyTorch names them."""


def torch_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_name(dtype: torch.dtype) -> str:
    """``fp32`` for ``torch.float32``: the inverse of :data:`DTYPES`."""
    return {value: key for key, value in DTYPES.items()}[dtype]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What ``torch.zeros(n)`` makes is of this dtype while the context lasts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
