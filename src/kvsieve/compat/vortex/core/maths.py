"""The op set as functions of rows ``[n, D0, D1]``: one table for the indexer, the cache side and the bridge.

Everything is computed in the dtype of the operands; rounding and storage are the callers' business.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvsieve.compat.vortex.utils import ElementwiseBinaryOpType, ElementwiseOpType, ReduceType

HIDDEN = -1e30
"""What the ``Where`` ops give where their predicate does not hold: an additive mask."""
SMALLEST_NORM = 1e-12

Unary = Callable[[torch.Tensor, float, float], torch.Tensor]
Binary = Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]
Reduction = Callable[[torch.Tensor, int], torch.Tensor]


def relu(x: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    """``x`` where ``x >= alpha``, else ``beta``."""
    return torch.where(x >= alpha, x, torch.full_like(x, beta))


def sigmoid(x: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    """``1 / (1 + exp(beta * x + alpha))``: the usual sigmoid at beta -1, the constant 1/2 at beta 0."""
    return torch.sigmoid(-(beta * x + alpha))


def silu(x: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    """``x / (1 + exp(beta * x + alpha))``."""
    return x * torch.sigmoid(-(beta * x + alpha))


def _where(predicate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Binary:
    def mask(x: torch.Tensor, y: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
        return torch.where(predicate(x, y), torch.zeros_like(x), torch.full_like(x, HIDDEN))

    return mask


UNARY: dict[ElementwiseOpType, Unary] = {
    ElementwiseOpType.Relu: relu,
    ElementwiseOpType.Sigmoid: sigmoid,
    ElementwiseOpType.Silu: silu,
    ElementwiseOpType.Abs: lambda x, alpha, beta: torch.abs(beta * x + alpha),
    ElementwiseOpType.Add_Mul: lambda x, alpha, beta: beta * x + alpha,
    ElementwiseOpType.Log: lambda x, alpha, beta: torch.log(beta * x + alpha),
    ElementwiseOpType.Exp: lambda x, alpha, beta: torch.exp(beta * x + alpha),
}

BINARY: dict[ElementwiseBinaryOpType, Binary] = {
    ElementwiseBinaryOpType.Maximum: lambda x, y, alpha, beta: torch.maximum(x, y),
    ElementwiseBinaryOpType.Minimum: lambda x, y, alpha, beta: torch.minimum(x, y),
    ElementwiseBinaryOpType.Add: lambda x, y, alpha, beta: alpha * x + beta * y,
    ElementwiseBinaryOpType.Mul: lambda x, y, alpha, beta: x * y,
    ElementwiseBinaryOpType.WhereEqual: _where(torch.eq),
    ElementwiseBinaryOpType.WhereNotEqual: _where(torch.ne),
    ElementwiseBinaryOpType.WhereGreater: _where(torch.gt),
    ElementwiseBinaryOpType.WhereGreaterEqual: _where(torch.ge),
    ElementwiseBinaryOpType.WhereLess: _where(torch.lt),
    ElementwiseBinaryOpType.WhereLessEqual: _where(torch.le),
}

REDUCE: dict[ReduceType, Reduction] = {
    ReduceType.Mean: lambda x, dim: x.mean(dim, keepdim=True),
    ReduceType.Max: lambda x, dim: x.amax(dim, keepdim=True),
    ReduceType.Min: lambda x, dim: x.amin(dim, keepdim=True),
    ReduceType.L2Norm: lambda x, dim: torch.sqrt((x * x).sum(dim, keepdim=True)),  # sum adds pairwise, norm does not
    ReduceType.Sum: lambda x, dim: x.sum(dim, keepdim=True),
}

IDENTITY: dict[ReduceType, float] = {
    ReduceType.Mean: 0.0,
    ReduceType.Max: -torch.inf,
    ReduceType.Min: torch.inf,
    ReduceType.L2Norm: 0.0,
    ReduceType.Sum: 0.0,
}
"""What a reduction must see in place of values that are not there."""


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over axis 0, for every element of a row by itself.

    The axis is moved last first: along a strided axis torch adds up one value after the other.
    """
    return torch.softmax(x.movedim(0, -1), -1).movedim(-1, 0)


def normalize(x: torch.Tensor) -> torch.Tensor:
    """``x / max(|x|, 1e-12)`` with the Euclidean norm over axis 0, for every element of a row by itself."""
    squares = (x * x).movedim(0, -1).sum(-1)
    return x / torch.clamp(torch.sqrt(squares), min=SMALLEST_NORM)


def gemm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``y @ x.T`` a row: x [n, Nx, K], y [n, Ny, K] -> [n, Ny, Nx]; a leading 1 is repeated."""
    return torch.matmul(y, x.transpose(1, 2))


def kron(x: torch.Tensor, y: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Kronecker product along ``dims`` (1, 2 or both); the other axis is broadcast."""
    x, y = (x.unsqueeze(2), y.unsqueeze(1)) if 1 in dims else (x.unsqueeze(1), y.unsqueeze(1))
    x, y = (x.unsqueeze(4), y.unsqueeze(3)) if 2 in dims else (x.unsqueeze(3), y.unsqueeze(3))
    return (x * y).flatten(3, 4).flatten(1, 2)


def mask_slice(x: torch.Tensor, start: int, end: int, dim: int, alpha: float, beta: float) -> torch.Tensor:
    """A tensor like ``x`` that is ``alpha`` at ``[start, end)`` of ``dim`` and ``beta`` elsewhere."""
    index = torch.arange(x.shape[dim], device=x.device)
    inside = (index >= start) & (index < end)
    inside = inside[None, :, None] if dim == 1 else inside[None, None, :]
    return torch.where(inside, torch.full_like(x, alpha), torch.full_like(x, beta))


def conv1d(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``O[s] = sum_k weight[k] * x[s + k - K // 2]`` over axis 0, zeros outside: x [n, D0, D1], weight [K, D0, D1]."""
    taps = weight.shape[0]
    if taps % 2 == 0:  # one more tap of weight 0 makes the window symmetric
        weight = torch.cat([weight, torch.zeros_like(weight[:1])])
    kernel = weight.flatten(1).t()[:, None, :]
    rows = torch.nn.functional.conv1d(x.flatten(1).t(), kernel, padding=taps // 2, groups=kernel.shape[0])
    result: torch.Tensor = rows.t().unflatten(1, tuple(x.shape[1:]))
    return result
