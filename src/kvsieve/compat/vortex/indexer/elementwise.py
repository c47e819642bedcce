"""Elementwise ops of one operand."""

from kvsieve.compat.vortex.core import catalogue
from kvsieve.compat.vortex.indexer.base import IndexerOp


class Relu(catalogue.Relu, IndexerOp): ...


class Sigmoid(catalogue.Sigmoid, IndexerOp): ...


class Silu(catalogue.Silu, IndexerOp): ...


class Add_Mul(catalogue.Add_Mul, IndexerOp): ...


class Abs(catalogue.Abs, IndexerOp): ...


class Log(catalogue.Log, IndexerOp): ...


class Exp(catalogue.Exp, IndexerOp): ...
