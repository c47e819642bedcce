"""The end of every ``forward_indexer``: scores become pages."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.compat.vortex.abs.op import vOp
from kvsieve.compat.vortex.abs.tensor import FORMAT, plain, vTensor
from kvsieve.compat.vortex.core import checks
from kvsieve.compat.vortex.core.errors import OpError, described
from kvsieve.compat.vortex.core.segment import segment_tensor
from kvsieve.compat.vortex.core.step import budget_of, required, segments_of
from kvsieve.compat.vortex.core.topk import topk_output

LISTS = "dense_kv_indptr", "sparse_kv_indptr", "dense_kv_indices"
ONE_NUMBER = "reduce it to one number a page, with Max, Mean or Sum"


class topK(vOp):
    """``op(score, o)``: per segment the ``topk_val`` best pages of the window, written to ``o`` in that order.

    score [S, 1, 1]; the older page wins at equal score, NaN ranks below -inf. Any number of pages. ``o`` receives the
    page rows at ``sparse_kv_indptr[segment] + page_reserved_bos``; so does ``ctx.sparse_kv_indices``.
    """

    def profile(self, x: Any, o: Any, ctx: Any = None) -> None:
        self._checked(x, o)
        if isinstance(o, vTensor) and o._format is not FORMAT.RAGGED:
            raise self._wrong_o(f"format {o._format.name}")

    def execute(self, x: Any, o: Any, ctx: Any = None) -> Any:
        x, o = self._checked(x, o, FORMAT.RAGGED)
        listed = getattr(ctx, "sparse_kv_indices", None)
        targets = [o]
        if isinstance(listed, torch.Tensor) and listed.data_ptr() != o.data_ptr() and listed.device == o.device:
            targets.append(listed)
        dense, sparse, rows = (required(ctx, name) for name in LISTS)
        bos, eos, topk = budget_of(ctx)
        for target in targets:
            topk_output(x, dense, sparse, rows, target, segments_of(ctx), topk, bos, eos)
        return o

    def on_segment(self, x: Any, o: Any, ctx: Any = None) -> Any:
        x = segment_tensor(self, x)
        checks.format_of(self, "score", x, FORMAT.RAGGED)
        checks.same_inner(self, "score", x, (1, 1), ONE_NUMBER)
        if ctx.scores is not None:
            raise OpError(
                type(self).__name__, "expected one topK a flow, received a second", "combine the scores first"
            )
        ctx.scores = x.data
        return o

    def _checked(self, x: Any, o: Any, kind: FORMAT | None = None) -> tuple[Any, Any]:
        x = checks.operand(self, "score", x, kind)
        checks.format_of(self, "score", x, FORMAT.RAGGED)
        checks.same_inner(self, "score", x, (1, 1), ONE_NUMBER)
        if not isinstance(o, torch.Tensor) or o.dim() not in (1, 3):
            raise self._wrong_o(described(o))
        checks.same_device(self, x, o)
        return x, plain(o)

    def _wrong_o(self, received: str) -> OpError:
        problem = f"expected a RAGGED int32 tensor [pages, 1, 1], received {received}"
        return OpError(f"{type(self).__name__}: o", problem, "pass the o of forward_indexer")


class approxTopK(topK):
    """As :class:`topK`: exact, whatever ``tolerate_ratio`` in [0, 1] permits."""

    def __init__(self, tolerate_ratio: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= float(tolerate_ratio) <= 1.0:
            problem = f"expected tolerate_ratio in [0, 1], received {tolerate_ratio!r}"
            raise OpError("approxTopK", problem, "0 asks for exact selection")
        self.tolerate_ratio = float(tolerate_ratio)
