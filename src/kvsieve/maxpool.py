"""max_pool1d as one op that torch.export can trace with a symbolic length."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.errors import FlowError


@torch.library.custom_op("kvsieve::max_pool1d", mutates_args=())
def _max_pool1d(x: torch.Tensor, kernel_size: int, stride: int, padding: int, dilation: int) -> torch.Tensor:
    """Sliding maximum over the last axis. torch's own op fixes a symbolic length while it is exported."""
    flat = x.reshape(-1, 1, x.shape[-1])
    pooled = torch.nn.functional.max_pool1d(flat, kernel_size, stride, padding, dilation)
    return pooled.reshape(*x.shape[:-1], pooled.shape[-1])


@_max_pool1d.register_fake
def _(x: torch.Tensor, kernel_size: int, stride: int, padding: int, dilation: int) -> torch.Tensor:
    length: Any = x.shape[-1]
    if not (stride == 1 and 2 * padding == dilation * (kernel_size - 1)):
        length = (length + 2 * padding - dilation * (kernel_size - 1) - 1) // stride + 1
    return x.new_empty([*x.shape[:-1], length])


@_max_pool1d.register_vmap
def _(
    info: Any, in_dims: Any, x: torch.Tensor, kernel_size: int, stride: int, padding: int, dilation: int
) -> tuple[torch.Tensor, int]:
    return _max_pool1d(x.movedim(in_dims[0], 0), kernel_size, stride, padding, dilation), 0


def max_pool1d(
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.max_pool1d`` for a traced flow.

    Raises:
        FlowError: indices or ceil_mode are asked for, or the page axis would change its length.
    """
    stride = kernel_size if stride in (None, [], ()) else stride
    numbers = [
        value[0] if isinstance(value, (list, tuple)) else value for value in (kernel_size, stride, padding, dilation)
    ]
    size, step, pad, dilate = numbers
    shown = f"op max_pool1d(kernel_size={size}, stride={step}, padding={pad}, dilation={dilate})"
    if ceil_mode or return_indices:
        raise FlowError("max_pool1d", f"{shown} with ceil_mode or return_indices", "leave both out")
    if isinstance(input.shape[-1], torch.SymInt) and (step != 1 or 2 * pad != dilate * (size - 1)):
        raise FlowError(
            "max_pool1d",
            f"{shown} changes the number of pages",
            "use an odd kernel_size with stride=1 and padding=kernel_size // 2",
        )
    result: torch.Tensor = torch.ops.kvsieve.max_pool1d(input, *numbers)
    return result
