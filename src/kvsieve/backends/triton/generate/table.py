"""The op table: one row per op of :mod:`kvsieve.ops`: what it prints, and how its rounding error comes about.

Adding an op is one entry in one of the modules below, and one line in tests/op_cases.py.
"""

from __future__ import annotations

from kvsieve.backends.triton.generate import elementwise, ordering, products, reductions, shapes
from kvsieve.backends.triton.generate.call import Row

ROWS: dict[str, Row] = {
    **elementwise.rows(),
    **reductions.rows(),
    **ordering.rows(),
    **shapes.rows(),
    **products.rows(),
}
