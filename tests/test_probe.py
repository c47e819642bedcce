"""The probe beside float64 arithmetic: exact mass, captured shares, recall, and the selections of the references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsieve.backends import get_backend
from kvsieve.backends.base import Selection
from kvsieve.budget import Budget
from kvsieve.evaluate.choosers import at_random, oracle
from kvsieve.evaluate.coverage import Coverage
from kvsieve.evaluate.probe import Chooser, Probe, Step
from kvsieve.runtime import Runtime

QUEST = "gqa_quest_sparse_attention"


class Decoding:
    """Two requests on a small pool, decoding random tokens; keeps q, K and what the probe was shown."""

    def __init__(
        self,
        page_size: int,
        group: int,
        head_dim: int,
        budget: Budget,
        flow: str = QUEST,
        choose: Chooser | None = None,
        scale: float | None = None,
        pages: int = 5,
    ) -> None:
        self.generator = torch.Generator().manual_seed(page_size * 100 + group)
        self.heads, self.group, self.head_dim = 2, group, head_dim
        self.seen: list[tuple[Step, Selection]] = []
        backend = Probe(get_backend("eager"), lambda *seen: self.seen.append(seen), choose)
        self.runtime = Runtime(flow, budget, page_size=page_size, backend=backend)
        self.lengths = [pages * page_size + 1, (pages + 2) * page_size]
        self.requests = [self.runtime.admit() for _ in self.lengths]
        self.keys: list[torch.Tensor] = []
        call = self.runtime.extend(self.requests, self.lengths)
        q, k, v = self.draw(sum(self.lengths))
        call.attend(0, q, k, v, scale=scale)
        self.keys = list(k.split(self.lengths))

    def draw(self, tokens: int) -> list[torch.Tensor]:
        sizes = (self.heads * self.group, self.heads, self.heads)
        return [torch.randn(tokens, size, self.head_dim, generator=self.generator) for size in sizes]

    def step(self, **options: Any) -> tuple[torch.Tensor, Any]:
        """One decode step: q [B, Hq, D] and the runtime's result."""
        q, k, v = self.draw(2)
        self.keys = [torch.cat([old, new[None]]) for old, new in zip(self.keys, k, strict=True)]
        return q, self.runtime.step(self.requests).attend(0, q, k, v, **options)

    def exact(self, q: torch.Tensor, row: int, head: int, **options: Any) -> list[float]:
        """Mass per page in float64, by a loop over tokens and query heads."""
        page_size, keys = self.runtime.page_size, self.keys[row][:, head].double()
        pages = [0.0] * -(-len(keys) // page_size)
        for g in range(self.group):
            logits = keys @ q[row, head * self.group + g].double() * options.get("scale", self.head_dim**-0.5)
            if "softcap" in options:
                logits = options["softcap"] * torch.tanh(logits / options["softcap"])
            extra = [options["sinks"][head * self.group + g].double()[None]] if "sinks" in options else []
            chances = torch.softmax(torch.cat([logits, *extra]), 0)
            for token in range(len(keys)):
                pages[token // page_size] += float(chances[token]) / self.group
        return pages


@pytest.mark.parametrize(("page_size", "group", "head_dim"), [(5, 3, 20), (1, 7, 12), (4, 1, 8)])
def test_mass_is_the_exact_attention_of_each_page(page_size: int, group: int, head_dim: int) -> None:
    sinks = torch.randn(2 * group, generator=torch.Generator().manual_seed(5))
    for options in ({}, {"scale": 0.7}, {"softcap": 1.5}, {"sinks": sinks}):
        decoding = Decoding(page_size, group, head_dim, Budget(2, 1, 1), scale=options.get("scale"))
        q, _ = decoding.step(**options)
        step, _ = decoding.seen[-1]
        for row in range(2):
            for head in range(2):
                expected = decoding.exact(q, row, head, **options)
                found = step.mass[row, head].tolist()
                assert found[: len(expected)] == pytest.approx(expected, abs=1e-6)
                assert not any(found[len(expected) :])  # pages that do not exist


@pytest.mark.parametrize("page_size", [1, 3, 5])
def test_shares_are_those_counted_by_hand(page_size: int) -> None:
    budget = Budget(2, 1, 1)
    decoding = Decoding(page_size, 3, 12, budget)
    coverage = Coverage(budget, 2)
    captured, inside, chosen, recall = ([[0.0, 0.0], [0.0, 0.0]] for _ in range(4))
    for _ in range(2 * page_size + 1):
        q, attended = decoding.step()
        coverage.add(4, *decoding.seen[-1])
        for row in range(2):
            for head in range(2):
                mass = decoding.exact(q, row, head)
                kept = attended.selection.pages[row, head, : int(attended.selection.count[row])].tolist()
                window = range(budget.sink, len(mass) - budget.recent)
                best = sorted(window, key=lambda page: -mass[page])[: budget.topk]
                captured[row][head] += sum(mass[page] for page in kept)
                inside[row][head] += sum(mass[page] for page in window)
                chosen[row][head] += sum(mass[page] for page in kept if page in window)
                recall[row][head] += len(set(best) & set(kept)) / budget.topk
    steps = 2 * page_size + 1
    assert coverage.layers == [4]
    for row in range(2):
        shares = coverage.shares(row)
        for head in range(2):
            assert shares["captured"][0][head] == pytest.approx(captured[row][head] / steps, abs=1e-4)
            assert shares["window"][0][head] == pytest.approx(chosen[row][head] / inside[row][head], abs=1e-4)
            assert shares["recall"][0][head] == pytest.approx(recall[row][head] / steps, abs=1e-4)
    assert min(map(min, recall)) / steps > 0.05  # neither is trivial
    assert page_size == 1 or max(map(max, recall)) / steps < 1


def test_rows_that_are_idle_count_nothing() -> None:
    decoding = Decoding(3, 3, 12, Budget(2, 1, 1))
    both, second = (Coverage(Budget(2, 1, 1), batch) for batch in (2, 3))
    second.active = [2, 0]
    decoding.step()
    both.add(0, *decoding.seen[-1])
    second.add(0, *decoding.seen[-1])
    assert second.shares(2) == both.shares(0) and second.shares(0) == both.shares(1)
    decoding.step()
    second.active = [0, 2]
    second.add(0, *decoding.seen[-1])
    assert second.shares(0) != both.shares(1)


@pytest.mark.parametrize("page_size", [1, 5])
def test_the_oracle_attends_the_exact_best_pages(page_size: int) -> None:
    budget = Budget(2, 1, 1)
    decoding = Decoding(page_size, 3, 20, Budget(0, 1, 3), "streaming_llm", oracle(budget))
    coverage = Coverage(budget, 2)
    for _ in range(page_size + 2):
        q, attended = decoding.step()
        step, selection = decoding.seen[-1]
        coverage.add(0, step, selection)
        for row in range(2):
            for head in range(2):
                mass = decoding.exact(q, row, head)
                window = range(1, len(mass) - 1)
                best = sorted(window, key=lambda page: (-mass[page], page))[:2]
                assert selection.pages[row, head, :4].tolist() == sorted([0, *best, len(mass) - 1])
                # What ran is what was chosen: the output is attention over those tokens.
                tokens = [t for t in range(len(decoding.keys[row])) if t // page_size in selection.pages[row, head]]
                keys = decoding.keys[row][tokens, head].double()
                logits = q[row, head * 3 : head * 3 + 3].double() @ keys.T * 20**-0.5
                assert torch.allclose(attended.lse[row, head].double(), torch.logsumexp(logits, -1), atol=1e-4)
    assert coverage.shares(0)["recall"] == [[1.0, 1.0]]


def test_random_pages_depend_on_salt_step_layer_and_head_alone() -> None:
    budget = Budget(8, 1, 1)
    salts = [11, 12]

    def draw(seed: int, layer: int = 0) -> list[list[list[int]]]:
        chooser = at_random(budget, lambda: [salt + seed for salt in salts], lambda step: layer)
        decoding = Decoding(1, 3, 8, Budget(0, 1, 9), "streaming_llm", chooser, pages=30)
        found = []
        for _ in range(3):
            decoding.step()
            found.append(decoding.seen[-1][1].pages.flatten(0, 1).tolist())
        return found

    first = draw(0)
    assert first == draw(0) and first != draw(1) and first != draw(0, layer=1)
    segments = [tuple(pages) for step in first for pages in step]
    assert len(set(segments)) > 6  # steps, requests and heads differ
    assert all(len(set(pages)) == len(pages) for pages in segments)


def test_everything_is_selected_under_budget_whatever_chooses() -> None:
    budget = Budget(40, 1, 1)
    for chooser in (None, oracle(budget), at_random(budget, lambda: [1, 2], lambda step: 0)):
        decoding = Decoding(3, 3, 12, budget, QUEST, chooser)
        coverage = Coverage(budget, 2)
        decoding.step()
        coverage.add(0, *decoding.seen[-1])
        for row in range(2):
            assert coverage.shares(row) == {name: [[1.0, 1.0]] for name in ("captured", "window", "recall")}
