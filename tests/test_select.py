"""Page selection beside the reference's ranking, on scores chosen to go wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.backends.base import Selection
from kvsieve.backends.compiled import native
from kvsieve.backends.select import compose, order_key, top_pages
from kvsieve.plan import Quota
from kvsieve.reference import rank
from support import bare_window

DENORMAL = 2.0**-149
LARGEST = 3.4028234663852886e38
SPECIAL = [0.0, -0.0, 1.0, -1.0, math.nan, -math.nan, math.inf, -math.inf, DENORMAL, -DENORMAL, LARGEST, -LARGEST]

scores_strategy = st.lists(
    st.one_of(st.sampled_from(SPECIAL), st.floats(width=32), st.integers(-2, 2).map(float)), min_size=1, max_size=40
)


def select_one(scores: Sequence[float], k: int) -> list[int]:
    """Window indices that :func:`top_pages` chooses for one segment, its padding cut off."""
    tensor = torch.tensor(scores, dtype=torch.float32)
    width = len(scores)
    chosen = top_pages(tensor[None, None], torch.ones(1, width, dtype=torch.bool), torch.tensor([k]), max(k, 1))[0, 0]
    return [i for i in chosen.tolist() if i < width]


def expected(scores: Sequence[float], k: int) -> list[int]:
    return sorted(rank(torch.tensor(scores, dtype=torch.float32))[:k])


@given(scores_strategy, st.data())
@settings(max_examples=400)
def test_top_pages_equals_rank(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(scores)))
    assert select_one(scores, k) == expected(scores, k)


@given(st.lists(st.tuples(scores_strategy, st.integers(0, 40)), min_size=1, max_size=5))
@settings(max_examples=200)
def test_ragged_batch_with_its_own_k_each(rows: list[tuple[list[float], int]]) -> None:
    """Padding, whatever it holds, is never chosen; every request gets exactly its k."""
    width = max(len(scores) for scores, _ in rows)
    topk = [min(k, len(scores)) for scores, k in rows]
    padded = [[*scores, *[math.inf] * (width - len(scores))] for scores, _ in rows]
    valid = torch.arange(width) < torch.tensor([len(scores) for scores, _ in rows])[:, None]
    twice = torch.tensor(padded, dtype=torch.float32)[:, None].repeat(1, 2, 1)
    chosen = top_pages(twice, valid, torch.tensor(topk), max(max(topk), 1))
    for i, (scores, _) in enumerate(rows):
        for head in range(2):
            row = chosen[i, head].tolist()
            assert row[: topk[i]] == expected(scores, topk[i])
            assert row[topk[i] :] == [width] * (len(row) - topk[i])


@given(st.floats(width=32), st.floats(width=32))
@settings(max_examples=500)
def test_keys_order_as_scores_do(a: float, b: float) -> None:
    first, second = order_key(torch.tensor([a, b])).tolist()
    if math.isnan(a) or math.isnan(b):
        assert (first < second) == (math.isnan(a) and not math.isnan(b))
    else:
        assert (first < second) == (a < b) and (first == second) == (a == b)


@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("width", [1, 2, 17, 300])
def test_all_equal_keeps_the_oldest(value: float, width: int) -> None:
    for k in {0, 1, width // 2, width}:
        assert select_one([value] * width, k) == list(range(k))


def test_order_of_special_values() -> None:
    ladder = [math.inf, LARGEST, 1.0, DENORMAL, 0.0, -DENORMAL, -1.0, -LARGEST, -math.inf, math.nan]
    for k in range(len(ladder) + 1):
        assert select_one(ladder, k) == list(range(k))
        assert select_one(ladder[::-1], k) == list(range(len(ladder) - k, len(ladder)))


def test_zeros_of_both_signs_are_one_rank() -> None:
    assert select_one([-0.0, 0.0, -0.0, 0.0], 2) == [0, 1]
    assert select_one([0.0, -0.0, 0.0], 2) == [0, 1]


def test_nan_is_chosen_only_when_nothing_else_is_left() -> None:
    scores = [math.nan, -math.inf, math.nan, 5.0]
    assert [select_one(scores, k) for k in range(5)] == [[], [3], [1, 3], [0, 1, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("width", [32_767, 32_769, 70_001])
def test_long_windows(width: int, generator: torch.Generator) -> None:
    """No 16-bit page numbers, and ties in their tens of thousands."""
    for scores in (torch.randn(width, generator=generator), torch.randint(0, 3, (width,), generator=generator).float()):
        scores[-1] = 9.0
        for k in (1, 1000, width - 1):
            assert select_one(scores.tolist(), k) == expected(scores.tolist(), k)


def test_deterministic(generator: torch.Generator) -> None:
    scores = torch.randint(0, 4, (3, 2, 5000), generator=generator).float()
    valid, topk = torch.ones(3, 5000, dtype=torch.bool), torch.tensor([7, 900, 4999])
    first = top_pages(scores, valid, topk, 4999)
    assert all(torch.equal(first, top_pages(scores.clone(), valid, topk, 4999)) for _ in range(5))


# compose: sink + chosen + recent


def select_batch(
    pages: Sequence[int], sink: int, recent: int, topk: Sequence[int], scores: Sequence[Sequence[float]], heads: int = 2
) -> tuple[Selection, list[list[int]]]:
    """Selections of requests with ``pages`` pages each, and what the reference chooses. Scores per request [W]."""
    kept = [sink + k + recent for k in topk]
    count = [min(s, keep) for s, keep in zip(pages, kept, strict=True)]
    scored = [i for i, (s, keep) in enumerate(zip(pages, kept, strict=True)) if s > keep]
    widths = [pages[i] - sink - recent for i in scored]
    window, best = None, None
    if scored:
        width = max(widths)
        ks = torch.tensor([topk[i] for i in scored])
        window = bare_window(widths, ks, scored)
        rows = torch.stack([torch.tensor([*scores[i], *[math.nan] * (width - len(scores[i]))]) for i in scored])
        if window.max_topk:
            best = top_pages(rows[:, None].repeat(1, heads, 1), window.valid, ks, window.max_topk)
    quota = Quota(
        sink, recent, torch.tensor(pages), torch.tensor(count), max(count), list(count) != list(pages), window
    )
    wanted = []
    for i, s in enumerate(pages):
        if s <= kept[i]:
            wanted.append(list(range(s)))
            continue
        chosen = [sink + j for j in expected(scores[i], topk[i])]
        wanted.append([*range(sink), *chosen, *range(s - recent, s)])
    composed = compose(best, quota, heads)
    ranked = rows[:, None].expand(-1, heads, -1) if scored else None
    compiled = native.select(ranked, quota, heads)
    assert torch.equal(
        compiled.pages[compiled.listed().expand(compiled.pages.shape)],
        composed.pages[composed.listed().expand(composed.pages.shape)],
    )
    return composed, wanted


@given(st.data())
@settings(max_examples=300)
def test_compose_keeps_sink_and_recent_exactly(data: st.DataObject) -> None:
    sink, recent = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 4))
    batch = data.draw(st.integers(1, 4))
    pages = [data.draw(st.integers(1, 25)) for _ in range(batch)]
    topk = [data.draw(st.integers(0, 8)) for _ in range(batch)]
    values = st.sampled_from([*SPECIAL, 2.0, 3.0])
    scores = [[data.draw(values) for _ in range(max(0, s - sink - recent))] for s in pages]
    selection, wanted = select_batch(pages, sink, recent, topk, scores)
    listed = selection.listed().expand(selection.pages.shape)
    for i, pages_wanted in enumerate(wanted):
        for head in range(2):
            row = selection.pages[i, head][listed[i, head]].tolist()
            assert row == pages_wanted
            assert row == sorted(set(row)) and row[-1] == pages[i] - 1


def test_selection_counts_tokens_of_a_partial_page() -> None:
    selection = Selection(torch.tensor([[[0, 2]], [[0, 0]]]), torch.tensor([2, 1]))
    tokens = selection.tokens(4, torch.tensor([10, 3]))
    assert tokens.sum((1, 2, 3)).tolist() == [6, 3]
    assert tokens[0, 0, 1].tolist() == [True, True, False, False]
