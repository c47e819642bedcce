"""Reductions of every k consecutive elements: summaries of parts of a page."""

from kvsieve.compat.vortex.cache.base import CacheOp
from kvsieve.compat.vortex.core import ops
from kvsieve.compat.vortex.utils import ReduceType


class MeanInterleave(ops.Interleave, CacheOp):
    """Arithmetic mean."""

    reduce_type = ReduceType.Mean


class MaxInterleave(ops.Interleave, CacheOp):
    """Largest value."""

    reduce_type = ReduceType.Max


class MinInterleave(ops.Interleave, CacheOp):
    """Smallest value."""

    reduce_type = ReduceType.Min


class L2NormInterleave(ops.Interleave, CacheOp):
    """Euclidean norm."""

    reduce_type = ReduceType.L2Norm
