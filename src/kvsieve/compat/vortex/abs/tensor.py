"""Tensors that know what their leading axis means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from kvsieve.compat.vortex.core.errors import FormatError
from kvsieve.compat.vortex.core.formats import FORMAT
from kvsieve.compat.vortex.core.segment import SegmentTensor

__all__ = ["FORMAT", "as_vtensor", "plain", "vTensor"]


class vTensor(torch.Tensor):
    """A tensor with a format. In a torch op it may meet numbers and tensors of its own format; results keep it.

    Raises:
        FormatError: (a RuntimeError) an op with a plain tensor, or with a tensor of another format.
    """

    _format: FORMAT = FORMAT.BATCHED
    tensor_id: int = -1

    @staticmethod
    def __new__(cls, data: Any, _format: FORMAT = FORMAT.BATCHED, tensor_id: int | None = None) -> vTensor:
        return as_vtensor(data, _format, tensor_id)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"vTensor(format={self._format}, {plain(self)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> vTensor:
        return as_vtensor(plain(self).clone(), self._format, self.tensor_id)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return as_vtensor, (plain(self), self._format, self.tensor_id)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _common_format([*args, *kwargs.values()], func)
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return result if kind is None else _tagged(result, kind)


def as_vtensor(x: Any, _format: FORMAT = FORMAT.BATCHED, tensor_id: int | None = None) -> vTensor:
    """``x`` as a vTensor on the same memory; a vTensor gets the new format and is returned itself."""
    if not isinstance(_format, FORMAT):
        raise TypeError(f"as_vtensor: expected a FORMAT, received {_format!r}")
    if isinstance(x, SegmentTensor):  # a flow that tags what it computed, while it is traced
        x._format = _format
        return x  # type: ignore[return-value]
    result = x if isinstance(x, vTensor) else torch.as_tensor(x).as_subclass(vTensor)
    result._format = _format
    result.tensor_id = -1 if tensor_id is None else tensor_id
    return result


def plain(x: torch.Tensor) -> torch.Tensor:
    """The same memory as an ordinary tensor."""
    if not isinstance(x, vTensor):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _common_format(values: list[Any], func: Callable[..., Any]) -> FORMAT | None:
    tensors = list(_tensors(values))
    formats = {x._format for x in tensors if isinstance(x, vTensor)}
    name = getattr(func, "__name__", str(func))
    if formats and not all(isinstance(x, vTensor) for x in tensors):
        raise FormatError(f"{name}: expected vTensors only, received a plain torch.Tensor too; wrap it in as_vtensor")
    if len(formats) > 1:
        names = " and ".join(sorted(one.name for one in formats))
        raise FormatError(f"{name}: expected vTensors of one format, received {names}; use an op of the indexer")
    return next(iter(formats), None)


def _tagged(result: Any, kind: FORMAT) -> Any:
    if isinstance(result, torch.Tensor):
        if not isinstance(result, vTensor):
            result = result.as_subclass(vTensor)
        result._format = kind
        return result
    if isinstance(result, (list, tuple)) and not isinstance(result, torch.Size):
        parts = [_tagged(part, kind) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    return result
