"""Prints docs/kernels.md: ``python -m kvsieve.backends.triton.generate > docs/kernels.md``."""

from __future__ import annotations

from kvsieve.backends.triton.generate.call import Row
from kvsieve.backends.triton.generate.table import ROWS

HEAD = """# Generated kernels

Written by `python -m kvsieve.backends.triton.generate > docs/kernels.md`; a test keeps it current.

Backend `triton` prints the `score` and `summarize` of a flow as Triton source; `kvsieve show FLOW --kernel` shows it.

## How data flows

1. The checked graph of one request and one KV head becomes a program of twenty kinds of op (`ir.py`), by one row of
   the table below per ATen op. Algebra then finds contractions, and the bound `max(q * high, q * low).sum()` of an
   envelope (`patterns.py`): where `summarize` proves that `high` is the larger, it is two products.
2. Reductions over the page axis cut the program into stages (`stages.py`); each is one kernel over chunks of pages.
   A chunk stores what it found of a reduction (for a softmax its maximum and its sum of exponentials); the next stage
   puts the chunks together in their order, so that results are the same bits from run to run (if they are many, a
   kernel in between does it once). A value that a later stage needs is stored per page only if that moves fewer bytes
   than its fields: logits are, copies of fields never. Long products of the queries alone (a projection of them) are
   computed by a small kernel ahead of all stages, once for each request and KV head.
   Where a window's values fit one program (4,096 pages of four logits each), two stages do, however often pages meet:
   the first stores per page what the reductions are of, a program of the second holds a whole window.
3. A kernel loads fields through the page table, widens them to float32 and computes on tiles
   `[pages, (heads,) static axes]`. No size need be a power of two: tiles are padded, and what a reduction sees of the
   padding, or of pages beyond the window, is its identity. Elements that one index picks from a field, or from the
   queries, for all pages alike are loaded alone; the index may come from the queries.
4. Tiles have one of three forms. All heads of a page are one row of a tile if they lie side by side and their sizes
   are powers of two. Contractions of several query rows with stored 16-bit values run on tensor cores, a few heads one
   after another; rows that the flow computes from queries are three parts of bfloat16, which hold all bits. A field of
   several axes is loaded as the matrix that is multiplied, whichever of them is summed, if the others need no padding.
   Products are exact, sums are float32. All else runs one head at a time. `tuning.py` holds the numbers.

A flow is refused, with the reason, if an op has no row, or if the values of one page do not fit a tile; backend
`triton+compiled` runs it then. An envelope with infinite keys scores NaN where the literal formula would not; so do
computed query rows on tensor cores, and a logsumexp over pages one of whose values is infinite.

## Ops

How an op's own rounding error comes about (u = 2**-24, the relative rounding error of float32); errors of operands
grow by the op's slope. Operands are `{0}`, `{1}`, ... in `tl` and in the `f` of `functions.py`.

| op | prints | rounding error |
|---|---|---|
"""


def page() -> str:
    """The text of docs/kernels.md."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, row in ROWS.items():
        groups.setdefault(_cells(row), []).append(f"`{name}`")
    lines = (f"| {', '.join(names)} | {prints} | {error} |\n" for (prints, error), names in groups.items())
    return HEAD + "".join(lines)


def _cells(row: Row) -> tuple[str, str]:
    prints, error = (text.replace("|", "\\|") for text in (row.prints, row.error))
    return (f"`{prints}`" if "{0}" in prints else prints), error


if __name__ == "__main__":
    print(page(), end="")
