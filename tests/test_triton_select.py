"""Selection on a GPU beside a sort: exact, ties and special values included."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from kvsieve.backends.select import select_pages
from kvsieve.backends.triton import longrow
from kvsieve.backends.triton.select import PAIRED, select
from triton_device import DEVICE, NEEDS_GPU_OR_INTERPRETER
from triton_world import a_bit_apart, all_but_tied, quota_of, rankings

pytestmark = NEEDS_GPU_OR_INTERPRETER


SHORT: list[tuple[list[int], int, list[int]]] = [
    ([2, 2], 1, [0, 1]),
    ([3, 64], 2, [0, 1]),
    ([65, 7, 70], 6, [0, 2]),
    ([2046, 300], 64, [0, 1]),
]
"""Widths that may be searched by two bits a pass, pages to choose, and the requests that are scored."""


@pytest.mark.parametrize(
    ("widths", "k", "scored", "paired"),
    [
        *((*case, paired) for case in SHORT for paired in (PAIRED, 0)),
        ([2049, 2048], 2000, [0, 1], PAIRED),
        ([8192], 100, [0], PAIRED),
        ([8193, 5, 9001], 64, [0, 2], PAIRED),
        ([20000, 8200], 1024, [0, 1], PAIRED),
        pytest.param([33000], 8000, [0], PAIRED, marks=pytest.mark.slow),
        pytest.param([33000], 9000, [0], PAIRED, marks=pytest.mark.slow),
    ],
)
def test_selection_is_exact(
    widths: list[int], k: int, scored: list[int], paired: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages and blocks as by a sort on (score, age), by two bits a pass and by one; padding of shorter windows holds
    the best scores."""
    monkeypatch.setattr("kvsieve.backends.triton.select.PAIRED", paired)
    torch.manual_seed(sum(widths))
    quota = quota_of(widths, k, scored)
    assert quota.window is not None and quota.table is not None
    for scores in rankings(len(scored), 2, quota.window.width):
        for row, width in enumerate(widths[i] for i in scored):
            scores[row, :, width:] = math.inf
        chosen, wanted = select(scores.to(DEVICE), quota, 2), select_pages(scores.to(DEVICE), quota, 2)
        listed = wanted.listed().expand(wanted.pages.shape)
        assert torch.equal(chosen.pages[listed], wanted.pages[listed])
        assert torch.equal(chosen.blocks(quota.table)[listed], wanted.blocks(quota.table)[listed])


@pytest.mark.parametrize("few", [1, 62, 63, 64])
def test_pages_that_differ_by_a_bit(few: int) -> None:
    """More pages than a count of ten bits holds."""
    quota = quota_of([2046], 64, [0])
    for scores in (all_but_tied(2046, few).to(DEVICE), a_bit_apart(2046, 1100, few).to(DEVICE)):
        assert torch.equal(select(scores, quota, 1).pages, select_pages(scores, quota, 1).pages)


@pytest.mark.parametrize("count", [1023, 1024, 1025])
def test_as_many_alike_as_a_count_of_ten_bits_holds(count: int) -> None:
    """They reach every candidate of the search: three counts of so many do not fit in one number from 1,024 on."""
    quota = quota_of([2046], 64, [0])
    scores = torch.full((2046,), -1.0)
    scores[5::64] = 1.0
    others = torch.tensor([page for page in range(2046) if page % 64 != 5])[torch.randperm(2014)]
    scores[others[:count]] = 1.9999
    scores = scores.view(1, 1, -1).to(DEVICE)
    assert torch.equal(select(scores, quota, 1).pages, select_pages(scores, quota, 1).pages)


def test_a_bound_that_lets_too_many_or_too_few_through_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    quota = quota_of([9000], 64, [0])
    scores = torch.randn(1, 1, 9000)
    right = longrow.bitmap_of

    def wrong(word: int) -> object:
        def bitmap_of(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
            bitmap, found = right(*arguments)  # type: ignore[arg-type]
            return torch.full_like(bitmap, word), found

        return bitmap_of

    wanted = select_pages(scores.to(DEVICE), quota, 1).pages
    for word in (0, -1):
        monkeypatch.setattr("kvsieve.backends.triton.select.bitmap_of", wrong(word))
        assert torch.equal(select(scores.to(DEVICE), quota, 1).pages, wanted)


@pytest.mark.parametrize(("width", "k"), [(9000, 64), (20000, 4096), (60000, 6000)])
def test_a_bound_lets_the_best_pages_through(width: int, k: int) -> None:
    """Also where many are chosen: else every row is read once per bit."""
    quota = quota_of([width], k, [0])
    assert quota.window is not None
    torch.manual_seed(k)
    bitmap, _ = longrow.bitmap_of(torch.randn(1, 2, width).to(DEVICE), quota, quota.window)
    for words in bitmap[0].tolist():
        assert k <= sum((word & 0xFFFFFFFF).bit_count() for word in words) <= longrow.MOST
