"""How large the tiles of a kernel are, by what it computes: all numbers that may be tuned."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvsieve.backends.triton.generate.errors import Refused
from kvsieve.backends.triton.generate.kernel import Kernel
from kvsieve.backends.triton.launch import largest_power, power_of_two


@dataclass(frozen=True)
class Tiling:
    """Pages of a tile, warps, software pipelining stages, and heads that a program goes over."""

    pages: int
    warps: int
    stages: int = 2
    each: int = 1


TILE = 8192
"""Elements of the largest tile of a kernel."""
WIDE, WIDE_FIXED = 4096, 16384
"""Elements per page, and of what does not vary over pages, up to which all heads of a page are one row of a tile."""
STREAM, WIDE_LIGHT = 32, 4096
"""A kernel that reads fewer elements per page is light: its limit in place of ``WIDE_FIXED``."""
MOST = 1 << 18
"""Elements of one page (or of what does not vary over pages) above which nothing is generated."""
MOST_PAGES, MOST_WARPS = 512, 16
"""Of a tile, and of the program that holds it."""
DOT_LOADED, DOT_PAGES, DOT_HEADS, DOT_WARPS, DOT_STAGES = 8192, 32, 4, 2, 3
"""For kernels with tensor-core products: elements of the fields in a tile, its pages at most, heads that a program goes
over, at most, warps and stages."""
DOT_ROWS = 128
"""Rows of their products at most, unless a page has more; so many keep one warp busy, which then waits for no other."""
SUMMARY_TILE, SUMMARY_WARPS = 2048, 2
"""For summarize, which few pages need at a time: elements of the largest tile, and warps at least."""
SUMMARY_LOADED, SUMMARY_MADE = 1024, 8192
"""Elements for each warp: those that are loaded, and those of the largest tile."""
FEWEST_DOT_ROWS = 16
"""Rows of a tile in a tensor-core product, at least."""
WHOLE, WHOLE_EACH, WHOLE_PAGES = 16384, 8, 2048
"""For kernels whose programs hold whole windows: elements of the largest tile, those of a page at most, and the pages
for which their warps are given."""
WHOLE_PER_WARP, WHOLE_WARPS = 1024, 4
REGISTERS, HELD = 64, 40
"""Of a thread of such a kernel: registers with which four programs of 8 warps fit on a multiprocessor, and loaded
values up to which it makes do with them."""
GATHERED, GATHERING = 128, Tiling(1, 4)
"""Chunks of a stage above which a kernel of its own puts them together, and how it runs."""
ELEMENTS_PER_WARP, LIGHT_PER_WARP = 2048, 512
"""For other kernels; for those that read little of each page, heads side by side."""


def is_wide(kernel: Kernel, heads: int) -> bool:
    """Whether all heads go into one tile, by the kernel that takes one head at a time."""
    power = heads & (heads - 1) == 0
    fixed = WIDE_FIXED if kernel.loaded >= STREAM else WIDE_LIGHT
    if not kernel.loaded:  # what stages leave each other lies head by head
        return False
    return power and heads > 1 and heads * kernel.largest <= WIDE and heads * kernel.fixed <= fixed


def for_window(one: Tiling, width: int) -> Tiling:
    """The tile of a kernel whose programs hold windows of up to ``width`` pages."""
    pages = power_of_two(width, 16)
    return replace(one, pages=pages, warps=largest_power(min(MOST_WARPS, one.warps * pages // one.pages)))


def registers(kernel: Kernel, one: Tiling) -> int | None:
    """Registers that a thread may have; None: as many as it takes."""
    return REGISTERS if kernel.whole and kernel.held * one.pages <= HELD * 32 * one.warps else None


def longest_window(kernel: Kernel) -> int:
    """Pages of the longest window that a program of such a kernel holds; 0 if its values of a page are too many."""
    return WHOLE // kernel.largest if max(kernel.largest, kernel.loaded) <= WHOLE_EACH else 0


def fewest_pages(kernel: Kernel) -> int:
    """Pages that the tile of a kernel must have."""
    return max(1, FEWEST_DOT_ROWS // kernel.fewest_rows) if kernel.dots else 1


def tiling(kernel: Kernel, heads: int, name: str, summaries: bool = False) -> Tiling:
    """The tile of a kernel.

    Raises:
        Refused: a page's values are too many for registers.
    """
    if kernel.whole:
        return Tiling(WHOLE_PAGES, largest_power(max(WHOLE_WARPS, WHOLE_PAGES * kernel.largest // WHOLE_PER_WARP)))
    if max(kernel.largest, kernel.fixed) > MOST:
        raise Refused(f"{name} holds {max(kernel.largest, kernel.fixed)} values of one page at once, above {MOST}")
    if kernel.dots:
        return _dot_tiling(kernel, heads)
    elements = kernel.largest * (heads if kernel.wide else 1)
    if summaries:
        pages = largest_power(min(MOST_PAGES, SUMMARY_TILE // elements))
        loaded = kernel.loaded * elements // kernel.largest
        warps = max(SUMMARY_WARPS, pages * loaded // SUMMARY_LOADED, pages * elements // SUMMARY_MADE)
        return Tiling(pages, largest_power(min(MOST_WARPS, warps)))
    pages = largest_power(min(MOST_PAGES, TILE // elements))
    held = max(pages * elements, kernel.fixed)
    each = LIGHT_PER_WARP if kernel.wide and kernel.loaded < STREAM else ELEMENTS_PER_WARP
    warps = largest_power(min(MOST_WARPS, held // each))
    if kernel.wide and kernel.partials and kernel.loaded == kernel.largest:
        pages = min(MOST_PAGES, 2 * pages)  # one row a page leaves room, and what a chunk found is stored half as often
    return Tiling(pages, warps)


def _dot_tiling(kernel: Kernel, heads: int) -> Tiling:
    loaded = max(1, kernel.loaded)
    most = min(DOT_PAGES, 2 * DOT_LOADED // loaded - 1, DOT_ROWS // kernel.most_rows)
    pages = largest_power(max(fewest_pages(kernel), most))
    rows = pages * kernel.most_rows
    warps = DOT_WARPS if rows < DOT_ROWS else largest_power(min(MOST_WARPS, rows // DOT_ROWS))
    return Tiling(pages, warps, DOT_STAGES, math.gcd(heads, DOT_HEADS))
