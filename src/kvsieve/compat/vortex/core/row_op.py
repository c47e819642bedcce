"""What every op says of its rows: operands by name, numbers, the shape of a result, what to refuse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, SupportsFloat

import torch

from kvsieve.compat.vortex.core.errors import OpError

Inner = tuple[int, int]
"""Shape ``(D0, D1)`` of a row."""
NAMES = "x", "y"
"""What operands are called."""


class RowOp(ABC):
    """An op on rows. ``alpha`` and ``beta`` are plain attributes and may be changed at any time."""

    arity: ClassVar[int] = 1
    alpha: float = 0.0
    beta: float = 0.0

    @abstractmethod
    def result_shape(self, *shapes: Inner) -> Inner:
        """Shape of a result row.

        Raises:
            OpError: the operands' shapes do not fit.
        """

    @abstractmethod
    def rows(self, *operands: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
        """The result for operands ``[n, D0, D1]``; a leading axis of 1 is repeated."""

    def refuse(self, problem: str, remedy: str) -> OpError:
        """The error to raise."""
        return OpError(type(self).__name__, problem, remedy)

    def in_order(self, operands: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Positional operands, then those given as ``x=`` and ``y=``.

        Raises:
            OpError: another name, or one that a positional operand has.
        """
        names = NAMES[len(operands) : self.arity]
        unknown = sorted(named.keys() - set(names))
        if unknown:
            problem = f"expected operands named {' and '.join(NAMES[: self.arity])}, each once, received {unknown[0]}="
            raise self.refuse(problem, "pass operands in order and without names")
        return [*operands, *(named[name] for name in names if name in named)]

    def real(self, name: str, value: Any) -> Any:
        """A number, as it was given.

        Raises:
            OpError: it is none.
        """
        if isinstance(value, str) or not isinstance(value, SupportsFloat):
            raise self.refuse(f"expected a number {name}, received {value!r}", f"pass {name} as a float")
        return value

    def broadcast(self, x: Inner, y: Inner) -> Inner:
        """The common shape of two rows."""
        if any(a != b and 1 not in (a, b) for a, b in zip(x, y, strict=True)):
            problem = f"expected inner shapes that broadcast, received {x} and {y}"
            raise self.refuse(problem, "reduce, reshape or transpose one of them first")
        return max(x[0], y[0]), max(x[1], y[1])


def bf16(value: Any) -> float:
    """A number rounded to bfloat16, as kernels of vortex_torch hold alpha and beta."""
    return float(torch.tensor(float(value), dtype=torch.float32).to(torch.bfloat16))
