"""The shipped flows in op form: three of vortex_torch v1, four heavy-hitter flows.

The heavy-hitter flows were proposed for vortex_torch by GeoffreyWang1117; the token-level design was suggested by
Zhuoming Chen. kvsieve's own forms of all seven are in ``kvsieve.flows``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvsieve.compat.vortex.cache import Fill
from kvsieve.compat.vortex.cache import Max as CMax
from kvsieve.compat.vortex.cache import Mean as CMean
from kvsieve.compat.vortex.cache import Min as CMin
from kvsieve.compat.vortex.core.errors import PageSizeError
from kvsieve.compat.vortex.flow.flow import vFlow
from kvsieve.compat.vortex.flow.registry import register
from kvsieve.compat.vortex.indexer import Add, GeMM, GeMV, Max, Maximum, Multiply, Save, Softmax, Sum, topK

Cache = Mapping[str, Any]


class _Centroids(vFlow):
    """Mean key of every page."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = CMean(dim=1)
        self.output_func = topK()

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        return {"centroids": (1, head_dim)}

    def forward_cache(self, cache: Cache, loc: torch.Tensor, ctx: Any) -> None:
        self.reduction(cache["k"], cache["centroids"], loc=loc, ctx=ctx)


@register("block_sparse_attention")
class BlockSparseAttention(_Centroids):
    """``mean_h(q_h) . mean(k)``."""

    def __init__(self) -> None:
        super().__init__()
        self.gemv = GeMV()

    def forward_indexer(self, q: Any, o: Any, cache: Cache, ctx: Any) -> None:
        score = self.gemv(q.mean(dim=1, keepdim=True), cache["centroids"], ctx=ctx)
        self.output_func(score, o, ctx=ctx)


@register("gqa_block_sparse_attention")
class GQABlockSparseAttention(_Centroids):
    """``max_h softmax_window(0.09 * q_h . mean(k))``; the scale is fixed, as in v1."""

    def __init__(self) -> None:
        super().__init__()
        self.gemm, self.softmax, self.max_op = GeMM(), Softmax(dim=0, scale=0.09), Max(dim=2)

    def forward_indexer(self, q: Any, o: Any, cache: Cache, ctx: Any) -> None:
        score = self.gemm(q, cache["centroids"], ctx=ctx)
        self.softmax(score, ctx=ctx)
        self.output_func(self.max_op(score, ctx=ctx), o, ctx=ctx)


class _Envelope(vFlow):
    """Elementwise largest and smallest key of every page, and the bound that they give for a query."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction_max, self.reduction_min = CMax(dim=1), CMin(dim=1)
        self.mul_max, self.mul_min, self.maximum = Multiply(), Multiply(), Maximum()
        self.sum, self.output_func = Sum(dim=2), topK()

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        return {"max": (1, head_dim), "min": (1, head_dim)}

    def forward_cache(self, cache: Cache, loc: torch.Tensor, ctx: Any) -> None:
        self.reduction_max(cache["k"], cache["max"], loc=loc, ctx=ctx)
        self.reduction_min(cache["k"], cache["min"], loc=loc, ctx=ctx)

    def bound(self, q: Any, cache: Cache, ctx: Any) -> Any:
        """``sum_d max(q_d max_d, q_d min_d)``: q [segments, N, D] -> [S, N, 1]."""
        high = self.mul_max(q, cache["max"], ctx=ctx)
        low = self.mul_min(q, cache["min"], ctx=ctx)
        return self.sum(self.maximum(high, low, ctx=ctx), ctx=ctx)


@register("gqa_quest_sparse_attention")
class GQAQuestSparseAttention(_Envelope):
    """``max_h sum_d max(q_hd max_d, q_hd min_d)`` (Quest, arXiv 2406.10774)."""

    def __init__(self) -> None:
        super().__init__()
        self.max_op = Max(dim=1)

    def forward_indexer(self, q: Any, o: Any, cache: Cache, ctx: Any) -> None:
        self.output_func(self.max_op(self.bound(q, cache, ctx), ctx=ctx), o, ctx=ctx)


class _H2OPages(_Envelope):
    """``w_avg * mean term + w_peak * peak term``: ``add.alpha`` and ``add.beta``."""

    def __init__(self, w_avg: float = 1.0, w_peak: float = 1.0) -> None:
        super().__init__()
        self.w_avg, self.w_peak = w_avg, w_peak
        self.reduction_mean, self.add = CMean(dim=1), Add(alpha=w_avg, beta=w_peak)

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        return {"centroids": (1, head_dim), **super().create_cache(page_size, head_dim)}

    def forward_cache(self, cache: Cache, loc: torch.Tensor, ctx: Any) -> None:
        self.reduction_mean(cache["k"], cache["centroids"], loc=loc, ctx=ctx)
        super().forward_cache(cache, loc, ctx)


@register("h2o_sparse_attention")
class H2OSparseAttention(_H2OPages):
    """``w_avg * qm . mean(k) + w_peak * sum_d max(qm_d max_d, qm_d min_d)``, qm the group's mean query."""

    def __init__(self, w_avg: float = 1.0, w_peak: float = 1.0) -> None:
        super().__init__(w_avg, w_peak)
        self.gemv = GeMV()

    def forward_indexer(self, q: Any, o: Any, cache: Cache, ctx: Any) -> None:
        mean_q = q.mean(dim=1, keepdim=True)
        average = self.gemv(mean_q, cache["centroids"], ctx=ctx)
        score = self.add(average, self.bound(mean_q, cache, ctx), ctx=ctx)
        self.output_func(score, o, ctx=ctx)


