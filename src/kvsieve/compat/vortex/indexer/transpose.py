"""Transposition of a page's inner axes."""

from kvsieve.compat.vortex.core import ops
from kvsieve.compat.vortex.indexer.base import IndexerOp


class Transpose(ops.Transposed, IndexerOp):
    """``[S, D0, D1] -> [S, D1, D0]``."""
