"""Elementwise ops of one operand."""

from kvsieve.compat.vortex.cache.base import CacheOp
from kvsieve.compat.vortex.core import ops
from kvsieve.compat.vortex.utils import ElementwiseOpType


class Relu(ops.Elementwise, CacheOp):
    """``x`` where ``x >= alpha``, else ``beta``."""

    op_type = ElementwiseOpType.Relu


class Sigmoid(ops.Elementwise, CacheOp):
    """``1 / (1 + exp(beta * x + alpha))``. With the defaults it is 1/2 everywhere; the usual one has ``beta=-1``."""

    op_type = ElementwiseOpType.Sigmoid


class Silu(ops.Elementwise, CacheOp):
    """``x / (1 + exp(beta * x + alpha))``. With the defaults it is x / 2; the usual one has ``beta=-1``."""

    op_type = ElementwiseOpType.Silu


class Add_Mul(ops.Linear, CacheOp):
    """``beta * x + alpha``."""

    op_type = ElementwiseOpType.Add_Mul


class Abs(ops.Linear, CacheOp):
    """``|beta * x + alpha|``."""

    op_type = ElementwiseOpType.Abs


class Log(ops.Linear, CacheOp):
    """``log(beta * x + alpha)``."""

    op_type = ElementwiseOpType.Log


class Exp(ops.Linear, CacheOp):
    """``exp(beta * x + alpha)``."""

    op_type = ElementwiseOpType.Exp
