"""Another shape for a page's elements."""

from kvsieve.compat.vortex.core import ops
from kvsieve.compat.vortex.indexer.base import IndexerOp


class Reshape(ops.Reshaped, IndexerOp):
    """``Reshape(-1, D0, D1)``: row-major, any sizes."""
