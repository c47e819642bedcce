"""How an indexer op finds its operands: rows of segments, of the page listing, of the pool."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kvsieve.compat.vortex.abs.op import vOp
from kvsieve.compat.vortex.abs.tensor import FORMAT, as_vtensor, plain, vTensor
from kvsieve.compat.vortex.core import checks
from kvsieve.compat.vortex.core.kernels import Gathered, compute, widened
from kvsieve.compat.vortex.core.ops import RowOp, bf16
from kvsieve.compat.vortex.core.segment import SegmentTensor, segment_tensor
from kvsieve.compat.vortex.core.work import Work
from kvsieve.compat.vortex.indexer.context import number, segments_of

FORMATS = (FORMAT.BATCHED, FORMAT.RAGGED, FORMAT.PAGED)


class IndexerOp(vOp, RowOp):
    """``op(*operands, ctx=ctx)``, operands BATCHED, RAGGED or PAGED; BATCHED if all of them are, else RAGGED."""

    accepts: ClassVar[tuple[FORMAT, ...]] = FORMATS
    profiled: tuple[FORMAT, ...] = ()
    """Formats of the operands that the op was last profiled with."""

    def profile(self, *operands: Any, ctx: Any = None, **named: Any) -> vTensor:
        """Check operands; the result is a new buffer of the worst case's size."""
        xs = self._checked(_in_order(operands, named))
        self.profiled = tuple(x._format for x in xs)
        shape = self.result_shape(*(checks.inner(x) for x in xs))
        for x in xs:
            if x._format is FORMAT.PAGED:
                ctx.add_aux_flops(x.shape[1] * x.shape[2])
        kind = self._result_format(xs)
        rows = max(len(x) for x in xs) if kind is FORMAT.BATCHED else number(ctx, "max_num_pages")
        out = plain(xs[0]).new_empty(rows, *shape)
        ctx.add_aux_memory(out)
        return as_vtensor(out, kind)

    def execute(self, *operands: Any, ctx: Any = None, **named: Any) -> vTensor:
        """Compute the rows of the step's work list; other rows of the result are undefined.

        Plain tensors are taken to have the formats that the op was last profiled with.
        """
        xs = self._checked(_in_order(operands, named), self.profiled)
        shape = self.result_shape(*(checks.inner(x) for x in xs))
        kind, alpha, beta = self._result_format(xs), bf16(self.alpha), bf16(self.beta)
        self._check_rows(xs, ctx)
        tables = [plain(x) for x in xs]
        if kind is FORMAT.BATCHED:
            value = self.rows(*map(widened, tables), alpha=alpha, beta=beta)
            return as_vtensor(value.to(tables[0].dtype), kind)
        out = tables[0].new_empty(listing_rows(ctx), *shape)
        work = work_of(ctx)
        gathered = [Gathered(table, rows_of(x._format, work, ctx)) for x, table in zip(xs, tables, strict=True)]
        compute(
            gathered,
            lambda *rows: self.rows(*rows, alpha=alpha, beta=beta),
            out,
            work.positions,
            shape[0] * shape[1],
        )
        return as_vtensor(out, kind)

    def on_segment(self, *operands: Any, ctx: Any = None, **named: Any) -> SegmentTensor:
        """Compute on one segment, exactly: alpha and beta are not rounded."""
        xs = [segment_tensor(self, x) for x in _in_order(operands, named)]
        self._check_number(len(xs))
        for x in xs:
            self._check_format(x)
        self.result_shape(*(x.inner for x in xs))
        value = self.rows(*(x.data for x in xs), alpha=self.alpha, beta=self.beta)
        return SegmentTensor(value, self._result_format(xs))

    def _checked(self, operands: list[Any], kinds: tuple[FORMAT, ...] = ()) -> list[vTensor]:
        self._check_number(len(operands))
        known = kinds or (None,) * len(operands)
        xs = [
            checks.operand(self, f"operand {n}", x, kind)
            for n, (x, kind) in enumerate(zip(operands, known, strict=True))
        ]
        for x in xs:
            self._check_format(x)
        checks.same_device(self, *xs)
        return xs

    def _check_rows(self, xs: list[vTensor], ctx: Any) -> None:
        """Every segment of the step has a row in BATCHED operands."""
        rows = [len(x) for x in xs if x._format is FORMAT.BATCHED]
        if rows and min(rows) < segments_of(ctx):
            raise self.refuse(f"expected BATCHED operands of at least {segments_of(ctx)} rows, received {min(rows)}")
        if len(rows) == len(xs) and len({*rows} - {1}) > 1:
            raise self.refuse(f"expected BATCHED operands of equally many rows, received {rows}")

    def _check_number(self, received: int) -> None:
        if received != self.arity:
            raise self.refuse(f"expected {self.arity} operand(s) and ctx, received {received}")

    def _check_format(self, x: Any) -> None:
        checks.format_of(self, "operand", x, *self.accepts)

    def _result_format(self, xs: Any) -> FORMAT:
        return FORMAT.BATCHED if all(x._format is FORMAT.BATCHED for x in xs) else FORMAT.RAGGED


def _in_order(operands: Any, named: dict[str, Any]) -> list[Any]:
    """Positional operands, then those given as ``x=`` and ``y=``."""
    return [*operands, *(named[name] for name in sorted(named))]


def listing_rows(ctx: Any) -> int:
    """Rows of a RAGGED result: the context's capacity, or the length of its page listing if that is larger."""
    return max(number(ctx, "max_num_pages"), int(ctx.dense_kv_indices.numel()))


def work_of(ctx: Any) -> Work:
    """The step's work list."""
    return Work.read(ctx.winfo_kv_offsets, ctx.winfo_kv_lens, ctx.winfo_num_workloads)


def rows_of(kind: FORMAT, work: Work, ctx: Any) -> torch.Tensor:
    """Row [n] of an operand at every place of the work list."""
    if kind is FORMAT.RAGGED:
        return work.positions
    if kind is FORMAT.PAGED:
        return plain(ctx.dense_kv_indices).flatten()[work.positions].long()
    return plain(ctx.winfo_q_indices).flatten()[work.items].long()
