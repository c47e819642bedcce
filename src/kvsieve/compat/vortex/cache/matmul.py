"""Matrix products per page."""

from kvsieve.compat.vortex.cache.base import CacheOp
from kvsieve.compat.vortex.core import ops


class GeMM(ops.Matmul, CacheOp):
    """``y @ x.T``: x [L, Nx, K], y [L, Ny, K] -> [L, Ny, Nx]."""
