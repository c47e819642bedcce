"""Elementwise ops of one operand."""

from kvsieve.compat.vortex.cache.base import CacheOp
from kvsieve.compat.vortex.core import catalogue


class Relu(catalogue.Relu, CacheOp): ...


class Sigmoid(catalogue.Sigmoid, CacheOp): ...


class Silu(catalogue.Silu, CacheOp): ...


class Add_Mul(catalogue.Add_Mul, CacheOp): ...


class Abs(catalogue.Abs, CacheOp): ...


class Log(catalogue.Log, CacheOp): ...


class Exp(catalogue.Exp, CacheOp): ...
