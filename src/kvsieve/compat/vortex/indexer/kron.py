"""Kronecker products."""

from kvsieve.compat.vortex.core import ops
from kvsieve.compat.vortex.indexer.base import IndexerOp


class Kron(ops.Kronecker, IndexerOp):
    """x [S, a0, a1] and y [S, b0, b1] -> [S, a0 * b0, a1 * b1], or along one axis only, the other broadcast."""
