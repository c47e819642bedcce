"""How a cache op finds its operands: pages that a token of this call completes."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.compat.vortex.abs.op import vOp
from kvsieve.compat.vortex.abs.tensor import FORMAT, as_vtensor, plain, vTensor
from kvsieve.compat.vortex.core import checks
from kvsieve.compat.vortex.core.errors import OpError, described
from kvsieve.compat.vortex.core.kernels import Gathered, compute
from kvsieve.compat.vortex.core.pages import Completed
from kvsieve.compat.vortex.core.row_op import NAMES, RowOp, bf16
from kvsieve.compat.vortex.core.segment import SegmentTensor, segment_tensor
from kvsieve.compat.vortex.core.step import number

FORMATS = (FORMAT.RAGGED, FORMAT.PAGED)


class CacheOp(vOp, RowOp):
    """``op(*operands, output, loc=loc, ctx=ctx)``; without an output the result is a RAGGED scratch tensor.

    Computes only for tokens that fill their page (``(loc + 1) % page_size == 0``). RAGGED rows are
    ``token * heads + head``.
    """

    profiled: tuple[FORMAT, ...] = ()
    """Formats of the operands and the output that the op was last profiled with."""

    def profile(self, *operands: Any, loc: Any = None, ctx: Any = None, output: Any = None, **named: Any) -> vTensor:
        """Check operands; a RAGGED result is a new buffer of the worst case's size."""
        xs, given, loc = self._arguments(operands, output, loc, named)
        self.profiled = (*(x._format for x in xs), FORMAT.RAGGED if given is None else given._format)
        if given is not None:
            return given
        out = plain(xs[0]).new_empty(_scratch_rows(ctx, loc), *self._shape(xs))
        ctx.add_aux_memory(out)
        return as_vtensor(out, FORMAT.RAGGED)

    def execute(self, *operands: Any, loc: Any = None, ctx: Any = None, output: Any = None, **named: Any) -> vTensor:
        """Compute; rows of other pages stay as they are.

        Plain tensors are taken to have the formats that the op was last profiled with.
        """
        xs, target, loc = self._arguments(operands, output, loc, named, self.profiled)
        shape, alpha, beta = self._shape(xs), bf16(self.alpha), bf16(self.beta)
        if target is None:
            target = as_vtensor(plain(xs[0]).new_empty(_scratch_rows(ctx, loc), *shape), FORMAT.RAGGED)
        pages = Completed.of(loc, number(ctx, "page_size"), number(ctx, "head_num"))
        compute(
            [Gathered(plain(x), pages.rows(x._format)) for x in xs],
            lambda *rows: self.rows(*rows, alpha=alpha, beta=beta),
            plain(target),
            pages.rows(target._format),
            shape[0] * shape[1],
        )
        return target

    def on_segment(self, *operands: Any, ctx: Any = None, output: Any = None, **named: Any) -> SegmentTensor:
        """Compute for the one page that is summarised, exactly."""
        named.pop("loc", None)
        values = self.in_order(operands, named)
        xs, target = self._split([x for x in values if not isinstance(x, torch.Tensor)], output)  # without loc
        xs = [segment_tensor(self, x) for x in xs]
        shape = self._shape(xs)
        value = self.rows(*(x.data for x in xs), alpha=self.alpha, beta=self.beta)
        if target is None:
            return SegmentTensor(value, FORMAT.RAGGED)
        field = segment_tensor(self, target)
        checks.same_inner(self, "output", field, shape, checks.FIELD_SHAPE)
        field.assign(value)
        return field

    def _shape(self, xs: list[Any]) -> tuple[int, int]:
        return self.result_shape(*(checks.inner(x) for x in xs))

    def _split(self, operands: list[Any], output: Any) -> tuple[list[Any], Any]:
        if output is None and len(operands) == self.arity + 1:
            operands, output = operands[:-1], operands[-1]
        if len(operands) != self.arity:
            problem = f"expected {self.arity} operand(s) and an output or None, received {len(operands)} operands"
            raise self.refuse(problem, f"call op({', '.join(NAMES[: self.arity])}, output, loc=loc, ctx=ctx)")
        return operands, output

    def _arguments(
        self, operands: Any, output: Any, loc: Any, named: Any, kinds: tuple[FORMAT, ...] = ()
    ) -> tuple[list[vTensor], vTensor | None, torch.Tensor]:
        values = self.in_order(operands, named)
        if loc is None and len(values) > self.arity + 1:  # op(x, output, loc, ctx=ctx)
            loc = values.pop()
        loc = check_loc(self, loc)
        values, output = self._split(values, output)
        known = kinds or (None,) * (self.arity + 1)
        xs = [checks.operand(self, f"operand {place}", x, known[place]) for place, x in enumerate(values)]
        for x in xs:
            checks.format_of(self, "operand", x, *FORMATS)
        if output is not None:
            output = checks.operand(self, "output", output, known[-1])
            checks.format_of(self, "output", output, *FORMATS)
            checks.same_inner(self, "output", output, self._shape(xs), checks.FIELD_SHAPE)
        checks.same_device(self, *xs, *([] if output is None else [output]))
        return xs, output, loc


def check_loc(op: object, loc: Any) -> torch.Tensor:
    """The token slots [n] of a call, an integer tensor."""
    if not isinstance(loc, torch.Tensor) or loc.is_floating_point() or loc.dim() != 1:
        problem = f"expected token slots [n], an integer tensor, received {described(loc)}"
        raise OpError(f"{type(op).__name__}: loc", problem, "pass loc=loc, as forward_cache receives it")
    return plain(loc)


def _scratch_rows(ctx: Any, loc: torch.Tensor) -> int:
    return max(number(ctx, "max_new_tokens_per_batch", unset=0), len(loc)) * number(ctx, "head_num", unset=1)
