"""Elementwise ops of two operands, whose inner shapes broadcast."""

from kvsieve.compat.vortex.core import catalogue
from kvsieve.compat.vortex.indexer.base import IndexerOp


class Maximum(catalogue.Maximum, IndexerOp): ...


class Minimum(catalogue.Minimum, IndexerOp): ...


class Add(catalogue.Add, IndexerOp): ...


class Multiply(catalogue.Multiply, IndexerOp): ...


class WhereEqual(catalogue.WhereEqual, IndexerOp): ...


class WhereNotEqual(catalogue.WhereNotEqual, IndexerOp): ...


class WhereGreater(catalogue.WhereGreater, IndexerOp): ...


class WhereGreaterEqual(catalogue.WhereGreaterEqual, IndexerOp): ...


class WhereLess(catalogue.WhereLess, IndexerOp): ...


class WhereLessEqual(catalogue.WhereLessEqual, IndexerOp): ...
