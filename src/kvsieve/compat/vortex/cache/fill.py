"""A number for all of a completed page."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.compat.vortex.abs.op import vOp
from kvsieve.compat.vortex.abs.tensor import FORMAT, plain, vTensor
from kvsieve.compat.vortex.cache.base import check_loc
from kvsieve.compat.vortex.cache.triton_kernels.fill_impl import _fill_p
from kvsieve.compat.vortex.core import checks
from kvsieve.compat.vortex.core.segment import SegmentTensor, segment_tensor
from kvsieve.compat.vortex.core.step import number


class Fill(vOp):
    """``op(x, loc=loc, ctx=ctx)``: ``alpha`` (as bfloat16) for the whole row of every page completed in this call.

    It writes those pages and no others. Returns ``x``.
    """

    def __init__(self, alpha: float = 0.0) -> None:
        super().__init__()
        self.alpha = alpha

    def profile(self, x: Any, loc: Any = None, ctx: Any = None) -> vTensor:
        check_loc(self, loc)
        return self._checked(x)

    def execute(self, x: Any, loc: Any = None, ctx: Any = None) -> vTensor:
        field = self._checked(x, FORMAT.PAGED)
        _fill_p(plain(field), check_loc(self, loc), number(ctx, "head_num"), number(ctx, "page_size"), self.alpha)
        return field

    def on_segment(self, x: Any, loc: Any = None, ctx: Any = None) -> SegmentTensor:
        field = segment_tensor(self, x)
        checks.format_of(self, "operand", field, FORMAT.PAGED)
        field.fill(float(self.alpha), torch.full((1, *field.inner), float(self.alpha)))
        return field

    def _checked(self, x: Any, kind: FORMAT | None = None) -> vTensor:
        field = checks.operand(self, "operand", x, kind)
        checks.format_of(self, "operand", field, FORMAT.PAGED)
        return field
