"""Masks over a part of an axis."""

from kvsieve.compat.vortex.core import ops
from kvsieve.compat.vortex.indexer.base import IndexerOp


class MaskSlice(ops.Mask, IndexerOp):
    """``alpha`` at ``[start, end)`` of ``dim``, ``beta`` elsewhere, in the shape of the operand."""
