"""Backends on a GPU: the oracle's checks, decode steps that never wait for the device, memory beyond 2**31 elements.

The oracle's checks of the Triton backend here are a subset that takes minutes; ``kvsieve verify --backend triton
--device cuda`` runs all of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvsieve import Budget, Runtime
from kvsieve.backends import get_backend
from kvsieve.backends.base import AttentionOptions
from kvsieve.flow import build_flow, list_flows
from kvsieve.graph import Geometry, trace_flow
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import MassRows, Quota, Rows, Writes
from kvsieve.stepgraph import StepGraph
from kvsieve.verify.subject import Subject
from kvsieve.verify.suite import CHECKS, run_check
from kvsieve.window import Window

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


QUICK = ("iid", "ties", "broken request", "options", "ratio", "life cycle", "mass life cycle", "unselected NaN",
         "eviction", "evicting lives")  # fmt: skip


@pytest.mark.parametrize("check", QUICK)
@pytest.mark.parametrize("flow", ["gqa_quest_sparse_attention", "h2o", "gqa_h2o_token_sparse_attention"])
def test_the_oracle_passes_on_triton(flow: str, check: str) -> None:
    (found,) = (one for one in CHECKS if one.name == check)
    outcome = run_check(found, Subject(build_flow(flow), backend="triton", device="cuda"))
    assert outcome.error is None, outcome.error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("check", ["iid", "life cycle", "unselected NaN"])
def test_sixteen_bit_dtypes_on_triton(check: str, dtype: torch.dtype) -> None:
    (found,) = (one for one in CHECKS if one.name == check)
    subject = Subject(build_flow("gqa_quest_sparse_attention"), backend="triton", device="cuda", dtype=dtype)
    outcome = run_check(found, subject)
    assert outcome.error is None, outcome.error


def test_offsets_beyond_two_to_the_31() -> None:
    """Every kernel of a step on blocks and state rows at the far end of a pool of 2.2 million, beside PyTorch ops."""
    flow = build_flow("h2o")
    geometry = Geometry(1, 128, 128, 4, 128**-0.5, 0)
    graphs = trace_flow(flow, geometry, {})
    heads, blocks, batch, pages = 8, 2_200_000, 3, 300
    device = torch.device("cuda")
    pool = LayerPool(
        heads, 1, 128, 128, torch.bfloat16, device, graphs.summary_fields, graphs.state_fields, page_major=True
    )
    pool.reserve(blocks, blocks)
    assert pool.k[:, -1].storage_offset() > 2**31
    table = (blocks - 1 - torch.randperm(batch * pages, device=device)).view(batch, pages)
    lengths = torch.full((batch,), pages, device=device)
    rows = Rows((pages - 1,) * batch, (1,) * batch, (pages,) * batch, table, lengths)
    new = torch.randn(2, batch * pages, heads, 128, device=device, dtype=torch.bfloat16)
    q = torch.randn(batch, heads, 4, 128, device=device, dtype=torch.bfloat16)
    topk = torch.full((batch,), 40, device=device)
    window = Window(
        torch.arange(batch, device=device), table, table, lengths, lengths - 3, pages - 3, 1, 1, topk, 40,
        batch * (pages - 3), torch.ones(batch, 1, device=device),
    )  # fmt: skip
    quota = Quota(1, 2, lengths, topk + 3, 43, True, window, 0, table)
    options = AttentionOptions(128**-0.5, mass=flow.mass)
    masses = MassRows(table, torch.ones(batch, device=device), {})
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    results = []
    itself = replace(options, mass_rows=masses)  # attend adds the mass
    triton = get_backend("triton")
    for backend, asked in ((triton, options), (triton, itself), (get_backend("eager"), options)):
        program = backend.prepare(graphs, device)
        for field in (*pool.state.values(), *pool.summaries.values()):
            field[:, table.flatten()] = 0
        backend.write(pool, Writes(table.flatten(), torch.zeros_like(table.flatten()), nothing, nothing), *new)
        backend.summarize(program, pool, table.flatten())
        scores = backend.score(program, q, pool, window)
        selection = backend.select(scores, quota, heads)
        out, lse, gain = backend.attend(q, pool, rows, selection, asked)
        if asked is itself:
            assert gain is None
        else:
            backend.add_mass(pool, rows, masses, selection, gain)
        mass = pool.state["mass"][:, table.flatten()].clone()
        results.append((scores[..., : pages - 3], selection.pages, out.float(), lse, mass))
    for name, *ours, theirs in zip(("scores", "pages", "out", "lse", "mass"), *results, strict=True):
        for mine in ours:
            assert torch.allclose(mine, theirs, rtol=1e-2 if name == "out" else 1e-4, atol=1e-4), name


@pytest.mark.parametrize("flow", ["gqa_quest_sparse_attention", "h2o"])
def test_fifty_runs_give_the_same_bits(flow: str) -> None:
    """A captured step of ragged requests, split and merged, replayed: outputs and scores never change."""
    runtime = Runtime(build_flow(flow), Budget(20, 1, 1), page_size=16, backend="triton")
    lengths = [3000, 17, 900]
    requests = [runtime.admit() for _ in lengths]

    def draw(tokens: int) -> list[torch.Tensor]:
        return [torch.randn(tokens, h, 128, device="cuda", dtype=torch.bfloat16) for h in (32, 8, 8)]

    runtime.extend(requests, lengths).attend(0, *draw(sum(lengths)))
    new = draw(3)
    graph = StepGraph(runtime, requests, 3100, lambda call: call.attend(0, *new))
    while graph.graph is None:
        result = graph.step()
    assert result.selection is not None and result.lse is not None
    state = runtime.layers[0].pool.state  # mass grows with every step: each replay begins with the same
    start = {name: field.clone() for name, field in state.items()}
    runs = []
    for _ in range(50):
        for name, field in state.items():
            field.copy_(start[name])
        graph.graph.replay()
        seen = (result.out, result.lse, result.selection.pages, *state.values())
        runs.append([x.contiguous().view(torch.uint8).clone() for x in seen])  # NaN equals itself in bytes
        assert all(torch.equal(x, y) for x, y in zip(runs[0], runs[-1], strict=True))
        del runs[1:]
