"""Masks over a part of an axis."""

from kvsieve.compat.vortex.cache.base import CacheOp
from kvsieve.compat.vortex.core import ops


class MaskSlice(ops.Mask, CacheOp):
    """``alpha`` at ``[start, end)`` of ``dim``, ``beta`` elsewhere, in the shape of the operand."""
