"""What a vFlow's fields are: summaries of a page, or state that steps update. Found by running its methods once."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.core.fields import Cache, PageField, Shapes, cache_of_page, cache_of_window, stored_name
from kvsieve.compat.vortex.core.formats import FORMAT
from kvsieve.compat.vortex.core.segment import SegmentContext, SegmentTensor
from kvsieve.errors import ConfigError, KvsieveError

USUAL_SIZES = (16, 5, 1, 33)
"""A flow that accepts these is taken to accept every page size."""
OTHER_SIZES = (2, 4, 8, 32, 64, 128, 256)
"""Tried in turn for a flow that accepts none of the usual ones."""
HEAD_DIMS = (128, 64, 32, 96, 80, 192, 256, 512, 576)
PAGES, GROUP = 3, 2
WIDER = 3
"""By so much are values wider than keys at first, to see whether the flow minds."""

Get = Callable[[int, int], tuple[Any, dict[str, tuple[int, int]]]]
"""A flow's object and the shapes of its own fields, for (page size, head_dim)."""


@dataclass(frozen=True)
class Analysis:
    """``summaries``: names; ``states``: initial value by name; ``page_size``: the one to use, None for any.

    ``equal_widths``: whether the flow needs values as wide as keys, which vortex_torch always has.
    """

    summaries: tuple[str, ...]
    states: Mapping[str, float]
    page_size: int | None
    equal_widths: bool


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
    refusals: list[Exception] = []
    usual, others = (USUAL_SIZES, OTHER_SIZES) if page_size is None else ((page_size,), ())
    accepted = [(size, head_dim) for size in usual if (head_dim := _head_dim_at(get, size, refusals))]
    every = page_size is None and len(accepted) == len(usual)
    more = ((size, head_dim) for size in others if (head_dim := _head_dim_at(get, size, refusals)))
    first = accepted[0] if accepted else next(more, None)
    if first is None:
        raise ConfigError(f"vFlow {name}: create_cache accepts none of the page sizes tried: {refusals[-1]}")
    return *first, every


def _head_dim_at(get: Get, page_size: int, refusals: list[Exception]) -> int | None:
    """The first head_dim that is accepted beside a page size; refusals are added to the list."""
    for head_dim in HEAD_DIMS:
        try:
            get(page_size, head_dim)
        except Exception as refusal:
            refusals.append(refusal)
        else:
            return head_dim
    return None


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
