"""Elementwise ops of two operands, whose inner shapes broadcast."""

from kvsieve.compat.vortex.core import ops
from kvsieve.compat.vortex.indexer.base import IndexerOp
from kvsieve.compat.vortex.utils import ElementwiseBinaryOpType as Kind


class Maximum(ops.ElementwiseBinary, IndexerOp):
    """``max(x, y)``; alpha and beta have no effect."""

    op_type = Kind.Maximum


class Minimum(ops.ElementwiseBinary, IndexerOp):
    """``min(x, y)``; alpha and beta have no effect."""

    op_type = Kind.Minimum


class Add(ops.ElementwiseBinary, IndexerOp):
    """``alpha * x + beta * y``."""

    op_type = Kind.Add


class Multiply(ops.ElementwiseBinary, IndexerOp):
    """``x * y``; alpha and beta have no effect."""

    op_type = Kind.Mul


class WhereEqual(ops.Where, IndexerOp):
    """0 where ``x == y``, else about -1e30."""

    op_type = Kind.WhereEqual


class WhereNotEqual(ops.Where, IndexerOp):
    """0 where ``x != y``, else about -1e30."""

    op_type = Kind.WhereNotEqual


class WhereGreater(ops.Where, IndexerOp):
    """0 where ``x > y``, else about -1e30."""

    op_type = Kind.WhereGreater


class WhereGreaterEqual(ops.Where, IndexerOp):
    """0 where ``x >= y``, else about -1e30."""

    op_type = Kind.WhereGreaterEqual


class WhereLess(ops.Where, IndexerOp):
    """0 where ``x < y``, else about -1e30."""

    op_type = Kind.WhereLess


class WhereLessEqual(ops.Where, IndexerOp):
    """0 where ``x <= y``, else about -1e30."""

    op_type = Kind.WhereLessEqual
