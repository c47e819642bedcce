"""Checks of the operands of ops, with the same words on both sides."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

import torch

from kvsieve.compat.vortex.abs.tensor import FORMAT, as_vtensor, vTensor
from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.core.row_op import Inner

MEANT = {
    FORMAT.BATCHED: "q or what is made of q alone",
    FORMAT.RAGGED: "the result of another op",
    FORMAT.PAGED: "a field of the cache",
}
"""Where a flow finds tensors of a format."""
FIELD_SHAPE = "declare the field with that shape in create_cache"
EnumT = TypeVar("EnumT", bound=Enum)


def operand(op: object, name: str, x: Any, kind: FORMAT | None = None) -> vTensor:
    """A vTensor of rank 3; a plain tensor becomes one of the format that is known to be meant.

    Raises:
        OpError: anything else.
    """
    where = f"{type(op).__name__}: {name}"
    if kind is not None and isinstance(x, torch.Tensor) and not isinstance(x, vTensor):
        x = as_vtensor(x, kind)
    if not isinstance(x, vTensor):
        raise OpError(where, f"expected a vTensor, received {type(x).__name__}", "wrap it in as_vtensor(x, FORMAT...)")
    if x.dim() != 3:
        problem = f"expected rank 3, [L, D0, D1], received shape {list(x.shape)}"
        raise OpError(where, problem, "give what has fewer axes inner axes of size 1")
    return x


def format_of(op: object, name: str, x: Any, *allowed: FORMAT) -> None:
    """Refuse another format than the allowed ones."""
    if x._format not in allowed:
        problem = f"expected format {' or '.join(one.name for one in allowed)}, received {x._format.name}"
        remedy = f"pass {', or '.join(MEANT[one] for one in allowed)}"
        if x._format is FORMAT.PAGED and FORMAT.RAGGED in allowed:
            remedy = "read the field with Load() first"
        raise OpError(f"{type(op).__name__}: {name}", problem, remedy)


def same_device(op: object, *tensors: torch.Tensor) -> None:
    """Refuse tensors that live on several devices."""
    devices = sorted({str(x.device) for x in tensors})
    if len(devices) > 1:
        problem = f"expected tensors on one device, received {' and '.join(devices)}"
        raise OpError(type(op).__name__, problem, "allocate q, o and the cache on one device")


def same_inner(op: object, name: str, x: Any, expected: Inner, remedy: str) -> None:
    """Refuse another shape of a row."""
    if tuple(x.shape[1:]) != expected:
        problem = f"expected inner shape {expected}, received {tuple(x.shape[1:])}"
        raise OpError(f"{type(op).__name__}: {name}", problem, remedy)


def check_dim(where: str, dim: int, allowed: tuple[int, ...]) -> None:
    """Refuse another axis of ``[L, D0, D1]`` than the allowed ones."""
    if dim not in allowed:
        problem = f"expected dim {' or '.join(map(str, allowed))}, received {dim!r}"
        raise OpError(where, problem, "dim counts the axes of [L, D0, D1]")


def member(where: str, kinds: type[EnumT], value: Any) -> EnumT:
    """The member of an enum that is given as itself, its value, or its name in any case."""
    known = {name.lower(): kind for name, kind in kinds.__members__.items()}
    try:
        return known[value.lower()] if isinstance(value, str) else kinds(value)
    except (KeyError, ValueError):
        remedy = f"its members are {', '.join(kinds.__members__)}"
        raise OpError(where, f"expected a {kinds.__name__}, received {value!r}", remedy) from None


def inner(x: Any) -> Inner:
    """``(D0, D1)``."""
    return int(x.shape[1]), int(x.shape[2])
