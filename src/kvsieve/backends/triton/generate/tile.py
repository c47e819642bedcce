"""Tiles: values as they stand in a kernel, ``[pages, (heads,) static axes]``, sizes padded to powers of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Dim = int | str
"""A size in the kernel: a number, or the name of a constant of the kernel."""

PAGES, HEADS = "PAGES", "HEADS"


@dataclass(frozen=True)
class Tile:
    """Text of a value, and its sizes; None for a number, which broadcasts with everything. A size of 1 broadcasts."""

    text: str
    dims: tuple[Dim, ...] | None


def joined(*dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """The sizes of tiles of one rank that broadcast."""
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*dims, strict=True))


def shape_text(dims: Sequence[Dim]) -> str:
    """Sizes or axes as kernel text."""
    return "[" + ", ".join(map(str, dims)) + "]"


def reshaped(tile: Tile, dims: tuple[Dim, ...]) -> Tile:
    """The tile with axes of size 1 put in or taken out, by an index if that will do."""
    assert tile.dims is not None
    if tile.dims == dims:
        return tile
    inserted = _inserted(tile.dims, dims)
    if inserted is not None:
        return Tile(f"{tile.text}[{inserted}]", dims)
    return Tile(f"tl.reshape({tile.text}, {shape_text(dims)})", dims)


def _inserted(old: Sequence[Dim], new: Sequence[Dim]) -> str | None:
    """``:, None, :`` that turns ``old`` into ``new``, if putting in axes is enough."""
    if not new:
        return None if old else ""
    if old and old[0] == new[0]:
        rest = _inserted(old[1:], new[1:])
        if rest is not None:
            return f":, {rest}".removesuffix(", ")
    if new[0] != 1:
        return None
    rest = _inserted(old, new[1:])
    return None if rest is None else f"None, {rest}".removesuffix(", ")


def axis_index(axis: int, rank: int) -> str:
    """``[None, :, None]``: a vector as one axis of a tile; nothing for a tile that is a vector."""
    if rank == 1:
        return ""
    return "[" + ", ".join(":" if one == axis else "None" for one in range(rank)) + "]"


def clamped(index: str, size: int) -> str:
    """Places along an axis, cut to it, since padding holds anything."""
    return f"tl.minimum(tl.maximum({index}, 0), {size - 1})"


def times(number: int) -> str:
    """`` * number``, unless it is 1."""
    return f" * {number}" if number != 1 else ""


def literal(value: float | int | bool) -> str:
    """A Python number as kernel text."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def _lowest(dtype: torch.dtype) -> float | int:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float | int:
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def identity(kind: str, dtype: torch.dtype) -> str:
    """What a reduction leaves unchanged."""
    numbers = {"sum": 0, "prod": 1, "max": _lowest(dtype), "min": _highest(dtype)}
    number = numbers[kind]
    return literal(float(number) if dtype.is_floating_point else number)