@register("gqa_h2o_sparse_attention")
class GQAH2OSparseAttention(_H2OPages):
    """``w_avg * max_h q_h . mean(k) + w_peak * max_h sum_d max(q_hd max_d, q_hd min_d)``."""

    def __init__(self, w_avg: float = 1.0, w_peak: float = 1.0) -> None:
        super().__init__(w_avg, w_peak)
        self.gemm, self.max_avg, self.max_peak = GeMM(), Max(dim=2), Max(dim=1)

    def forward_indexer(self, q: Any, o: Any, cache: Cache, ctx: Any) -> None:
        average = self.max_avg(self.gemm(q, cache["centroids"], ctx=ctx), ctx=ctx)
        peak = self.max_peak(self.bound(q, cache, ctx), ctx=ctx)
        self.output_func(self.add(average, peak, ctx=ctx), o, ctx=ctx)


class _H2OTokens(vFlow):
    """``s = attention of this step + decay * s``, one number a token, reset when a token is written.

    ``add.beta`` is the decay; ``softmax.scale`` is resolved in :meth:`create_cache` unless ``scale`` was given.
    """

    def __init__(self, decay: float = 1 - 2**-6, scale: float | None = None) -> None:
        super().__init__()
        self.decay, self.scale = decay, scale
        self.softmax = Softmax(dim=0, scale=1.0 if scale is None else scale)
        self.add, self.save, self.output_func = Add(alpha=1.0, beta=decay), Save(), topK()
        self.fill = Fill(0.0)

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        if page_size != 1:
            raise PageSizeError(f"{type(self).__name__}: expected page_size 1, one score a token, received {page_size}")
        self.softmax.scale = head_dim**-0.5 if self.scale is None else self.scale
        return {"hh_score": (1, 1)}

    def forward_cache(self, cache: Cache, loc: torch.Tensor, ctx: Any) -> None:
        self.fill(cache["hh_score"], loc=loc, ctx=ctx)

    def accumulate(self, mass: Any, o: Any, cache: Cache, ctx: Any) -> None:
        """Add this step's mass [S, 1, 1], store the sum and rank by it."""
        score = self.add(mass, cache["hh_score"], ctx=ctx)
        self.save(score, cache["hh_score"], ctx=ctx)
        self.output_func(score, o, ctx=ctx)


@register("h2o_token_sparse_attention")
class H2OTokenSparseAttention(_H2OTokens):
    """``s = softmax_window(scale * qm . k) + decay * s`` with qm the group's mean query."""

    def __init__(self, decay: float = 1 - 2**-6, scale: float | None = None) -> None:
        super().__init__(decay, scale)
        self.gemv = GeMV()

    def forward_indexer(self, q: Any, o: Any, cache: Cache, ctx: Any) -> None:
        mass = self.gemv(q.mean(dim=1, keepdim=True), cache["k"], ctx=ctx)
        self.softmax(mass, ctx=ctx)
        self.accumulate(mass, o, cache, ctx)


@register("gqa_h2o_token_sparse_attention")
class GQAH2OTokenSparseAttention(_H2OTokens):
    """``s = max_h softmax_window(scale * q_h . k) + decay * s``."""

    def __init__(self, decay: float = 1 - 2**-6, scale: float | None = None) -> None:
        super().__init__(decay, scale)
        self.gemm, self.max_op = GeMM(), Max(dim=2)

    def forward_indexer(self, q: Any, o: Any, cache: Cache, ctx: Any) -> None:
        mass = self.gemm(q, cache["k"], ctx=ctx)
        self.softmax(mass, ctx=ctx)
        self.accumulate(self.max_op(mass, ctx=ctx), o, cache, ctx)
