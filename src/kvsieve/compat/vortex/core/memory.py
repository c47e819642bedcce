"""What was already read back from device tensors, so that the ops of one step wait for the device once at most."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")
KEPT = 64
_Entry = tuple[list["weakref.ref[torch.Tensor]"], list[int], Any]
_known: OrderedDict[tuple[Any, ...], _Entry] = OrderedDict()


def remembered(what: str, tensors: Sequence[torch.Tensor], key: tuple[Any, ...], make: Callable[[], T]) -> T:
    """``make()``, or its former result if the very same CUDA tensors have not been written to since.

    CPU tensors are cheap to read and are always read anew.
    """
    if not tensors[0].is_cuda or any(x.is_inference() for x in tensors):
        return make()
    name = (what, key, *(id(x) for x in tensors))
    entry = _known.get(name)
    versions = [x._version for x in tensors]
    if entry is not None and entry[1] == versions and all(r() is x for r, x in zip(entry[0], tensors, strict=True)):
        _known.move_to_end(name)
        return entry[2]  # type: ignore[no-any-return]
    value = make()
    remember(what, tensors, key, value)
    return value


def remember(what: str, tensors: Sequence[torch.Tensor], key: tuple[Any, ...], value: Any) -> None:
    """Keep what is known of CUDA tensors as they are now."""
    if not tensors[0].is_cuda or any(x.is_inference() for x in tensors):
        return
    name = (what, key, *(id(x) for x in tensors))
    _known[name] = [weakref.ref(x) for x in tensors], [x._version for x in tensors], value
    while len(_known) > KEPT:
        _known.popitem(last=False)
