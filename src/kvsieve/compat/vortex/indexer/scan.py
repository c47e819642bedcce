"""Ops along the window of a segment."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from kvsieve.compat.vortex.abs.op import vOp
from kvsieve.compat.vortex.abs.tensor import FORMAT, as_vtensor, plain, vTensor
from kvsieve.compat.vortex.core import checks, maths
from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.core.kernels import scan_windows
from kvsieve.compat.vortex.core.segment import SegmentTensor, segment_tensor
from kvsieve.compat.vortex.core.step import listing_rows, number, windows_of


class Scan(vOp):
    """``op(x, ctx=ctx)`` on a RAGGED tensor, over the windows of the segments that the step scores."""

    in_place = True
    fill = 0.0

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        if dim != 0:
            problem = f"expected dim 0, the pages of a segment, received {dim!r}"
            raise OpError(type(self).__name__, problem, "Transpose() or reduce what lies along the other axes")
        self.dim = dim

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """What happens to every value by itself, before padding is put beside it."""
        return x

    @abstractmethod
    def along(self, x: torch.Tensor) -> torch.Tensor:
        """The result for x [W, ..., D0, D1], along axis 0."""

    def profile(self, x: Any, ctx: Any = None) -> vTensor:
        operand = self._checked(x)
        if self.in_place:
            return operand
        out = plain(operand).new_empty(number(ctx, "max_num_pages", unset=0), *checks.inner(operand))
        ctx.add_aux_memory(out)
        return as_vtensor(out, FORMAT.RAGGED)

    def execute(self, x: Any, ctx: Any = None) -> vTensor:
        operand = self._checked(x, FORMAT.RAGGED)
        source, out = plain(operand), operand
        if not self.in_place:
            out = as_vtensor(source.new_empty(listing_rows(ctx), *checks.inner(operand)), FORMAT.RAGGED)
        scan_windows(source, plain(out), windows_of(ctx), self.along, self.fill, self.before)
        return out

    def on_segment(self, x: Any, ctx: Any = None) -> SegmentTensor:
        operand = segment_tensor(self, x)
        checks.format_of(self, "operand", operand, FORMAT.RAGGED)
        value = self.along(self.before(operand.data))
        if not self.in_place:
            return SegmentTensor(value, FORMAT.RAGGED)
        operand.data = value
        return operand

    def _checked(self, x: Any, kind: FORMAT | None = None) -> vTensor:
        operand = checks.operand(self, "operand", x, kind)
        checks.format_of(self, "operand", operand, FORMAT.RAGGED)
        return operand


class Softmax(Scan):
    """``softmax(scale * x)`` over a segment's window, element by element, in place. ``scale`` is a plain attribute."""

    fill = -torch.inf

    def __init__(self, dim: int = 0, scale: float = 1.0) -> None:
        super().__init__(dim)
        self.scale = scale

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x

    def along(self, x: torch.Tensor) -> torch.Tensor:
        return maths.softmax(x)


class Normalize(Scan):
    """``x / max(|x|, 1e-12)`` with the Euclidean norm over a segment's window, element by element, in place."""

    def along(self, x: torch.Tensor) -> torch.Tensor:
        return maths.normalize(x)


class Conv1d(Scan):
    """``O[s] = sum_k weight[k] * x[s + k - K // 2]`` over a segment's window, zeros outside; a new tensor.

    Args:
        weight: numbers [K, D0, D1] (nested lists or a tensor).
        dim: 0.
        dtype: the weight is rounded to it first, if given.
    """

    in_place = False

    def __init__(self, weight: Sequence[Any] | torch.Tensor, dim: int = 0, dtype: torch.dtype | None = None) -> None:
        super().__init__(dim)
        self.weight = torch.as_tensor(weight, dtype=torch.float64)
        if dtype is not None:
            self.weight = self.weight.to(dtype).to(torch.float64)
        if self.weight.dim() != 3 or not self.weight.numel():
            problem = f"expected weight [K, D0, D1], received shape {list(self.weight.shape)}"
            raise OpError("Conv1d", problem, "write K taps of [D0][D1] numbers, such as [[[1.0]], [[2.0]]]")

    def along(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(device=x.device, dtype=x.dtype)
        if tuple(x.shape[-2:]) != tuple(weight.shape[1:]):
            problem = f"expected inner shape {tuple(weight.shape[1:])}, that of a tap, received {tuple(x.shape[-2:])}"
            raise OpError("Conv1d", problem, "give the weight the inner shape of the operand")
        if x.dim() == 3:
            return maths.conv1d(x, weight)
        many = x.shape[1]  # segments side by side: channels of their own
        rows = maths.conv1d(x.flatten(1, 2), weight.repeat(1, many, 1))
        result: torch.Tensor = rows.unflatten(1, (many, x.shape[2]))
        return result
