"""What a vFlow's fields are: summaries of a page, or state that steps update. Found by running its methods once."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.core.formats import FORMAT
from kvsieve.compat.vortex.core.segment import SegmentContext, SegmentTensor
from kvsieve.errors import ConfigError, KvsieveError
from kvsieve.graph import RESERVED

PAGE_SIZES = (16, 5, 1, 33, 2, 4, 8, 32, 64, 128, 256)
"""Tried in turn: a flow that accepts the first four is taken to accept every page size."""
HEAD_DIMS = (128, 64, 32, 96, 80, 192, 256, 512, 576)
PAGES, GROUP, WIDER = 3, 2, 3

Shapes = Mapping[str, tuple[int, int]]
Get = Callable[[int, int], tuple[Any, dict[str, tuple[int, int]]]]


@dataclass(frozen=True)
class Analysis:
    """``summaries``: names; ``states``: initial value by name; ``page_size``: the one to use, None for any.

    ``equal_widths``: whether the flow needs values as wide as keys, which vortex_torch always has.
    """

    summaries: tuple[str, ...]
    states: Mapping[str, float]
    page_size: int | None
    equal_widths: bool


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


def analyse(get: Get, name: str, page_size: int | None) -> Analysis:
    """Run a flow's methods once on small tensors.

    Args:
        get: the flow and the shapes of its fields for (page size, head_dim). name: for messages.
        page_size: the page size to use; None: any, if the flow accepts every one.

    Raises:
        ConfigError: no geometry is accepted, or the flow needs what kvsieve does not do.
    """
    size, head_dim, any_size = choose_geometry(get, name, page_size)
    flow, shapes = get(size, head_dim)
    equal_widths = False
    try:
        page, saved = run_methods(flow, shapes, size, (head_dim, head_dim + WIDER))
    except Exception:  # it may be about widths; if not, it comes again
        equal_widths = True
        try:
            page, saved = run_methods(flow, shapes, size, (head_dim, head_dim))
        except Exception as error:
            kind = "" if isinstance(error, KvsieveError) else f"{type(error).__name__}: "
            raise ConfigError(f"vFlow {name}: {_line(error)}{kind}{error}") from error
    fields = {key: field for key, field in page.items() if isinstance(field, PageField)}
    for key in saved:
        _check_saved(name, key, fields)
    written = tuple(key for key, field in fields.items() if field.value is not None and key not in saved)
    return Analysis(
        written, {key: fields[key].constant or 0.0 for key in saved}, None if any_size else size, equal_widths
    )


def run_methods(flow: Any, shapes: Shapes, page_size: int, widths: tuple[int, int]) -> tuple[Cache, list[str]]:
    """Both methods once, for keys and values of these widths: the cache after ``forward_cache``, and what is saved."""
    tokens = [torch.zeros(page_size, width) for width in widths]
    page = cache_of_page(tokens[0], tokens[1], shapes)
    with torch.no_grad():
        flow.forward_cache(page, torch.zeros(1, dtype=torch.int64), SegmentContext(page_size, widths[0]))
        return page, saved_fields(flow, shapes, page_size, widths)


def choose_geometry(get: Get, name: str, page_size: int | None) -> tuple[int, int, bool]:
    """A page size and head_dim that ``create_cache`` accepts, and whether it seems to accept every page size."""
    accepted: dict[int, int] = {}
    error: Exception | None = None
    for size in PAGE_SIZES if page_size is None else (page_size,):
        for head_dim in HEAD_DIMS:
            try:
                get(size, head_dim)
            except Exception as refusal:
                error = refusal
            else:
                accepted[size] = head_dim
                break
        if len(accepted) == 4 or (accepted and size not in PAGE_SIZES[:4]):
            break
    if not accepted:
        raise ConfigError(f"vFlow {name}: create_cache accepts none of the page sizes tried: {error}")
    size = next(iter(accepted))
    return size, accepted[size], page_size is None and set(PAGE_SIZES[:4]) <= set(accepted)


def saved_fields(flow: Any, shapes: Shapes, page_size: int, widths: tuple[int, int]) -> list[str]:
    """Fields that ``forward_indexer`` saves."""
    head_dim = widths[0]
    pages = {key: torch.zeros(PAGES, page_size, width) for key, width in zip(("k", "v"), widths, strict=True)}
    pages |= {
        "position": torch.zeros(PAGES),
        **{stored_name(key): torch.ones(PAGES, *shape) for key, shape in shapes.items()},
    }
    ctx = SegmentContext(page_size, head_dim, GROUP)
    q, o = torch.zeros(1, GROUP, head_dim), torch.zeros(1, 1, 1)
    query, out = SegmentTensor(q, FORMAT.BATCHED), SegmentTensor(o, FORMAT.RAGGED)
    flow.forward_indexer(query, out, cache_of_window(pages, shapes), ctx)
    if ctx.scores is None:
        raise OpError("forward_indexer", "expected a final topK(score, o), received none", "add it")
    return sorted(ctx.saved)


def _line(error: Exception) -> str:
    """``file:line: `` of the innermost frame outside this package and torch; empty if there is none."""
    others = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


def _check_saved(name: str, key: str, fields: Mapping[str, PageField]) -> None:
    if key not in fields:
        raise ConfigError(f"vFlow {name}: Save writes {key}, the stored tokens; expected a field of create_cache")
    if fields[key].value is not None and fields[key].constant is None:
        raise ConfigError(
            f"vFlow {name}: {key} is computed from the page in forward_cache and overwritten by Save. "
            "Summaries belong to a page that requests may share, state to one request: expected a field of one kind; "
            "split it into a field that forward_cache computes and one that starts from Fill and is saved"
        )
