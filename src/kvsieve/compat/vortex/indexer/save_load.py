"""Fields of the pool, read and written by the indexer."""

from __future__ import annotations

from typing import Any

from kvsieve.compat.vortex.abs.op import vOp
from kvsieve.compat.vortex.abs.tensor import FORMAT, plain, vTensor
from kvsieve.compat.vortex.core import checks, ops
from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.core.kernels import copy_rows
from kvsieve.compat.vortex.core.segment import SegmentTensor, segment_tensor
from kvsieve.compat.vortex.core.step import rows_of, work_of
from kvsieve.compat.vortex.indexer.base import IndexerOp


class Save(vOp):
    """``op(x, field)``: the rows of the work list are written to their pages of ``field``, which is returned."""

    def profile(self, x: Any, o: Any, ctx: Any = None) -> vTensor:
        return self._checked(x, o)[1]

    def execute(self, x: Any, o: Any, ctx: Any = None) -> vTensor:
        source, target = self._checked(x, o, (FORMAT.RAGGED, FORMAT.PAGED))
        work = work_of(ctx)
        copy_rows(plain(source), work.positions, plain(target), rows_of(FORMAT.PAGED, work, ctx))
        return target

    def on_segment(self, x: Any, o: Any, ctx: Any = None) -> SegmentTensor:
        source, field = segment_tensor(self, x), segment_tensor(self, o)
        self._check_formats(source, field)
        checks.same_inner(self, "field", field, source.inner, checks.FIELD_SHAPE)
        if field.name is None:
            raise OpError(
                "Save: field", "expected a field of the cache, received a computed tensor", "save to cache[NAME]"
            )
        ctx.saved[field.name] = field.data = source.data
        return field

    def _checked(self, x: Any, o: Any, kinds: Any = (None, None)) -> tuple[vTensor, vTensor]:
        x, o = checks.operand(self, "operand", x, kinds[0]), checks.operand(self, "field", o, kinds[1])
        self._check_formats(x, o)
        checks.same_inner(self, "field", o, checks.inner(x), checks.FIELD_SHAPE)
        checks.same_device(self, x, o)
        return x, o

    def _check_formats(self, x: Any, o: Any) -> None:
        checks.format_of(self, "operand", x, FORMAT.RAGGED)
        checks.format_of(self, "field", o, FORMAT.PAGED)


class Load(ops.Copy, IndexerOp):
    """``op(field)``: the pages of the work list as a RAGGED tensor."""

    accepts = (FORMAT.PAGED,)
    profiled = (FORMAT.PAGED,)
