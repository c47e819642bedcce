"""Matrix products per page."""

from kvsieve.compat.vortex.core import ops
from kvsieve.compat.vortex.indexer.base import IndexerOp


class GeMM(ops.Matmul, IndexerOp):
    """``y @ x.T``: x [L, Nx, K], y [L, Ny, K] -> [S, Ny, Nx]."""


class GeMV(ops.MatmulVector, IndexerOp):
    """``y . x``: x [L, 1, K], y [L, 1, K] -> [S, 1, 1]."""
