"""The eager backend on a GPU: the oracle's checks, and decode steps that never wait for the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvsieve import Budget, Runtime
from kvsieve.flow import build_flow, list_flows
from kvsieve.verify.subject import Subject
from kvsieve.verify.suite import CHECKS, run_check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SKIPPED_HERE = {"planted", "long context"}  # long runs that say nothing about a device
FLOWS = [name for name in list_flows() if name != "streaming_llm"]


@pytest.mark.parametrize("check", [check for check in CHECKS if check.name not in SKIPPED_HERE], ids=lambda c: c.name)
@pytest.mark.parametrize("flow", [*FLOWS, "streaming_llm"])
def test_the_oracle_passes_on_a_gpu(flow: str, check: object) -> None:
    outcome = run_check(check, Subject(build_flow(flow), device="cuda"))
    assert outcome.error is None, outcome.error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_dtypes(dtype: torch.dtype) -> None:
    subject = Subject(build_flow("gqa_quest_sparse_attention"), device="cuda", dtype=dtype)
    for check in CHECKS:
        if check.name in ("iid", "life cycle", "unselected NaN"):
            outcome = run_check(check, replace(subject))
            assert outcome.error is None, outcome.error


@pytest.mark.parametrize("flow", FLOWS)
def test_a_decode_step_never_waits_for_the_device(flow: str) -> None:
    built = build_flow(flow)
    runtime = Runtime(built, Budget(3), page_size=built.page_size or 16)
    requests = [runtime.admit() for _ in range(3)]
    counts = [200, 40, 130]

    def draw(tokens: int) -> tuple[torch.Tensor, ...]:
        sizes = ((tokens, 6, 64), (tokens, 2, 64), (tokens, 2, 64))
        return tuple(torch.randn(size, device="cuda") for size in sizes)

    runtime.extend(requests, counts).attend(0, *draw(sum(counts)))
    for step in range(20):
        q, k, v = draw(3)
        if step:  # the first step may build what later ones reuse
            torch.cuda.set_sync_debug_mode("error")
        try:
            result = runtime.step(requests).attend(0, q, k, v)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(result.out).all() and runtime.stats.steps == 20
