"""Steps of a graph on the Triton backend beside ordinary steps of PyTorch ops: one life, many kinds of step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kvsieve import Budget, Runtime
from kvsieve.backends.triton.generate import stages
from kvsieve.backends.triton.launch import INTERPRETED
from kvsieve.flow import Flow, build_flow
from kvsieve.mass import AttentionMass
from kvsieve.retention import Evict
from kvsieve.stepgraph import StepGraph

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1"
)
DEVICE = "cpu" if INTERPRETED else "cuda"
HEADS, GROUP, WIDTH, V_WIDTH = 3, 3, 20, 12


class Everything(Flow):
    """Summaries of K and V, state, mass, and projected queries, in two stages."""

    mass = AttentionMass(decay=0.9)

    def __init__(self) -> None:
        self.basis = torch.randn(WIDTH, 7, generator=torch.Generator().manual_seed(0)) / 4

    def init_state(self, page_size: int, head_dim: int) -> Mapping[str, torch.Tensor]:
        return {"trail": torch.full((2,), 0.5)}

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"low": k.mean(0) @ self.basis, "size": v.abs().amax(0)}

    def score(
        self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        shares = (pages["low"] @ (q @ self.basis).T).softmax(0).amax(1) * pages["size"].sum(1)
        scores = shares + 0.1 * pages["trail"].sum(1) + pages["mass_sum"]
        return scores, {"trail": pages["trail"] * 0.5 + shares[:, None]}


def lives(flow: Flow, page: int, lengths: list[int], **where: Any) -> None:
    """Two runtimes; outputs and lse of every step agree, whatever happens to their requests in between."""
    torch.manual_seed(page)
    runtimes = [Runtime(flow, page_size=page, backend=name, **where) for name in ("eager", "triton")]
    requests = [[runtime.admit() for _ in lengths] for runtime in runtimes]

    def draw(tokens: int) -> list[torch.Tensor]:
        sizes = ((HEADS * GROUP, WIDTH), (HEADS, WIDTH), (HEADS, V_WIDTH))
        return [torch.randn(tokens, *size, device=DEVICE) for size in sizes]

    def extend(counts: list[int]) -> None:
        new = draw(sum(counts))
        for runtime, mine in zip(runtimes, requests, strict=True):
            runtime.extend(mine, counts).attend(0, *new)

    def body(call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        result = call.attend(0, *inputs)
        return result.out, result.lse

    extend(lengths)
    inputs = draw(len(lengths))
    graph = StepGraph(runtimes[1], requests[1], max(lengths) + 20 * page, body, DEVICE)
    for step in range(11):
        for old, new in zip(inputs, draw(len(lengths)), strict=True):
            old.copy_(new)
        want, got = body(runtimes[0].step(requests[0])), graph.step()
        for mine, theirs in zip(got, want, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5), f"step {step}"
        if step == 4:
            extend([0, page + 1, 2])
        for runtime, mine in zip(runtimes, requests, strict=True):
            if step == 2:
                runtime.fork(mine[0])
            if step == 6:
                runtime.preempt(mine[1])
                runtime.resume(mine[1])
            if step == 8 and runtime.eviction is None and not runtime.tables.stateful:
                runtime.crop([mine[0]], [runtime.length(mine[0]) - page])
    assert runtimes[0].stats == runtimes[1].stats


@pytest.mark.parametrize("page", [1, 5])
def test_a_flow_of_everything(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "ASKED_PRODUCTS", 64)
    lives(Everything(), page, [9 * page, 1, 4 * page + page // 2 + 1], budget=Budget(2, 1, 2))


def test_a_flow_without_state() -> None:
    lives(build_flow("gqa_quest_sparse_attention"), 3, [17, 2, 30], budget=Budget(2, 1, 1, 0.3))


def test_evicted_tokens() -> None:
    lives(build_flow("h2o"), 4, [13, 3, 12], retention=Evict(13, 2, 3))
