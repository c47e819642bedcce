"""What generated kernels call beside ``tl``: NaN-keeping extrema, scans, integer division, rounding; and the
elementary functions.
"""

# mypy: ignore-errors
# ruff: noqa: F401 (generated kernels find the imported names here)

from __future__ import annotations

import triton
import triton.language as tl

from kvsieve.backends.triton.elementary import (
    acos,
    acosh,
    asin,
    asinh,
    atan,
    atan2,
    atanh,
    copysign,
    cosh,
    erfc,
    exp,
    expm1,
    hypot,
    is_negative,
    log1p,
    log10,
    pow,
    sign,
    sinh,
    tan,
    tanh,
)
from kvsieve.backends.triton.launch import INTERPRETED

# Reductions and scans


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _less(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def log_add(a, b):
    """log(exp(a) + exp(b)); -inf where both are."""
    high = tl.maximum(a, b)
    finite = tl.where(high == float("-inf"), 0.0, high)
    return tl.log(exp(a - finite) + exp(b - finite)) + finite


@triton.jit
def prod(x, axis: tl.constexpr, keep: tl.constexpr = False):
    return tl.reduce(x, axis, _times, keep_dims=keep)


@triton.jit
def running_log_sum(x, axis: tl.constexpr):
    return tl.associative_scan(x, axis, log_add)


@triton.jit
def running_max(x, axis: tl.constexpr):
    return tl.associative_scan(x, axis, _greater)


@triton.jit
def running_min(x, axis: tl.constexpr):
    return tl.associative_scan(x, axis, _less)


if INTERPRETED:  # its own reductions are fast, those with a function of ours go element by element

    @triton.jit
    def max(x, axis: tl.constexpr, keep: tl.constexpr = False):
        strange = tl.sum((x != x).to(tl.int32), axis, keep_dims=keep) > 0
        return tl.where(strange, float("nan"), tl.max(tl.where(x != x, float("-inf"), x), axis, keep_dims=keep))

    @triton.jit
    def min(x, axis: tl.constexpr, keep: tl.constexpr = False):
        strange = tl.sum((x != x).to(tl.int32), axis, keep_dims=keep) > 0
        return tl.where(strange, float("nan"), tl.min(tl.where(x != x, float("inf"), x), axis, keep_dims=keep))

    @triton.jit
    def maximum(a, b):
        return tl.where((a != a) | (b != b), float("nan"), tl.maximum(a, b))

    @triton.jit
    def minimum(a, b):
        return tl.where((a != a) | (b != b), float("nan"), tl.minimum(a, b))

else:
    maximum, minimum = _greater, _less

    @triton.jit
    def max(x, axis: tl.constexpr, keep: tl.constexpr = False):
        return tl.reduce(x, axis, _greater, keep_dims=keep)

    @triton.jit
    def min(x, axis: tl.constexpr, keep: tl.constexpr = False):
        return tl.reduce(x, axis, _less, keep_dims=keep)


# Places


@triton.jit
def place_of(widths, share, PAGES: tl.constexpr, REQUESTS: tl.constexpr):
    """Request and chunk of pages of a program; ``share`` programs go to a chunk.

    With REQUESTS, a power of two that is not below their number, all chunks of all requests follow each other.
    """
    request = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0) // share
    if REQUESTS > 0:
        requests = tl.num_programs(1)
        one = tl.arange(0, REQUESTS)
        chunks = (tl.load(widths + one, mask=one < requests, other=0) + PAGES - 1) // PAGES
        upto = tl.cumsum(chunks, 0)
        place = request * (tl.num_programs(0) // share) + chunk
        behind = (upto <= place) & (one < requests - 1)  # a program too many is given to the last request
        request = tl.sum(behind.to(tl.int64), 0)
        chunk = (place - tl.max(tl.where(behind, upto, 0), 0)).to(tl.int32)
    return request, chunk


# Tensor cores


@triton.jit
def zeros_behind(x, SIZE: tl.constexpr):
    """Rows x [ROWS, N] and zeros up to SIZE, a multiple of N."""
    first = tl.arange(0, SIZE // x.shape[1])[None, :, None] == 0
    padded = tl.where(first, x[:, None, :], tl.zeros([x.shape[0], SIZE // x.shape[1], x.shape[1]], x.dtype))
    return tl.reshape(padded, [x.shape[0], SIZE])


@triton.jit
def in_parts(x, SLOTS: tl.constexpr, DOT: tl.constexpr):
    """Rows x [ROWS, N] of float32 as [SLOTS * ROWS, N] of a narrower dtype: parts that add up to x, then zeros."""
    first = x.to(DOT)
    rest = tl.where(tl.abs(x) == float("inf"), 0.0, x - first.to(tl.float32))
    second = rest.to(DOT)
    third = (rest - second.to(tl.float32)).to(DOT)
    slot = tl.arange(0, SLOTS)[:, None, None]
    parts = tl.where(slot == 2, third[None, :, :], tl.zeros([SLOTS, x.shape[0], x.shape[1]], DOT))
    parts = tl.where(slot == 1, second[None, :, :], parts)
    parts = tl.where(slot == 0, first[None, :, :], parts)
    return tl.reshape(parts, [SLOTS * x.shape[0], x.shape[1]])


# Tokens


@triton.jit
def store_tokens(tokens, page, block, there, head, P: tl.constexpr, D: tl.constexpr, DV: tl.constexpr):
    """Store the new tokens of some requests and heads in their blocks; whether they end their pages.

    ``tokens``: offsets in the pages, new K and V, stored K and V, and the strides of these.
    """
    offsets, k, v, k_pool, v_pool, k_t, k_h, k_d, v_t, v_h, v_d, kp_h, kp_b, kp_t, vp_h, vp_b, vp_t = tokens
    offset = tl.load(offsets + page, mask=there, other=0)
    _store_rows(k, k_pool, k_t, k_h, k_d, kp_h, kp_b, kp_t, page, block, offset, there, head, D)
    _store_rows(v, v_pool, v_t, v_h, v_d, vp_h, vp_b, vp_t, page, block, offset, there, head, DV)
    tl.debug_barrier()  # pages are read by other threads than those that store their last tokens
    return there & (offset == P - 1)


@triton.jit
def _store_rows(new, stored, n_t, n_h, n_d, s_h, s_b, s_t, page, block, offset, there, head, D: tl.constexpr):
    d = tl.arange(0, triton.next_power_of_2(D)).to(tl.int64)[None, None, :]  # features may lie far apart
    mask = there[:, None, None] & (d < D)
    row = head[None, :, None]
    token = page.to(tl.int64)[:, None, None]
    values = tl.load(new + token * n_t + row * n_h + d * n_d, mask=mask, other=0.0)
    tl.store(stored + row * s_h + (block * s_b + offset * s_t)[:, None, None] + d, values, mask=mask)


# Integers


@triton.jit
def floor_div(a, b):
    """Integers, rounded down; any number where b is 0."""
    b = tl.where(b == 0, 1, b)
    quotient = a // b
    return tl.where((a - quotient * b != 0) & ((a < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def trunc_div(a, b):
    """Integers, rounded toward 0; any number where b is 0."""
    return a // tl.where(b == 0, 1, b)


@triton.jit
def int_remainder(a, b):
    """Integers; the sign is b's."""
    b = tl.where(b == 0, 1, b)
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def int_fmod(a, b):
    """Integers; the sign is a's."""
    return a % tl.where(b == 0, 1, b)


@triton.jit
def int_pow(a, n: tl.constexpr):
    """The product of n factors."""
    result = a * 0 + 1
    for _ in tl.static_range(n):
        result = result * a
    return result


# Floats by tl alone


@triton.jit
def trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round(x):
    """Half to even."""
    down = tl.floor(x)
    rest = x - down
    odd = down - 2 * tl.floor(down * 0.5)
    return tl.where((rest > 0.5) | ((rest == 0.5) & (odd == 1.0)), down + 1.0, down)


@triton.jit
def fmod(a, b):
    """The sign is a's."""
    return a - trunc(a / b) * b


@triton.jit
def remainder(a, b):
    """The sign is b's."""
    rest = a - trunc(a / b) * b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def xlogy(a, b):
    """a log(b), 0 where a is 0; NaN of b stays."""
    return tl.where(a == 0, tl.where(b != b, b, 0.0), a * tl.log(b))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))
