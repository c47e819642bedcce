"""The ops that both sides have: name, meaning and type, once. A side says how operands are found."""

from __future__ import annotations

from kvsieve.compat.vortex.core.ops import Elementwise, ElementwiseBinary, Linear, Reduce, Where
from kvsieve.compat.vortex.utils import ElementwiseBinaryOpType, ElementwiseOpType, ReduceType


class Relu(Elementwise):
    """``x`` where ``x >= alpha``, else ``beta``."""

    op_type = ElementwiseOpType.Relu


class Sigmoid(Elementwise):
    """``1 / (1 + exp(beta * x + alpha))``. With the defaults it is 1/2 everywhere; the usual one has ``beta=-1``."""

    op_type = ElementwiseOpType.Sigmoid


class Silu(Elementwise):
    """``x / (1 + exp(beta * x + alpha))``. With the defaults it is x / 2; the usual one has ``beta=-1``."""

    op_type = ElementwiseOpType.Silu


class Add_Mul(Linear):
    """``beta * x + alpha``."""

    op_type = ElementwiseOpType.Add_Mul


class Abs(Linear):
    """``|beta * x + alpha|``."""

    op_type = ElementwiseOpType.Abs


class Log(Linear):
    """``log(beta * x + alpha)``."""

    op_type = ElementwiseOpType.Log


class Exp(Linear):
    """``exp(beta * x + alpha)``."""

    op_type = ElementwiseOpType.Exp


class Maximum(ElementwiseBinary):
    """``max(x, y)``; alpha and beta have no effect."""

    op_type = ElementwiseBinaryOpType.Maximum


class Minimum(ElementwiseBinary):
    """``min(x, y)``; alpha and beta have no effect."""

    op_type = ElementwiseBinaryOpType.Minimum


class Add(ElementwiseBinary):
    """``alpha * x + beta * y``."""

    op_type = ElementwiseBinaryOpType.Add


class Multiply(ElementwiseBinary):
    """``x * y``; alpha and beta have no effect."""

    op_type = ElementwiseBinaryOpType.Mul


class WhereEqual(Where):
    """0 where ``x == y``, else about -1e30."""

    op_type = ElementwiseBinaryOpType.WhereEqual


class WhereNotEqual(Where):
    """0 where ``x != y``, else about -1e30."""

    op_type = ElementwiseBinaryOpType.WhereNotEqual


class WhereGreater(Where):
    """0 where ``x > y``, else about -1e30."""

    op_type = ElementwiseBinaryOpType.WhereGreater


class WhereGreaterEqual(Where):
    """0 where ``x >= y``, else about -1e30."""

    op_type = ElementwiseBinaryOpType.WhereGreaterEqual


class WhereLess(Where):
    """0 where ``x < y``, else about -1e30."""

    op_type = ElementwiseBinaryOpType.WhereLess


class WhereLessEqual(Where):
    """0 where ``x <= y``, else about -1e30."""

    op_type = ElementwiseBinaryOpType.WhereLessEqual


class Mean(Reduce):
    """Arithmetic mean."""

    reduce_type = ReduceType.Mean


class Max(Reduce):
    """Largest value."""

    reduce_type = ReduceType.Max


class Min(Reduce):
    """Smallest value."""

    reduce_type = ReduceType.Min


class Sum(Reduce):
    """Sum."""

    reduce_type = ReduceType.Sum


class L2Norm(Reduce):
    """Euclidean norm, ``sqrt(sum(x**2))``."""

    reduce_type = ReduceType.L2Norm
