"""State of a flow in a runtime: where it starts, whose it is, and what a page knows of its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from kvsieve.budget import Budget
from kvsieve.flow import Flow
from kvsieve.verify.data import LayerShape
from support import Twin

# State


class Counts(Flow):
    """State that counts in how many steps a page was in the window, in int64, beside a float64 sum of its ages."""

    def init_state(self, page_size: int, head_dim: int) -> Mapping[str, torch.Tensor]:
        return {"seen": torch.tensor([5, -3]), "ages": torch.full((), 0.25, dtype=torch.float32)}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> Any:
        state = {"seen": pages["seen"] + 1, "ages": pages["ages"] + pages["age"]}
        return (pages["k"] * q[0]).sum((1, 2)), state


@pytest.mark.parametrize("page_size", [1, 4])
def test_state_starts_at_its_initial_value_and_moves_under_budget(page_size: int) -> None:
    p = page_size
    twin = Twin(Counts(), Budget(10, 1, 2), p, [LayerShape(2, 2, 8, 8)])
    request, other = twin.admit(2)
    twin.extend([request, other], [2 * p + 1, 1])
    state, rows = twin.pool(0).state, twin.runtime.tables[request].rows
    assert (state["seen"][:, rows] == torch.tensor([5, -3])).all() and (state["ages"][:, rows] == 0.25).all()
    steps_in_window = dict.fromkeys(range(9), 0)
    for length in range(2 * p + 2, 8 * p):
        twin.step([request, other])
        for page in range(1, -(-length // p) - 2):
            steps_in_window[page] += 1
        state, rows = twin.pool(0).state, twin.runtime.tables[request].rows
        for page, row in enumerate(rows):
            assert (state["seen"][:, row] == torch.tensor([5, -3]) + steps_in_window[page]).all(), page
    assert steps_in_window[1] > 2, "the request never exceeded its budget, and its state moved"
    twin.check_storage()


def test_state_belongs_to_request_page_and_head() -> None:
    """Four segments with different keys, many steps: the accumulators stay apart (and equal to the reference's)."""
    twin = Twin("gqa_h2o_token_sparse_attention", Budget(2, 1, 1), 1, [LayerShape(2, 2, 8, 8)])
    requests = twin.admit(2)
    twin.extend(requests, [12, 12])
    for _ in range(6):
        twin.step(requests)
    twin.check_storage()
    heavy = torch.stack([twin.pool(0).state["heavy"][:, twin.runtime.tables[r].rows] for r in requests]).flatten(0, 1)
    assert len({tuple(row.tolist()) for row in heavy}) == 4


class Places(Flow):
    """Scores are positions and ages: both are exact whole numbers."""

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return pages["position"] * 1000 + pages["age"]


@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize("page_size", [1, 5])
def test_position_and_age(page_size: int, sink: int) -> None:
    twin = Twin(Places(), Budget(1, sink, 1), page_size, [LayerShape(1, 1, 4, 4)])
    requests = twin.admit(2)
    twin.extend(requests, [10 * page_size, 6 * page_size + 1])
    for step in range(1, page_size + 2):
        (result,) = twin.step(requests)
        assert result.scores is not None
        for i, length in enumerate((10 * page_size + step, 6 * page_size + 1 + step)):
            pages = range(sink, -(-length // page_size) - 1)
            expected = [page * page_size * 1000 + length - 1 - (page * page_size + page_size - 1) for page in pages]
            assert result.scores[i, 0, : len(expected)].tolist() == expected
