"""The end of every ``forward_indexer``: scores become pages."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.compat.vortex.abs.op import vOp
from kvsieve.compat.vortex.abs.tensor import FORMAT, plain
from kvsieve.compat.vortex.core import checks
from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.core.segment import segment_tensor
from kvsieve.compat.vortex.core.topk import topk_output
from kvsieve.compat.vortex.indexer.context import number, segments_of


class topK(vOp):
    """``op(score, o)``: per segment the ``topk_val`` best pages of the window, written to ``o`` in that order.

    score [S, 1, 1]; the older page wins at equal score, NaN ranks below -inf. Any number of pages. ``o`` receives the
    page rows at ``sparse_kv_indptr[segment] + page_reserved_bos``; so does ``ctx.sparse_kv_indices``.
    """

    def profile(self, x: Any, o: Any, ctx: Any = None) -> None:
        self._checked(x, o)

    def execute(self, x: Any, o: Any, ctx: Any = None) -> Any:
        x, o = self._checked(x, o, FORMAT.RAGGED)
        listed = getattr(ctx, "sparse_kv_indices", None)
        targets = [o]
        if isinstance(listed, torch.Tensor) and listed.data_ptr() != o.data_ptr() and listed.device == o.device:
            targets.append(listed)
        for target in targets:
            topk_output(
                x,
                ctx.dense_kv_indptr,
                ctx.sparse_kv_indptr,
                ctx.dense_kv_indices,
                target,
                segments_of(ctx),
                number(ctx, "topk_val"),
                number(ctx, "page_reserved_bos"),
                number(ctx, "page_reserved_eos"),
                number(ctx, "max_num_pages_per_request"),
            )
        return o

    def on_segment(self, x: Any, o: Any, ctx: Any = None) -> Any:
        x = segment_tensor(self, x)
        checks.format_of(self, "score", x, FORMAT.RAGGED)
        checks.same_inner(self, "score", x, (1, 1))
        if ctx.scores is not None:
            raise OpError(f"{type(self).__name__}: expected one topK a flow, received a second")
        ctx.scores = x.data
        return o

    def _checked(self, x: Any, o: Any, kind: FORMAT | None = None) -> tuple[Any, Any]:
        x = checks.operand(self, "score", x, kind)
        checks.format_of(self, "score", x, FORMAT.RAGGED)
        checks.same_inner(self, "score", x, (1, 1))
        if not isinstance(o, torch.Tensor) or o.dim() not in (1, 3):
            raise OpError(f"{type(self).__name__}: o: expected a tensor [pages, 1, 1], received {o!r}")
        checks.same_device(self, x, o)
        return x, plain(o)


class approxTopK(topK):
    """As :class:`topK`: exact, whatever ``tolerate_ratio`` in [0, 1] permits."""

    def __init__(self, tolerate_ratio: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= float(tolerate_ratio) <= 1.0:
            raise OpError(f"approxTopK: expected tolerate_ratio in [0, 1], received {tolerate_ratio!r}")
        self.tolerate_ratio = float(tolerate_ratio)
