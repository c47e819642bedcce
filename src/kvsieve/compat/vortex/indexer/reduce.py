"""Reductions: over a page's inner axes, or (``dim=0``) over a segment's window."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.compat.vortex.abs.tensor import FORMAT, as_vtensor, plain, vTensor
from kvsieve.compat.vortex.core import catalogue, checks, maths, ops
from kvsieve.compat.vortex.core.kernels import over_windows
from kvsieve.compat.vortex.core.row_op import Inner
from kvsieve.compat.vortex.core.step import segments_of, windows_of
from kvsieve.compat.vortex.core.work import Windows
from kvsieve.compat.vortex.indexer.base import IndexerOp
from kvsieve.compat.vortex.utils import ReduceType


class Reduce(ops.Reduce, IndexerOp):
    """``[S, D0, D1]`` -> ``[S, 1, D1]`` (dim 1) or ``[S, D0, 1]`` (dim 2).

    dim 0: RAGGED -> BATCHED ``[segments, D0, D1]``, over each segment's window; 0 for segments that are not scored.
    """

    dims = (0, 1, 2)

    def result_shape(self, *shapes: Inner) -> Inner:
        return shapes[0] if self.dim == 0 else super().result_shape(*shapes)

    def execute(self, *operands: Any, ctx: Any = None, **named: Any) -> vTensor:
        if self.dim:
            return super().execute(*operands, ctx=ctx, **named)
        (x,) = self._checked(self.in_order(operands, named), self.profiled)
        out = plain(x).new_zeros(segments_of(ctx), *checks.inner(x))
        windows = windows_of(ctx)
        if windows is not None:
            rows = over_windows(plain(x), windows, maths.IDENTITY[self.reduce_type])
            out[windows.segments] = self._reduced(rows, windows).to(out.dtype)
        return as_vtensor(out, FORMAT.BATCHED)

    def _reduced(self, rows: torch.Tensor, windows: Windows) -> torch.Tensor:
        if self.reduce_type is ReduceType.Mean:  # padding is no part of the mean
            return rows.sum(0) / windows.valid.sum(1)[:, None, None]
        return maths.REDUCE[self.reduce_type](rows, 0)[0]

    def _check_format(self, x: Any) -> None:
        checks.format_of(self, "operand", x, *((FORMAT.RAGGED,) if self.dim == 0 else self.accepts))

    def _result_format(self, xs: Any) -> FORMAT:
        return FORMAT.BATCHED if self.dim == 0 else super()._result_format(xs)


class Mean(Reduce, catalogue.Mean): ...


class Max(Reduce, catalogue.Max): ...


class Min(Reduce, catalogue.Min): ...


class Sum(Reduce, catalogue.Sum): ...


class L2Norm(Reduce, catalogue.L2Norm): ...
