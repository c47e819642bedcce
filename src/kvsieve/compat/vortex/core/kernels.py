"""Row functions over a work list: operands gathered, computed in float32 piece by piece, rounded once at the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.core.work import Windows

PIECE = 2**24
"""Elements of the largest operand that are held in float32 at a time."""


class Gathered:
    """Rows ``table[index]`` of an operand, piece by piece; table [L, D0, D1], index [n] int64."""

    def __init__(self, table: torch.Tensor, index: torch.Tensor) -> None:
        if table.dim() != 3:
            problem = f"expected a tensor [L, D0, D1], received shape {list(table.shape)}"
            raise OpError("operand", problem, "give what has fewer axes inner axes of size 1")
        self.table, self.index = table, index
        self.width = table.shape[1] * table.shape[2]

    def __call__(self, piece: slice) -> torch.Tensor:
        """Rows [n, D0, D1] of a piece of the work list, as stored."""
        return self.table.index_select(0, self.index[piece])


def widened(x: torch.Tensor) -> torch.Tensor:
    """In the dtype that is computed in: float32, or float64 for float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def compute(
    operands: Sequence[Gathered],
    function: Callable[..., torch.Tensor],
    out: torch.Tensor,
    index: torch.Tensor,
    width: int,
) -> None:
    """``out[index] = function(*operands)``: index [n] int64; ``width``: elements of a result row."""
    step = max(1, PIECE // max(width, *(operand.width for operand in operands)))
    for start in range(0, len(index), step):
        piece = slice(start, start + step)
        value = function(*(widened(operand(piece)) for operand in operands))
        _same_inner(value, out)
        rows = index[piece]
        out[rows] = value.to(out.dtype).expand(len(rows), -1, -1)


def copy_rows(source: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, index: torch.Tensor) -> None:
    """``out[index] = source[rows]`` in the dtype of ``out``; both [L, D0, D1], rows and index [n] int64."""
    _same_inner(source, out)
    out[index] = source.index_select(0, rows).to(out.dtype)


def _same_inner(value: torch.Tensor, out: torch.Tensor) -> None:
    """Rows are stored as they are: torch would repeat a row of one element to fill a larger one."""
    if value.shape[1:] != out.shape[1:]:
        problem = f"expected room for rows {tuple(value.shape[1:])}, received {tuple(out.shape[1:])}"
        raise OpError("o", problem, "allocate it with the shape of the result")


def over_windows(
    x: torch.Tensor,
    windows: Windows,
    fill: float,
    before: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
) -> torch.Tensor:
    """Window rows in float32 after ``before``, pages first: x [L, D0, D1] -> [widest, m, D0, D1]; padding: ``fill``."""
    rows = widened(x.index_select(0, windows.positions.flatten())).unflatten(0, windows.positions.shape)
    return torch.where(windows.valid[:, :, None, None], before(rows), fill).transpose(0, 1)


def scan_windows(
    x: torch.Tensor,
    out: torch.Tensor,
    windows: Windows | None,
    along: Callable[[torch.Tensor], torch.Tensor],
    fill: float,
    before: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
) -> None:
    """``along`` the pages of every window, from x to out [L, D0, D1], which may be one; other rows are left alone."""
    if windows is not None:
        store_windows(out, windows, along(over_windows(x, windows, fill, before)))


def store_windows(x: torch.Tensor, windows: Windows, value: torch.Tensor) -> None:
    """Write [widest, m, D0, D1] back to the window rows of x."""
    x[windows.rows] = value.transpose(0, 1).flatten(0, 1)[windows.places].to(x.dtype)
