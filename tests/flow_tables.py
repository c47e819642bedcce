"""Functions that random flows are made of, by family, kept well-conditioned.

Discontinuous ops get crooked thresholds, divisors keep away from 0, logarithms and roots from 0 and below, so that
float32 stays near float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

F = torch.nn.functional
A = torch.ops.aten


def unit(x: torch.Tensor) -> torch.Tensor:
    """Into (-1, 1) without losing what distinguishes values near 0."""
    return x / (1 + x.abs())


def positive(x: torch.Tensor) -> torch.Tensor:
    """Away from 0 by 0.4."""
    return 0.4 + x.square()


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neg": lambda x: -x,
    "abs": torch.abs,
    "square": torch.square,
    "sgn": lambda x: torch.sgn(x - 0.3113),
    "sign": lambda x: torch.sign(x + 0.1733),
    "exp": lambda x: torch.exp(unit(x)),
    "exp2": lambda x: torch.exp2(unit(x)),
    "expm1": lambda x: torch.expm1(unit(x)),
    "log": lambda x: torch.log(positive(x)),
    "log2": lambda x: torch.log2(positive(x)),
    "log10": lambda x: torch.log10(positive(x)),
    "log1p": lambda x: torch.log1p(positive(x)),
    "sqrt": lambda x: torch.sqrt(positive(x)),
    "rsqrt": lambda x: torch.rsqrt(positive(x)),
    "reciprocal": lambda x: torch.reciprocal(positive(x)),
    "sigmoid": torch.sigmoid,
    "log_sigmoid": F.logsigmoid,
    "tanh": torch.tanh,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": lambda x: torch.tan(unit(x)),
    "asin": lambda x: torch.asin(0.9 * unit(x)),
    "acos": lambda x: torch.acos(0.9 * unit(x)),
    "atan": torch.atan,
    "sinh": lambda x: torch.sinh(unit(x)),
    "cosh": lambda x: torch.cosh(unit(x)),
    "asinh": torch.asinh,
    "acosh": lambda x: torch.acosh(1.3 + x.abs()),
    "atanh": lambda x: torch.atanh(0.9 * unit(x)),
    "erf": torch.erf,
    "erfc": torch.erfc,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "elu": F.elu,
    "hardtanh": F.hardtanh,
    "clamp": lambda x: x.clamp(-0.7, 0.9),
    "clamp_min": lambda x: torch.clamp_min(x, -0.3),
    "clamp_max": lambda x: torch.clamp_max(x, 0.4),
    "pow": lambda x: positive(x) ** 1.5 + x**2 + 2 ** unit(x),
    "rsub": lambda x: torch.rsub(x, 0.5),
    "floor": lambda x: torch.floor(3 * x + 0.2719),
    "ceil": lambda x: torch.ceil(3 * x + 0.2719),
    "round": lambda x: torch.round(3 * x + 0.2719),
    "trunc": lambda x: torch.trunc(3 * x + 0.2719),
    "frac": lambda x: torch.where((3 * x).frac().abs() < 0.590, x, -x),
    "isnan": lambda x: torch.where(torch.isnan(torch.where(x > 0.3743, x / 0, x - x)), x, 0.5),
    "isinf": lambda x: torch.where(torch.isinf(torch.where(x > 0.3756, x / 0, x)), 0.5, x),
    "isfinite": lambda x: torch.where(torch.isfinite(torch.where(x > 0.3794, x / 0, x)), x, 0.5),
    "nan_to_num": lambda x: torch.nan_to_num(torch.where(x > 0.3778, x / 0, x), 0.1, 0.2, -0.2),
    "masked_fill": lambda x: x.masked_fill(x > 0.4114, 0.2),
    "eq": lambda x: x * (torch.floor(2 * x + 0.2339) == 0),
    "ne": lambda x: x * (torch.floor(2 * x + 0.2339) != 0),
    "lt_and": lambda x: x * ((x < 0.3370) & (x > -0.6142)),
    "le_or": lambda x: torch.where((x <= -0.3394) | (x >= 0.6117), x, 0.1),
    "xor": lambda x: torch.where((x > 0.1331) ^ ~(x > -0.4425), x, -0.1),
    "bitwise": lambda x: torch.where(
        torch.bitwise_or(torch.bitwise_and(x > 0.1358, x < 0.771), torch.bitwise_xor(x > -0.542, x > -0.259)), x, 0.3
    ),
    "bitwise_not": lambda x: torch.where(torch.bitwise_not(x > 0.1380), x, 0.3),
    "dunder": lambda x: torch.where(A.__xor__(A.__or__(x > 0.62, x < -0.68), A.__and__(x > -0.34, x < 0.31)), x, 0.2),
    "logical_and": lambda x: torch.where(torch.logical_and(x > 0.1338, x < 0.763), x, 0.3),
    "logical_or": lambda x: torch.where(torch.logical_or(x > 0.1346, x < -0.734), x, 0.3),
    "logical_xor": lambda x: torch.where(torch.logical_xor(x > 0.1360, x > 0.531), x, 0.3),
    "logical_not": lambda x: torch.where(torch.logical_not(x > 0.1320), x, 0.3),
    "remainder": lambda x: torch.where((2 * x + 0.3137) % 1.0 < 0.528, x, -x),
    "fmod": lambda x: torch.where(torch.fmod(2 * x + 0.3137, 1.0) < 0.590, x, -x),
    "floor_divide": lambda x: torch.floor_divide(2 * x + 0.3137, 0.7),
    "integers": lambda x: ((4 * x + 9.3171).long() // 2 % 3 * ((4 * x + 9.3171).int() % 2)).to(x.dtype),
    "full_like": lambda x: x + torch.full_like(x, 0.5),
    "zeros_like": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "ones_like": lambda x: torch.minimum(x, 0.5 * torch.ones_like(x)),
    "to": lambda x: x + (x > 0.2190).float(),
    "_to_copy": lambda x: A._to_copy(x > 0.1967, dtype=torch.float32) * x,
    "type_as": lambda x: (x > 0.2327).type_as(x) + x,
    "clone": torch.clone,
    "contiguous": lambda x: x[None].expand(2, *x.shape).contiguous().amax(0),
    "detach": torch.detach,
    "alias": lambda x: A.alias(x) + 0.1,
    "constant": lambda x: x * torch.tensor(0.7) + torch.tensor([0.25]),  # lift_fresh_copy, detach_
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "full": lambda x: x + torch.full((1,), 0.25),
    "zeros": lambda x: x + torch.zeros(x.shape),
    "ones": lambda x: x * torch.ones(x.shape),
    "new_full": lambda x: x * x.new_full((1,), 0.75),
    "new_zeros": lambda x: x + x.new_zeros(x.shape),
    "new_ones": lambda x: x - 0.5 * x.new_ones(x.shape),
    "scalar_tensor": lambda x: x * torch.scalar_tensor(0.6),
}

BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - 0.7 * y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / positive(y),
    "remainder": lambda x, y: torch.where(torch.remainder(x + 0.0173, positive(y)) < 0.2127, x, y),
    "fmod": lambda x, y: torch.where(torch.fmod(x + 0.0173, positive(y)) < 0.2111, x, y),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "max.other": lambda x, y: torch.max(x, y),
    "min.other": lambda x, y: torch.min(x, y),
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "copysign": lambda x, y: torch.copysign(x, y + 0.3133),
    "atan2": lambda x, y: torch.atan2(x, positive(y)),
    "hypot": lambda x, y: torch.hypot(x, positive(y)),
    "xlogy": lambda x, y: torch.xlogy(x, positive(y)),
    "pow": lambda x, y: torch.pow(positive(x), unit(y)),
    "lerp": lambda x, y: torch.lerp(x, y + 0 * x, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, positive(y), value=0.5),
    "where": lambda x, y: torch.where(x > 0.2911, y, x),
    "lt": lambda x, y: x * (x + 0.1031 < y) + y * (y.square() >= x + 0.3019),
    "gt": lambda x, y: torch.where(torch.gt(x, y + 0.1307) & torch.le(y, 0.77), x, 0.4),
    "rowwise": lambda x, y: x * torch.softmax(y, -1) if y.dim() else x,
    "stack": lambda x, y: torch.stack([x + 0 * y, y + 0 * x], -1).amax(-1),
    "expand_as": lambda x, y: x + y.expand_as(x + y),
    "broadcast_to": lambda x, y: torch.broadcast_to(y, (x + y).shape) - x,
    "max_python": lambda x, y: torch.clamp(x, min=y),
}

REDUCE: dict[str, Callable[[torch.Tensor, Any, bool], torch.Tensor]] = {
    "sum": lambda x, d, k: 0.3 * x.sum(d, k),
    "mean": lambda x, d, k: x.mean(d, k),
    "amax": lambda x, d, k: x.amax(d, k),
    "amin": lambda x, d, k: x.amin(d, k),
    "var": lambda x, d, k: x.var(d, correction=0, keepdim=k),
    "std": lambda x, d, k: torch.sqrt(x.var(d, correction=0, keepdim=k) + 0.1) + (x + 1).std(d, False, k),
    "std1": lambda x, d, k: torch.nan_to_num(x.std(d, keepdim=k), 0.5),
    "logsumexp": lambda x, d, k: torch.logsumexp(x, d, k),
    "norm": lambda x, d, k: torch.linalg.vector_norm(x, 2, d, k),
    "norm1": lambda x, d, k: 0.2 * torch.linalg.vector_norm(x, 1, d, k),
    "norminf": lambda x, d, k: torch.linalg.vector_norm(x, float("inf"), d, k),
    "norm-inf": lambda x, d, k: torch.linalg.vector_norm(x, float("-inf"), d, k),
    "any": lambda x, d, k: (x > 0.637).any(d, k).float() + x.mean(d, k),
    "all": lambda x, d, k: (x > -0.638).all(d, k).float() + x.mean(d, k),
    "count": lambda x, d, k: 0.1093 * (x > 0.232).sum(d, k, dtype=torch.float32),
    "share": lambda x, d, k: (x > 0.232).float().mean(d, k),
    "integer_max": lambda x, d, k: (5 * x + 0.3251).floor().int().amax(d, k).float(),
}

REDUCE_ONE: dict[str, Callable[[torch.Tensor, int, bool], torch.Tensor]] = {
    "prod": lambda x, d, k: torch.prod(1 + 0.1 * unit(x), d, k),
    "max": lambda x, d, k: x.max(d, k).values,
    "min": lambda x, d, k: x.min(d, k)[0],
}

REDUCE_ALL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: 0.1 * x.sum(),
    "mean": torch.mean,
    "max": torch.max,
    "min": torch.min,
    "std": lambda x: x.std(correction=0),
    "norm": lambda x: 0.2 * x.norm(),
    "any": lambda x: (x > 0.748).any().float() + x.mean(),
    "all": lambda x: (x > -0.951).all().float() + x.mean(),
}

ALONG: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "softmax": lambda x, d: torch.softmax(2 * x, d),
    "_softmax": lambda x, d: A._softmax(2 * x, d, False),
    "log_softmax": lambda x, d: 0.5 * torch.log_softmax(x, d),
    "_log_softmax": lambda x, d: 0.5 * A._log_softmax(x, d, False),
    "cumsum": lambda x, d: 0.3 * x.cumsum(d),
    "cumsum_of_bools": lambda x, d: 0.1093 * (x > 0.236).cumsum(d).float(),
    "cumprod": lambda x, d: torch.cumprod(1 + 0.1 * unit(x), d),
    "logcumsumexp": lambda x, d: torch.logcumsumexp(x, d),
    "subtract_mean": lambda x, d: x - x.mean(d, keepdim=True),
}

WITHIN: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sort": lambda x, d: x.sort(d, descending=True).values,
    "topk": lambda x, d: x.topk(max(1, x.shape[d] // 2), d).values,
    "kthvalue": lambda x, d: x.kthvalue(1 + x.shape[d] // 2, d).values,
    "median": lambda x, d: x.contiguous().median(d, keepdim=True).values,
    "argmax": lambda x, d: x.gather(d, x.argmax(d, keepdim=True)),
    "argmin": lambda x, d: x.gather(d, x.argmin(d, keepdim=True)),
    "gather": lambda x, d: x.gather(d, x.topk(max(1, x.shape[d] - 1), d).indices),
    "flip": lambda x, d: x.flip(d) - 0.3 * x,
    "cummax": lambda x, d: x.cummax(d).values,
    "cummin": lambda x, d: x.cummin(d)[0],
    "select": lambda x, d: x.select(d, -1),
    "narrow": lambda x, d: x.narrow(d, x.shape[d] // 2, x.shape[d] - x.shape[d] // 2),
    "slice": lambda x, d: x.movedim(d, 0)[: (x.shape[d] + 1) // 2],
    "slice_step": lambda x, d: x.movedim(d, -1)[..., ::2],
    "index_select": lambda x, d: x.index_select(d, torch.tensor([x.shape[d] - 1, 0])),
    "index": lambda x, d: x.movedim(d, 0)[[0, x.shape[d] - 1, 0]],
    "split": lambda x, d: sum(0.5 * part.sum(d) for part in x.split(2, d)),
    "split_sizes": lambda x, d: x.split([1, x.shape[d] - 1], d)[0],
    "chunk": lambda x, d: x.chunk(2, d)[0],
    "unbind": lambda x, d: x.unbind(d)[-1],
    "unflatten": lambda x, d: x.unflatten(d, (1, x.shape[d])),
    "unflatten_view": lambda x, d: x.unflatten(d, (x.shape[d], 1)).flatten(d, d + 1) * 0.9,
    "arange": lambda x, d: x * (0.1 * torch.arange(x.shape[d]).reshape([-1] + [1] * (x.dim() - 1 - d)) + 0.5),
    "computed_index": lambda x, d: x.movedim(d, 0)[torch.where(x.mean() > 0.0380, x.shape[d] - 1, 0)[None]],
}
