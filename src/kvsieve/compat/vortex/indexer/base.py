"""How an indexer op finds its operands: rows of segments, of the page listing, of the pool."""

from __future__ import annotations

from typing import Any, ClassVar

from kvsieve.compat.vortex.abs.op import vOp
from kvsieve.compat.vortex.abs.tensor import FORMAT, as_vtensor, plain, vTensor
from kvsieve.compat.vortex.core import checks
from kvsieve.compat.vortex.core.kernels import Gathered, compute, widened
from kvsieve.compat.vortex.core.row_op import NAMES, RowOp, bf16
from kvsieve.compat.vortex.core.segment import SegmentTensor, segment_tensor
from kvsieve.compat.vortex.core.step import listing_rows, number, rows_of, work_of

FORMATS = (FORMAT.BATCHED, FORMAT.RAGGED, FORMAT.PAGED)


class IndexerOp(vOp, RowOp):
    """``op(*operands, ctx=ctx)``, operands BATCHED, RAGGED or PAGED; BATCHED if all of them are, else RAGGED."""

    accepts: ClassVar[tuple[FORMAT, ...]] = FORMATS
    profiled: tuple[FORMAT, ...] = ()
    """Formats of the operands that the op was last profiled with."""

    def profile(self, *operands: Any, ctx: Any = None, **named: Any) -> vTensor:
        """Check operands; the result is a new buffer of the worst case's size."""
        xs = self._checked(self.in_order(operands, named))
        self.profiled = tuple(x._format for x in xs)
        shape = self.result_shape(*(checks.inner(x) for x in xs))
        for x in xs:
            if x._format is FORMAT.PAGED:
                ctx.add_aux_flops(x.shape[1] * x.shape[2])
        kind = self._result_format(xs)
        rows = max(len(x) for x in xs) if kind is FORMAT.BATCHED else number(ctx, "max_num_pages", unset=0)
        out = plain(xs[0]).new_empty(rows, *shape)
        ctx.add_aux_memory(out)
        return as_vtensor(out, kind)

    def execute(self, *operands: Any, ctx: Any = None, **named: Any) -> vTensor:
        """Compute the rows of the step's work list; other rows of the result are undefined.

        Plain tensors are taken to have the formats that the op was last profiled with.
        """
        xs = self._checked(self.in_order(operands, named), self.profiled)
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
        xs = [segment_tensor(self, x) for x in self.in_order(operands, named)]
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
        segments = number(ctx, "batch_size", unset=0) * number(ctx, "num_kv_heads", unset=0)
        if rows and min(rows) < segments:
            problem = f"expected BATCHED operands of at least {segments} rows, received {min(rows)}"
            raise self.refuse(problem, "pass one row for each request and KV head of the step")
        if len(rows) == len(xs) and len({*rows} - {1}) > 1:
            problem = f"expected BATCHED operands of equally many rows, received {rows}"
            raise self.refuse(problem, "pass one row for each request and KV head of the step")

    def _check_number(self, received: int) -> None:
        if received != self.arity:
            problem = f"expected {self.arity} operand(s) and ctx, received {received}"
            raise self.refuse(problem, f"call op({', '.join(NAMES[: self.arity])}, ctx=ctx)")

    def _check_format(self, x: Any) -> None:
        checks.format_of(self, "operand", x, *self.accepts)

    def _result_format(self, xs: Any) -> FORMAT:
        return FORMAT.BATCHED if all(x._format is FORMAT.BATCHED for x in xs) else FORMAT.RAGGED
