"""The cache that a traced vFlow sees: fields of the page that is being completed, or of a window's pages."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.core.formats import FORMAT
from kvsieve.compat.vortex.core.segment import SegmentTensor
from kvsieve.graph import RESERVED

Shapes = Mapping[str, tuple[int, int]]
"""Shape ``(r, c)`` of every field of ``create_cache``."""


class PageField(SegmentTensor):
    """A field of the page that is being completed. It holds nothing until it is written."""

    def __init__(self, name: str, shape: tuple[int, int]) -> None:
        self._format, self.name, self.shape_of_page = FORMAT.PAGED, name, shape
        self.value: torch.Tensor | None = None
        self.constant: float | None = None

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The value [1, r, c]."""
        if self.value is None:
            raise OpError(
                "forward_cache",
                f"reads {self.name} before it writes it: in the pool that is what the page's former owner left there",
                "write it first, or compute it in forward_indexer",
            )
        return self.value

    @property
    def rank(self) -> int:
        return 3

    @property
    def inner(self) -> tuple[int, int]:
        return self.shape_of_page

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(1, r, c)``."""
        return 1, *self.shape_of_page

    def assign(self, value: torch.Tensor) -> None:
        self.value, self.constant = value, None

    def fill(self, value: float, filled: torch.Tensor) -> None:
        self.value, self.constant = filled, value


class StoredTokens(SegmentTensor):
    """K or V of a page, which no op may write."""

    def assign(self, value: torch.Tensor) -> None:
        raise OpError("forward_cache", f"writes {self.name}, the stored tokens", "write to a field of create_cache")


def stored_name(name: str) -> str:
    """The name under which kvsieve stores a field: its own, unless that means something else to kvsieve."""
    return name if name.isidentifier() and name not in RESERVED else f"field_{re.sub(r'[^0-9A-Za-z_]', '_', name)}"


class Cache(dict[str, SegmentTensor]):
    """Fields by name, ``k`` and ``v`` among them."""

    def __missing__(self, name: str) -> SegmentTensor:
        problem = f"expected a field of create_cache, k or v, received {name!r}"
        raise OpError("cache", problem, f"declare it, or use one of {', '.join(sorted(self))}")


def cache_of_page(k: torch.Tensor, v: torch.Tensor, shapes: Shapes) -> Cache:
    """The cache that ``forward_cache`` sees: k [p, D], v [p, Dv], and empty fields."""
    tokens = {name: StoredTokens(x[None], FORMAT.PAGED, name) for name, x in (("k", k), ("v", v))}
    return Cache({**{name: PageField(name, shape) for name, shape in shapes.items()}, **tokens})


def cache_of_window(pages: Mapping[str, torch.Tensor], shapes: Shapes) -> Cache:
    """The cache that ``forward_indexer`` sees. A field that nothing ever writes is 0, as in a fresh pool."""
    width, like, known = pages["position"].shape[0], pages["position"], set(pages)
    cache = Cache({name: SegmentTensor(pages[name], FORMAT.PAGED, name) for name in ("k", "v")})
    for name, shape in shapes.items():
        zero = torch.zeros(1, *shape, dtype=like.dtype, device=like.device) if stored_name(name) not in known else None
        data = pages[stored_name(name)] if zero is None else zero.expand(width, *shape)
        cache[name] = SegmentTensor(data, FORMAT.PAGED, name)
    return cache
