"""Elementary functions of float32 tiles.

On a GPU they are CUDA's libdevice: ``tl.exp`` rounds ``x * log2(e)`` before the hardware's exp2, which costs ``|x| u``.
Triton's interpreter has no libdevice: there they are written in ``tl``, good to a few units in the last place.
"""

# mypy: ignore-errors
# ruff: noqa: F401 (kernels find the imported names here)

from __future__ import annotations

import triton
import triton.language as tl

from kvsieve.backends.triton.launch import INTERPRETED


@triton.jit
def sign(x):
    """-1, 0 or 1; NaN stays."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x * 0.0))


@triton.jit
def is_negative(x):
    """The sign bit: -0 has it, too."""
    return x.to(tl.int32, bitcast=True) < 0


@triton.jit
def copysign(a, b):
    size = tl.abs(a)
    return tl.where(is_negative(b), -size, size)


if INTERPRETED:

    @triton.jit
    def exp(x):
        return tl.exp(x)

    @triton.jit
    def log1p(x):
        u = 1.0 + x
        return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))

    @triton.jit
    def expm1(x):
        u = exp(x)
        low = u - 1.0
        by_log = low * (x / tl.where(u == 1.0, 1.0, tl.log(u)))
        return tl.where(u == 1.0, x, tl.where(low == -1.0, -1.0, tl.where(u == float("inf"), u, by_log)))

    @triton.jit
    def sinh(x):
        e = expm1(tl.abs(x))
        return sign(x) * 0.5 * (e + e / (e + 1.0))

    @triton.jit
    def cosh(x):
        e = exp(tl.abs(x))
        return 0.5 * (e + 1.0 / e)

    @triton.jit
    def tanh(x):
        e = expm1(-2.0 * tl.abs(x))
        return sign(x) * (-e / (e + 2.0))

    @triton.jit
    def tan(x):
        return tl.sin(x) / tl.cos(x)

    @triton.jit
    def asinh(x):
        size = tl.abs(x)
        square = size * size
        return sign(x) * log1p(size + square / (1.0 + tl.sqrt(1.0 + square)))

    @triton.jit
    def acosh(x):
        return log1p(x - 1.0 + tl.sqrt((x - 1.0) * (x + 1.0)))

    @triton.jit
    def atanh(x):
        return 0.5 * log1p(2.0 * x / (1.0 - x))

    @triton.jit
    def atan(x):
        """Cephes' atanf: reduction to |y| <= tan(pi / 8), then an odd polynomial."""
        size = tl.abs(x)
        big, middle = size > 2.414213562373095, size > 0.4142135623730950
        y = tl.where(big, -1.0 / tl.where(big, size, 1.0), tl.where(middle, (size - 1.0) / (size + 1.0), size))
        base = tl.where(big, 1.5707963267948966, tl.where(middle, 0.7853981633974483, 0.0))
        z = y * y
        p = (((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1) * z * y + y
        return copysign(base + p, x)

    @triton.jit
    def asin(x):
        return atan(x / tl.sqrt((1.0 - x) * (1.0 + x)))

    @triton.jit
    def acos(x):
        return 2.0 * atan(tl.sqrt((1.0 - x) / (1.0 + x)))

    @triton.jit
    def atan2(a, b):
        angle = atan(tl.abs(a) / tl.abs(b))
        angle = tl.where((a == 0) & (b == 0), 0.0, angle)
        angle = tl.where(is_negative(b), 3.141592653589793 - angle, angle)
        return copysign(angle, a)

    @triton.jit
    def hypot(a, b):
        high, low = tl.maximum(tl.abs(a), tl.abs(b)), tl.minimum(tl.abs(a), tl.abs(b))
        ratio = low / tl.where(high == 0, 1.0, high)
        return high * tl.sqrt(1.0 + ratio * ratio)

    @triton.jit
    def erfc(x):
        return 1.0 - tl.erf(x)

    @triton.jit
    def log10(x):
        return tl.log(x) * 0.4342944819032518

    @triton.jit
    def pow(a, b):
        whole = tl.floor(b) == b
        odd = b - 2.0 * tl.floor(b * 0.5) == 1.0
        size = tl.exp2(b * tl.log2(tl.abs(a)))
        signed = tl.where(a < 0, tl.where(whole, tl.where(odd, -size, size), float("nan")), size)
        return tl.where((b == 0) | (a == 1), 1.0, signed)

else:
    from triton.language.extra.cuda.libdevice import (
        acos,
        acosh,
        asin,
        asinh,
        atan,
        atan2,
        atanh,
        cosh,
        erfc,
        exp,
        expm1,
        hypot,
        log1p,
        log10,
        pow,
        sinh,
        tan,
        tanh,
    )
