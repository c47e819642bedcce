"""How large the tiles of a kernel are, by what it computes: all numbers that may be tuned."""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.backends.triton.generate.errors import Refused
from kvsieve.backends.triton.generate.kernel import Kernel

TILE = 16384
"""Elements of the largest tile of a kernel."""
WIDE = 4096
"""Elements per page up to which all heads of a page are one row of a tile."""
MOST = 1 << 17
"""Elements of one page (or of what does not vary over pages) above which nothing is generated."""
MOST_PAGES = 1024
ELEMENTS_PER_WARP = 2048


@dataclass(frozen=True)
class Tiling:
    """Pages of a tile, warps, and software pipelining stages."""

    pages: int
    warps: int
    stages: int = 2


def is_wide(heads: int, elements: int, fixed: int) -> bool:
    """Whether all heads go into one tile; ``elements`` per page and ``fixed`` ones are those of one head."""
    power = heads & (heads - 1) == 0
    return power and heads > 1 and heads * max(elements, fixed) <= WIDE


def tiling(kernel: Kernel, heads: int, name: str) -> Tiling:
    """The tile of a kernel.

    Raises:
        Refused: a page's values are too many for registers.
    """
    if max(kernel.largest, kernel.fixed) > MOST:
        raise Refused(f"{name} holds {max(kernel.largest, kernel.fixed)} values of one page at once, above {MOST}")
    elements = kernel.largest * (heads if kernel.wide else 1)
    pages = max(1, min(MOST_PAGES, TILE // elements))
    pages = 1 << pages.bit_length() - 1
    held = max(pages * elements, kernel.fixed)
    warps = max(1, min(16, held // ELEMENTS_PER_WARP))
    return Tiling(pages, 1 << warps.bit_length() - 1)
