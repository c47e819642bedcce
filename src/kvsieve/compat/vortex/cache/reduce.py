"""Reductions of a page along axis 1 (its tokens) or 2."""

from kvsieve.compat.vortex.cache.base import CacheOp
from kvsieve.compat.vortex.core import ops
from kvsieve.compat.vortex.utils import ReduceType


class Reduce(ops.Reduce, CacheOp):
    """``[L, D0, D1]`` -> ``[L, 1, D1]`` (dim 1) or ``[L, D0, 1]`` (dim 2)."""


class Mean(Reduce):
    """Arithmetic mean."""

    reduce_type = ReduceType.Mean


class Max(Reduce):
    """Largest value."""

    reduce_type = ReduceType.Max


class Min(Reduce):
    """Smallest value."""

    reduce_type = ReduceType.Min


class L2Norm(Reduce):
    """Euclidean norm, ``sqrt(sum(x**2))``."""

    reduce_type = ReduceType.L2Norm


class Sum(Reduce):
    """Sum."""

    reduce_type = ReduceType.Sum
