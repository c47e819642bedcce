"""Elementwise ops of two operands, whose inner shapes broadcast."""

from kvsieve.compat.vortex.cache.base import CacheOp
from kvsieve.compat.vortex.core import catalogue


class Maximum(catalogue.Maximum, CacheOp): ...


class Minimum(catalogue.Minimum, CacheOp): ...


class Add(catalogue.Add, CacheOp): ...


class Multiply(catalogue.Multiply, CacheOp): ...


class WhereEqual(catalogue.WhereEqual, CacheOp): ...


class WhereNotEqual(catalogue.WhereNotEqual, CacheOp): ...


class WhereGreater(catalogue.WhereGreater, CacheOp): ...


class WhereGreaterEqual(catalogue.WhereGreaterEqual, CacheOp): ...


class WhereLess(catalogue.WhereLess, CacheOp): ...


class WhereLessEqual(catalogue.WhereLessEqual, CacheOp): ...
