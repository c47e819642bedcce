"""A user's file of flows for vortex_torch: between them they use every op of both sides, at any page size.

It imports vortex_torch only. ``python -m kvsieve verify tests/vortex_flows.py:NAME`` verifies one of them.
"""

import torch  # noqa: F401  (as user files have it)
import vortex_torch.cache as C
import vortex_torch.indexer as I
from vortex_torch.flow import register, vFlow


class Base(vFlow):
    """Mean keys; subclasses score."""

    def __init__(self):
        super().__init__()
        self.centroid, self.top = C.Mean(dim=1), I.topK()

    def create_cache(self, page_size, head_dim):
        return {"centroids": (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        self.centroid(cache["k"], cache["centroids"], loc=loc, ctx=ctx)


@register("t_sigmoid_gate")
class SigmoidGate(Base):
    """max_h sigmoid(q_h . c) + silu of the mean query's logit."""

    def __init__(self, gate=0.3):
        super().__init__()
        self.gemm, self.gemv, self.max = I.GeMM(), I.GeMV(), I.Max(dim=2)
        self.sigmoid, self.silu, self.add = I.Sigmoid(0.1, -0.5), I.Silu(0.0, -1.0), I.Add(1.0, gate)

    def forward_indexer(self, q, o, cache, ctx):
        heads = self.sigmoid(self.gemm(q, cache["centroids"], ctx=ctx), ctx=ctx)
        mean = self.silu(self.gemv(q.mean(dim=1, keepdim=True), cache["centroids"], ctx=ctx), ctx=ctx)
        self.top(self.add(self.max(heads, ctx=ctx), mean, ctx=ctx), o, ctx=ctx)


@register("t_piecewise")
class Piecewise(Base):
    """Relu, Abs and Add_Mul of logits, summed over heads; the PAGED operand comes first, torch ops touch q only."""

    def __init__(self):
        super().__init__()
        self.mul, self.sum_d, self.sum_h = I.Multiply(), I.Sum(dim=2), I.Sum(dim=1)
        self.relu, self.abs, self.affine = I.Relu(0.2, -0.1), I.Abs(0.5, 2.0), I.Add_Mul(1.0, -0.3)
        self.minimum, self.maximum = I.Minimum(), I.Maximum()

    def forward_indexer(self, q, o, cache, ctx):
        logits = self.sum_d(self.mul(cache["centroids"], q * 0.5, ctx=ctx), ctx=ctx)
        low = self.minimum(self.relu(logits, ctx=ctx), self.abs(logits, ctx=ctx), ctx=ctx)
        self.top(self.sum_h(self.maximum(low, self.affine(logits, ctx=ctx), ctx=ctx), ctx=ctx), o, ctx=ctx)


@register("t_token_logits")
class TokenLogits(Base):
    """Raw K: per head the best token, then the mean over heads; Transpose and a product of two RAGGED tensors."""

    def __init__(self):
        super().__init__()
        self.gemm, self.t, self.best, self.mean = I.GeMM(), I.Transpose(), I.Max(dim=2), I.Mean(dim=1)
        self.gram, self.norm, self.norm2, self.add = I.GeMM(), I.L2Norm(dim=1), I.L2Norm(dim=2), I.Add(1.0, 0.01)

    def forward_indexer(self, q, o, cache, ctx):
        logits = self.gemm(q, cache["k"], ctx=ctx)  # [S, p, G]
        heads = self.t(logits, ctx=ctx)  # [S, G, p]
        best = self.mean(self.best(heads, ctx=ctx), ctx=ctx)
        gram = self.gram(heads, heads, ctx=ctx)  # [S, G, G]
        self.top(self.add(best, self.norm2(self.norm(gram, ctx=ctx), ctx=ctx), ctx=ctx), o, ctx=ctx)


@register("t_normalized")
class Normalized(Base):
    """Least of the heads' normalised logits plus the largest of their probabilities over the window."""

    def __init__(self):
        super().__init__()
        self.gemm, self.gemm2, self.normalize, self.softmax = I.GeMM(), I.GeMM(), I.Normalize(), I.Softmax(scale=0.5)
        self.min, self.max, self.add = I.Min(dim=2), I.Max(dim=2), I.Add(1.0, 0.5)

    def forward_indexer(self, q, o, cache, ctx):
        logits, others = self.gemm(q, cache["centroids"], ctx=ctx), self.gemm2(q, cache["centroids"], ctx=ctx)
        self.normalize(logits, ctx=ctx)  # in place
        self.softmax(others, ctx=ctx)
        least, most = self.min(logits, ctx=ctx), self.max(others, ctx=ctx)
        self.top(self.add(least, most, ctx=ctx), o, ctx=ctx)


@register("t_logsumexp")
class LogSumExp(Base):
    """log sum_h exp(0.1 q_h . c), through Exp and Log."""

    def __init__(self):
        super().__init__()
        self.gemm, self.exp, self.sum, self.log = I.GeMM(), I.Exp(0.0, 0.1), I.Sum(dim=2), I.Log(0.5, 1.0)

    def forward_indexer(self, q, o, cache, ctx):
        weights = self.exp(self.gemm(q, cache["centroids"], ctx=ctx), ctx=ctx)
        self.top(self.log(self.sum(weights, ctx=ctx), ctx=ctx), o, ctx=ctx)


@register("t_where")
class Masked(Base):
    """Pages whose logit is not above the window's mean fall back to half of it; all six predicates."""

    def __init__(self):
        super().__init__()
        self.gemv, self.mean, self.half = I.GeMV(), I.Mean(dim=0), I.Add_Mul(0.0, 0.5)
        self.gt, self.ge, self.lt = I.WhereGreater(), I.WhereGreaterEqual(), I.WhereLess()
        self.le, self.eq, self.ne = I.WhereLessEqual(), I.WhereEqual(), I.WhereNotEqual()
        self.add = [I.Add() for _ in range(6)]
        self.pick = [I.Maximum() for _ in range(3)]

    def forward_indexer(self, q, o, cache, ctx):
        score = self.gemv(q.mean(dim=1, keepdim=True), cache["centroids"], ctx=ctx)
        half, mean = self.half(score, ctx=ctx), self.mean(score, ctx=ctx)
        high = self.add[0](score, self.gt(score, mean, ctx=ctx), ctx=ctx)
        low = self.add[1](half, self.le(score, mean, ctx=ctx), ctx=ctx)
        both = self.pick[0](high, low, ctx=ctx)
        same = self.add[2](both, self.eq(both, high, ctx=ctx), ctx=ctx)
        other = self.add[3](both, self.ne(both, high, ctx=ctx), ctx=ctx)
        both = self.pick[1](same, other, ctx=ctx)
        above = self.add[4](both, self.ge(both, half, ctx=ctx), ctx=ctx)
        below = self.add[5](both, self.lt(both, half, ctx=ctx), ctx=ctx)
        self.top(self.pick[2](above, below, ctx=ctx), o, ctx=ctx)


@register("t_centered")
class Centered(Base):
    """(score - window mean + window min) / spread, with dim-0 reductions of every kind."""

    def __init__(self):
        super().__init__()
        self.gemm, self.heads = I.GeMM(), I.Max(dim=2)
        self.mean, self.max, self.min, self.sum, self.norm = (
            I.Mean(dim=0),
            I.Max(dim=0),
            I.Min(dim=0),
            I.Sum(dim=0),
            I.L2Norm(dim=0),
        )
        self.spread, self.shift, self.more, self.add = I.Add(1.0, -1.0), I.Add(1.0, -1.0), I.Add(0.25, 0.125), I.Add()
        self.invert, self.mul, self.add2 = I.Exp(0.0, -0.05), I.Multiply(), I.Add(1.0, 0.01)

    def forward_indexer(self, q, o, cache, ctx):
        score = self.heads(self.gemm(q, cache["centroids"], ctx=ctx), ctx=ctx)
        spread = self.invert(self.spread(self.max(score, ctx=ctx), self.min(score, ctx=ctx), ctx=ctx), ctx=ctx)
        centered = self.shift(score, self.mean(score, ctx=ctx), ctx=ctx)
        total = self.more(self.sum(score, ctx=ctx), self.norm(score, ctx=ctx), ctx=ctx)  # BATCHED and BATCHED
        scaled = self.mul(self.add(centered, total, ctx=ctx), spread, ctx=ctx)
        self.top(self.add2(scaled, score, ctx=ctx), o, ctx=ctx)


@register("t_lserve")
class SubBlocks(vFlow):
    """Quest per half page: interleaved envelopes, Kron to line heads up with halves; needs an even page size."""

    def __init__(self):
        super().__init__()
        self.mul_max, self.mul_min, self.maximum, self.sum = I.Kron(dim=1), I.Kron(dim=1), I.Maximum(), I.Sum(dim=2)
        self.best, self.top = I.Max(dim=1), I.topK()

    def create_cache(self, page_size, head_dim):
        assert page_size % 2 == 0, f"page_size must be even, got {page_size}"
        half = page_size // 2
        self.high, self.low = C.MaxInterleave(1, half), C.MinInterleave(1, half)
        self.mean, self.norm = C.MeanInterleave(1, half), C.L2NormInterleave(2, head_dim)
        return {"high": (2, head_dim), "low": (2, head_dim), "mean": (2, head_dim), "norm": (2, 1)}

    def forward_cache(self, cache, loc, ctx):
        self.high(cache["k"], cache["high"], loc=loc, ctx=ctx)
        self.low(cache["k"], cache["low"], loc=loc, ctx=ctx)
        self.mean(cache["k"], cache["mean"], loc=loc, ctx=ctx)
        self.norm(cache["mean"], cache["norm"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        high = self.mul_max(q, cache["high"], ctx=ctx)  # [S, G * 2, D]
        low = self.mul_min(q, cache["low"], ctx=ctx)
        bound = self.sum(self.maximum(high, low, ctx=ctx), ctx=ctx)
        self.top(self.best(bound, ctx=ctx), o, ctx=ctx)


@register("t_energy")
class ValueEnergy(Base):
    """q . c times the mean norm of the values; Load, Reshape and a full Kronecker product."""

    def __init__(self):
        super().__init__()
        self.norm, self.mean = C.L2Norm(dim=2), C.Mean(dim=1)
        self.gemm, self.load, self.kron, self.flat = I.GeMM(), I.Load(), I.Kron(), None
        self.mean_heads = I.Mean(dim=2)

    def create_cache(self, page_size, head_dim):
        return {"centroids": (1, head_dim), "energy": (1, 1)}

    def forward_cache(self, cache, loc, ctx):
        super().forward_cache(cache, loc, ctx)
        norms = self.norm(cache["v"], None, loc=loc, ctx=ctx)  # [., p, 1], scratch
        self.mean(norms, cache["energy"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        logits = self.gemm(q, cache["centroids"], ctx=ctx)  # [S, 1, G]
        weighted = self.kron(self.load(cache["energy"], ctx=ctx), logits, ctx=ctx)
        column = I.Reshape(-1, q.shape[1], 1)(weighted, ctx=ctx)
        row = I.Reshape(-1, 1, q.shape[1])(column, ctx=ctx)
        self.top(self.mean_heads(row, ctx=ctx), o, ctx=ctx)


@register("t_masked_quest")
class MaskedQuest(vFlow):
    """Quest without the first two channels, by a mask that multiplies the query."""

    def __init__(self):
        super().__init__()
        self.high, self.low, self.mask, self.cut = C.Max(dim=1), C.Min(dim=1), None, I.Multiply()
        self.mul_max, self.mul_min, self.maximum = I.Multiply(), I.Multiply(), I.Maximum()
        self.sum, self.best, self.top = I.Sum(dim=2), I.Max(dim=1), I.approxTopK(0.1)
        self.mask = I.MaskSlice(0, 2, dim=2, alpha=0.0, beta=1.0)

    def create_cache(self, page_size, head_dim):
        return {"max": (1, head_dim), "min": (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        self.high(cache["k"], cache["max"], loc=loc, ctx=ctx)
        self.low(cache["k"], cache["min"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        q = self.cut(q, self.mask(q, ctx=ctx), ctx=ctx)
        high, low = self.mul_max(q, cache["max"], ctx=ctx), self.mul_min(cache["min"], q, ctx=ctx)
        self.top(self.best(self.sum(self.maximum(high, low, ctx=ctx), ctx=ctx), ctx=ctx), o, ctx=ctx)


@register("t_smoothed")
class Smoothed(Base):
    """Scores voted on by their neighbours: an asymmetric Conv1d with three taps, then one with two."""

    def __init__(self):
        super().__init__()
        self.gemv = I.GeMV()
        self.conv = I.Conv1d([[[0.25]], [[1.0]], [[-0.5]]], dim=0)
        self.conv_even = I.Conv1d([[[0.5]], [[1.0]]])

    def forward_indexer(self, q, o, cache, ctx):
        score = self.gemv(q.mean(dim=1, keepdim=True), cache["centroids"], ctx=ctx)
        self.top(self.conv_even(self.conv(score, ctx=ctx), ctx=ctx), o, ctx=ctx)


@register("t_running")
class RunningAverage(Base):
    """0.5 * last + current, and the largest logit so far: two fields of state, one of which starts at -2."""

    def __init__(self, keep=0.5):
        super().__init__()
        self.gemv, self.load, self.add, self.save = I.GeMV(), I.Load(), I.Add(1.0, keep), I.Save()
        self.peak, self.save_peak, self.mix = I.Maximum(), I.Save(), I.Add(1.0, 0.1)
        self.zero, self.low = C.Fill(), C.Fill(-2.0)

    def create_cache(self, page_size, head_dim):
        return {"centroids": (1, head_dim), "running": (1, 1), "peak": (1, 1)}

    def forward_cache(self, cache, loc, ctx):
        super().forward_cache(cache, loc, ctx)
        self.zero(cache["running"], loc=loc, ctx=ctx)
        self.low(cache["peak"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        now = self.gemv(q.mean(dim=1, keepdim=True), cache["centroids"], ctx=ctx)
        running = self.add(now, self.load(cache["running"], ctx=ctx), ctx=ctx)
        peak = self.peak(now, cache["peak"], ctx=ctx)
        self.save(running, cache["running"], ctx=ctx)
        self.save_peak(peak, cache["peak"], ctx=ctx)
        self.top(self.mix(running, cache["peak"], ctx=ctx), o, ctx=ctx)


@register("t_cache_side")
class CacheSide(vFlow):
    """A summary that goes through every elementwise op of the cache side, most results as scratch."""

    def __init__(self):
        super().__init__()
        self.mean, self.max, self.min, self.sum, self.norm = C.Mean(1), C.Max(1), C.Min(1), C.Sum(1), C.L2Norm(1)
        self.unary = [C.Relu(-0.2, 0.1), C.Silu(0.1, -1.0), C.Sigmoid(0.0, -1.0), C.Abs(0.1, 2.0), C.Add_Mul(0.3, 0.5)]
        self.exp, self.log = C.Exp(0.0, 0.1), C.Log(1.5, 1.0)
        self.add, self.mul, self.maximum, self.minimum = C.Add(0.5, 2.0), C.Multiply(), C.Maximum(), C.Minimum()
        self.masks = [C.WhereGreater(), C.WhereLessEqual(), C.WhereEqual(), C.WhereNotEqual()]
        self.masks += [C.WhereLess(), C.WhereGreaterEqual()]
        self.clip = [C.Maximum() for _ in self.masks]
        self.slice, self.gram, self.flat = C.MaskSlice(0, 1, dim=2, alpha=2.0, beta=0.5), C.GeMM(), None
        self.fold = [C.Add() for _ in range(3)]
        self.constant, self.gemm, self.best, self.shift, self.top = C.Fill(0.75), I.GeMM(), I.Max(2), I.Add(), I.topK()

    def create_cache(self, page_size, head_dim):
        self.flat, self.back = C.Reshape(-1, head_dim, 1), C.Reshape(-1, 1, head_dim)
        return {"field": (1, head_dim), "norm": (1, 1), "constant": (1, 1)}

    def forward_cache(self, cache, loc, ctx):
        def op(one, *operands):
            return one(*operands, None, loc=loc, ctx=ctx)

        k = cache["k"]
        spread = op(self.maximum, op(self.mean, k), op(self.minimum, op(self.max, k), op(self.min, k)))
        x = op(self.add, spread, op(self.mul, op(self.sum, k), op(self.norm, k)))
        for one in self.unary:
            x = op(one, x)
        x = op(self.log, op(self.exp, op(self.back, op(self.flat, x))))
        for mask, clip in zip(self.masks, self.clip, strict=True):
            x = op(clip, x, op(mask, x, spread))
        x = op(self.fold[0], x, op(self.slice, x))
        self.fold[1](x, spread, cache["field"], loc=loc, ctx=ctx)
        self.gram(cache["field"], x, cache["norm"], loc=loc, ctx=ctx)
        self.constant(cache["constant"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        best = self.best(self.gemm(q, cache["field"], ctx=ctx), ctx=ctx)
        self.top(self.shift(best, cache["constant"], ctx=ctx), o, ctx=ctx)


@register("t_two_uses")
class TwoUses(Base):
    """One op object at two call sites, and a field that nothing ever writes (it is 0)."""

    def __init__(self):
        super().__init__()
        self.gemm, self.best, self.add = I.GeMM(), I.Max(dim=2), I.Add(1.0, -0.5)

    def create_cache(self, page_size, head_dim):
        return {"centroids": (1, head_dim), "never": (1, 1)}

    def forward_indexer(self, q, o, cache, ctx):
        first = self.best(self.gemm(q, cache["centroids"], ctx=ctx), ctx=ctx)
        second = self.best(self.gemm(q.mean(dim=1, keepdim=True), cache["centroids"], ctx=ctx), ctx=ctx)
        difference = self.add(first, second, ctx=ctx)
        self.top(self.add(difference, cache["never"], ctx=ctx), o, ctx=ctx)
