"""Every shipped flow on each backend beside the reference, over the whole grid of geometries, in float32.

Flows × page sizes {1, 5, 16, 33} (or the flow's own) × groups {1, 3, 4, 7, 8, 24} × head_dims {64, 80, 128} × 1, 3
and 5 KV heads, on one ragged batch with every boundary length. Layers of one runtime carry groups and KV heads, so that
a geometry is traced once. 1,620 cells of the eager backend run in the quick suite, about two minutes on one core.
The compiled backend runs a few there (odd geometries) and the whole grid among the slow ones: each geometry
is compiled.

    pytest tests/test_eager_grid.py
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvsieve.budget import Budget
from kvsieve.flow import list_flows
from kvsieve.verify.data import LayerShape
from kvsieve.verify.suite import GROUPS, HEAD_DIMS, KV_HEADS, PAGE_SIZES
from support import Twin

STEPS, V_WIDTH = 3, 48

CELLS = [
    pytest.param(name, p, marks=[pytest.mark.slow] if name in ("snapkv", "tova") else [])
    for name, cls in list_flows().items()
    for p in (PAGE_SIZES if cls.page_size is None else (cls.page_size,))
]
"""Of the flows that are fed by the runtime's mass alone, the quick suite takes one."""


def grid_budget(name: str) -> Budget:
    return Budget(2, 1, 1) if list_flows()[name].score is not None else Budget(0, 1, 3)


def boundary_lengths(page_size: int, budget: Budget) -> list[int]:
    """Lengths after the first step; the further steps cross the boundaries."""
    p, kept = page_size, budget.kept(0)
    lengths = {1, p - 1, p, p + 1, kept * p - 1, kept * p, kept * p + 1, (kept + 1) * p, (kept + 2) * p - 1}
    return [max(2, length) for length in sorted(lengths - {0})]


def compare_with_reference(backend: str, name: str, page_size: int, shapes: Sequence[LayerShape], seed: int) -> int:
    """A runtime whose layers have the shapes, beside the reference; returns the selections that rounding excused."""
    budget = grid_budget(name)
    twin = Twin(name, budget, page_size, shapes, seed=seed, backend=backend)
    lengths = boundary_lengths(page_size, budget)
    requests = twin.admit(len(lengths))
    twin.extend(requests, [length - 1 for length in lengths], compare=False)
    for _ in range(STEPS):
        twin.step(requests)
    twin.check_storage()
    assert twin.tally.excused <= 1, "rounding decides a selection here and there, not often"
    return twin.tally.excused


def both_widths(group: int, head_dim: int) -> list[LayerShape]:
    """A layer for each number of KV heads; V is as wide as K except in the last one."""
    return [LayerShape(heads, group, head_dim, head_dim if heads < 5 else V_WIDTH) for heads in KV_HEADS]


def layers_of_all_groups(head_dim: int) -> list[LayerShape]:
    """A layer for each group and number of KV heads. V is narrower than K for every other group, another half of them
    for the next head_dim: each page size, group, head_dim and number of KV heads meets both."""
    shapes = []
    for place, group in enumerate(GROUPS):
        narrow = (place + HEAD_DIMS.index(head_dim)) % 2
        shapes += [LayerShape(heads, group, head_dim, V_WIDTH if narrow else head_dim) for heads in KV_HEADS]
    return shapes


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("name", "page_size"), CELLS)
def test_eager_equals_the_reference(name: str, page_size: int, head_dim: int) -> None:
    compare_with_reference("eager", name, page_size, layers_of_all_groups(head_dim), head_dim)


FEW = [  # flow, page size, group, head_dim
    ("block_sparse_attention", 33, 7, 80),
    ("gqa_block_sparse_attention", 5, 3, 20),
    ("gqa_quest_sparse_attention", 5, 7, 80),
    ("gqa_h2o_sparse_attention", 1, 3, 64),
    ("gqa_h2o_token_sparse_attention", 1, 3, 20),
    ("streaming_llm", 5, 24, 80),
]


@pytest.mark.parametrize(("name", "page_size", "group", "head_dim"), FEW)
def test_compiled_equals_the_reference(name: str, page_size: int, group: int, head_dim: int) -> None:
    compare_with_reference("compiled", name, page_size, both_widths(group, head_dim), group * 1000 + head_dim)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("name", "page_size"), CELLS)
def test_compiled_equals_the_reference_everywhere(name: str, page_size: int, group: int) -> None:
    excused = 0
    for head_dim in HEAD_DIMS:
        seed = group * 1000 + head_dim
        excused += compare_with_reference("compiled", name, page_size, both_widths(group, head_dim), seed)
    assert excused <= 1


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_prefill_equals_the_reference(page_size: int, head_dim: int, group: int) -> None:
    """Prefill does not depend on the flow: whole, then a second turn on top of it, ragged."""
    twin = Twin("streaming_llm", Budget(0, 1, 1), page_size, both_widths(group, head_dim), seed=group)
    p = page_size
    requests = twin.admit(5)
    twin.extend(requests, [1, max(1, p - 1), p, p + 1, 2 * p + 1])
    twin.extend(requests, [p, 1, 0, p + 1, 2])
    twin.check_storage()
