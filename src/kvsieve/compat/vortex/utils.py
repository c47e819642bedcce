"""Modes, op types and the sentinel of fields that were never set."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final


class Mode(Enum):
    """What calling an op does: check and allocate, or compute."""

    profile = 0
    execute = 1


class ReduceType(Enum):
    """Reductions along one axis."""

    Mean = 0
    Max = 1
    Min = 2
    L2Norm = 3
    Sum = 4


class ElementwiseOpType(Enum):
    """Elementwise functions of one operand, with numbers alpha and beta."""

    Relu = 0
    Sigmoid = 1
    Silu = 2
    Abs = 3
    Add_Mul = 4
    Log = 5
    Exp = 6


class ElementwiseBinaryOpType(Enum):
    """Elementwise functions of two operands, with numbers alpha and beta."""

    Maximum = 0
    Minimum = 1
    Add = 2
    Mul = 3
    WhereEqual = 4
    WhereNotEqual = 5
    WhereGreater = 6
    WhereGreaterEqual = 7
    WhereLess = 8
    WhereLessEqual = 9


class Schedule(Enum):
    """How vortex_torch's compiler runs an op: fused per work item, or on its own. Nothing here depends on it."""

    W = 0
    S = 1


class _Unset:
    """The only instance is :data:`UNSET`; it is false, and survives copies."""

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False

    def __copy__(self) -> _Unset:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Unset:
        return self


UNSET: Final = _Unset()
"""Value of a context field that nobody has set."""
