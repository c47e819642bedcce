"""Reductions of a page along axis 1 (its tokens), ``[L, D0, D1] -> [L, 1, D1]``, or 2, ``-> [L, D0, 1]``."""

from kvsieve.compat.vortex.cache.base import CacheOp
from kvsieve.compat.vortex.core import catalogue


class Mean(catalogue.Mean, CacheOp): ...


class Max(catalogue.Max, CacheOp): ...


class Min(catalogue.Min, CacheOp): ...


class Sum(catalogue.Sum, CacheOp): ...


class L2Norm(catalogue.L2Norm, CacheOp): ...
