"""Another shape for a page's elements."""

from kvsieve.compat.vortex.cache.base import CacheOp
from kvsieve.compat.vortex.core import ops


class Reshape(ops.Reshaped, CacheOp):
    """``Reshape(-1, D0, D1)``: row-major, any sizes."""
