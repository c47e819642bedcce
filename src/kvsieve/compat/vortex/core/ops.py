"""Every op's arguments, result shape and row function; ``indexer`` and ``cache`` add how operands are found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from kvsieve.compat.vortex.core import maths
from kvsieve.compat.vortex.core.row_op import Inner, RowOp
from kvsieve.compat.vortex.utils import ElementwiseBinaryOpType, ElementwiseOpType, ReduceType


class Elementwise(RowOp):
    """One operand, numbers alpha and beta."""

    op_type: ClassVar[ElementwiseOpType]

    def __init__(self, alpha: float = 0.0, beta: float = 0.0) -> None:
        super().__init__()
        self.alpha, self.beta = self.real("alpha", alpha), self.real("beta", beta)

    def result_shape(self, *shapes: Inner) -> Inner:
        return shapes[0]

    def rows(self, *operands: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
        return maths.UNARY[self.op_type](operands[0], alpha, beta)


class Linear(Elementwise):
    """A function of ``beta * x + alpha``."""

    def __init__(self, alpha: float = 0.0, beta: float = 1.0) -> None:
        super().__init__(alpha, beta)


class ElementwiseBinary(RowOp):
    """Two operands that broadcast, numbers alpha and beta."""

    arity = 2
    op_type: ClassVar[ElementwiseBinaryOpType]

    def __init__(self, alpha: float = 1.0, beta: float = 1.0) -> None:
        super().__init__()
        self.alpha, self.beta = self.real("alpha", alpha), self.real("beta", beta)

    def result_shape(self, *shapes: Inner) -> Inner:
        return self.broadcast(*shapes)

    def rows(self, *operands: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
        x, y = operands
        return maths.BINARY[self.op_type](x, y, alpha, beta)


class Where(ElementwiseBinary):
    """0 where a predicate holds, about -1e30 elsewhere."""

    def __init__(self) -> None:
        super().__init__()


class Reduce(RowOp):
    """A reduction along axis 1 or 2 that keeps the axis; axis 0 only where a side says so."""

    reduce_type: ClassVar[ReduceType]
    dims: ClassVar[tuple[int, ...]] = (1, 2)

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        if dim not in self.dims:
            raise self.refuse(f"expected dim in {self.dims}, received {dim!r}", "dim counts the axes of [L, D0, D1]")
        self.dim = dim

    def result_shape(self, *shapes: Inner) -> Inner:
        rows, columns = shapes[0]
        return (1 if self.dim == 1 else rows), (1 if self.dim == 2 else columns)

    def rows(self, *operands: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
        return maths.REDUCE[self.reduce_type](operands[0], self.dim)


class Interleave(RowOp):
    """A reduction of every ``k`` consecutive elements of an axis: length n becomes n / k."""

    reduce_type: ClassVar[ReduceType]

    def __init__(self, dim: int = 1, k: int = 1) -> None:
        super().__init__()
        if dim not in (1, 2) or not isinstance(k, int) or k < 1:
            raise self.refuse(
                f"expected dim 1 or 2 and k >= 1, received {dim=} {k=}", "dim counts the axes of [L, D0, D1]"
            )
        self.dim, self.k = dim, k

    def result_shape(self, *shapes: Inner) -> Inner:
        inner = list(shapes[0])
        if inner[self.dim - 1] % self.k:
            problem = f"expected an axis {self.dim} divisible by k={self.k}, received inner shape {shapes[0]}"
            raise self.refuse(problem, "choose k so that it divides the axis, or refuse that page size in create_cache")
        inner[self.dim - 1] //= self.k
        return inner[0], inner[1]

    def rows(self, *operands: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
        groups = operands[0].unflatten(self.dim, (operands[0].shape[self.dim] // self.k, self.k))
        return maths.REDUCE[self.reduce_type](groups, self.dim + 1).squeeze(self.dim + 1)


class Matmul(RowOp):
    """``GeMM(x, y) = y @ x.T`` a row: x [Nx, K], y [Ny, K] -> [Ny, Nx]. The first operand is transposed."""

    arity = 2

    def result_shape(self, *shapes: Inner) -> Inner:
        x, y = shapes
        if x[1] != y[1]:
            problem = f"expected x [Nx, K] and y [Ny, K] with one K, received {x} and {y}"
            raise self.refuse(problem, "Transpose() one of them, or change the field's shape in create_cache")
        return y[0], x[0]

    def rows(self, *operands: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
        return maths.gemm(*operands)


class MatmulVector(Matmul):
    """``GeMV(x, y) = y . x``: x [1, K], y [1, K] -> [1, 1]."""

    def result_shape(self, *shapes: Inner) -> Inner:
        if shapes[0][0] != 1 or shapes[1][0] != 1:
            problem = f"expected x [1, K] and y [1, K], received {shapes[0]} and {shapes[1]}"
            raise self.refuse(problem, "GeMM takes more rows")
        return super().result_shape(*shapes)


class Transposed(RowOp):
    """``[D0, D1] -> [D1, D0]``."""

    def result_shape(self, *shapes: Inner) -> Inner:
        return shapes[0][1], shapes[0][0]

    def rows(self, *operands: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
        return operands[0].transpose(1, 2)


class Reshaped(RowOp):
    """``Reshape(-1, D0, D1)``: the elements of a row in another shape, row-major."""

    def __init__(self, *shape: int | Sequence[int]) -> None:
        super().__init__()
        sizes = [size for part in shape for size in ([part] if isinstance(part, int) else part)]
        if len(sizes) == 2:
            sizes = [-1, *sizes]
        if len(sizes) != 3 or sizes[0] != -1 or min(sizes[1:]) < 1:
            problem = f"expected (-1, D0, D1) with D0, D1 >= 1, received {tuple(sizes)}"
            raise self.refuse(problem, "only the shape of a row can change")
        self.shape: Inner = (sizes[1], sizes[2])

    def result_shape(self, *shapes: Inner) -> Inner:
        rows, columns = shapes[0]
        if rows * columns != self.shape[0] * self.shape[1]:
            problem = f"expected {self.shape[0] * self.shape[1]} elements a row, received {shapes[0]}"
            raise self.refuse(problem, f"choose sizes whose product is {rows * columns}")
        return self.shape

    def rows(self, *operands: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
        shaped: torch.Tensor = operands[0].flatten(1).unflatten(1, self.shape)
        return shaped


class Kronecker(RowOp):
    """Kronecker product along the listed axes (``dim`` = 1, 2 or (1, 2)); the other axis is broadcast."""

    arity = 2

    def __init__(self, dim: int | Sequence[int] = (1, 2)) -> None:
        super().__init__()
        dims = (dim,) if isinstance(dim, int) else tuple(dim)
        if not dims or not set(dims) <= {1, 2}:
            raise self.refuse(f"expected dim 1, 2 or (1, 2), received {dim!r}", "dim counts the axes of [L, D0, D1]")
        self.dim = dims

    def result_shape(self, *shapes: Inner) -> Inner:
        x, y = shapes
        product = tuple(a * b for a, b in zip(x, y, strict=True))
        common = self.broadcast(
            (1 if 1 in self.dim else x[0], 1 if 2 in self.dim else x[1]),
            (1 if 1 in self.dim else y[0], 1 if 2 in self.dim else y[1]),
        )
        return (product[0] if 1 in self.dim else common[0]), (product[1] if 2 in self.dim else common[1])

    def rows(self, *operands: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
        x, y = operands
        return maths.kron(x, y, self.dim)


class Mask(RowOp):
    """``alpha`` at ``[start, end)`` of an axis, ``beta`` elsewhere; the values of the operand are not read."""

    def __init__(self, start: int, end: int, dim: int = 2, alpha: float = 1.0, beta: float = 0.0) -> None:
        super().__init__()
        if dim not in (1, 2) or not 0 <= start <= end:
            problem = f"expected dim 1 or 2 and 0 <= start <= end, received {start=} {end=} {dim=}"
            raise self.refuse(problem, "dim counts the axes of [L, D0, D1]; start and end count from 0")
        self.start, self.end, self.dim = start, end, dim
        self.alpha, self.beta = self.real("alpha", alpha), self.real("beta", beta)

    def result_shape(self, *shapes: Inner) -> Inner:
        return shapes[0]

    def rows(self, *operands: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
        return maths.mask_slice(operands[0], self.start, self.end, self.dim, alpha, beta)


class Copy(RowOp):
    """The operand itself."""

    def result_shape(self, *shapes: Inner) -> Inner:
        return shapes[0]

    def rows(self, *operands: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
        return operands[0]
