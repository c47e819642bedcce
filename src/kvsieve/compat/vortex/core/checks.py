"""Checks of the operands of ops, with the same words on both sides."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.compat.vortex.abs.tensor import FORMAT, as_vtensor, vTensor
from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.core.ops import Inner


def operand(op: object, name: str, x: Any, kind: FORMAT | None = None) -> vTensor:
    """A vTensor of rank 3; a plain tensor becomes one of the format that is known to be meant.

    Raises:
        OpError: anything else.
    """
    prefix = f"{type(op).__name__}: {name}: "
    if kind is not None and isinstance(x, torch.Tensor) and not isinstance(x, vTensor):
        x = as_vtensor(x, kind)
    if not isinstance(x, vTensor):
        raise OpError(f"{prefix}expected a vTensor, received {type(x).__name__}; wrap it in as_vtensor(x, FORMAT...)")
    if x.dim() != 3:
        raise OpError(f"{prefix}expected rank 3, [L, D0, D1], received shape {list(x.shape)}")
    return x


def format_of(op: object, name: str, x: Any, *allowed: FORMAT) -> None:
    """Refuse another format than the allowed ones."""
    if x._format not in allowed:
        wanted = " or ".join(one.name for one in allowed)
        raise OpError(f"{type(op).__name__}: {name}: expected format {wanted}, received {x._format.name}")


def same_device(op: object, *tensors: torch.Tensor) -> None:
    """Refuse tensors that live on several devices."""
    devices = sorted({str(x.device) for x in tensors})
    if len(devices) > 1:
        raise OpError(f"{type(op).__name__}: expected tensors on one device, received {' and '.join(devices)}")


def same_inner(op: object, name: str, x: Any, expected: Inner) -> None:
    """Refuse another shape of a row."""
    if tuple(x.shape[1:]) != expected:
        raise OpError(f"{type(op).__name__}: {name}: expected inner shape {expected}, received {tuple(x.shape[1:])}")


def inner(x: Any) -> Inner:
    """``(D0, D1)``."""
    return int(x.shape[1]), int(x.shape[2])
