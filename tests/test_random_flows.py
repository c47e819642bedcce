"""The op set is proved here: random flows, lowered to batched ragged graphs, agree with their own code in float64.

Every flow runs for segments of different window widths side by side, W = 1 among them, with NaN (and large integers)
where windows are padded. Why ``flow_compare.BOUND`` is what it is: the grammar keeps every value within [-3, 3] and
every slope of order 1, so that ten chained ops, each good to a few units of 2**-24 of its largest operand, stay within
some hundred units; 1e-5 is 170 of them, five times the worst that the seeds show.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch

from flow_compare import check, compare
from kvsieve.budget import Budget
from kvsieve.flow import Flow
from kvsieve.graph import FlowGraphs, Geometry, trace_flow
from kvsieve.ops import row_of, table
from kvsieve.reference import ReferenceSegment
from kvsieve.runtime import Runtime
from random_flows import random_flow

FLOWS = 300
QUICK = 200
"""Of them, in the quick suite."""
CHUNK = 20
LEAST_USES = 3


@cache
def generated() -> list[tuple[Flow, Geometry]]:
    """All flows; each draws what its forerunners drew least."""
    uses: Counter[tuple[str, str]] = Counter()
    return [random_flow(seed, uses) for seed in range(FLOWS)]


@cache
def traced(seed: int) -> FlowGraphs:
    return trace_flow(*generated()[seed])


CHUNKS = [pytest.param(n, marks=[pytest.mark.slow] * (n * CHUNK >= QUICK)) for n in range(FLOWS // CHUNK)]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_lowered_flows_agree_with_float64(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        compare(traced(seed), seed)


def test_every_row_of_the_table_is_used() -> None:
    counts: Counter[str] = Counter()
    for seed in range(FLOWS):
        graphs = traced(seed)
        rows = {row_of(node.target) for graph in (graphs.summarize, graphs.score) if graph for node in graph.nodes}
        counts.update(row for row in rows if row)
    rare = {row: counts[row] for row in table if counts[row] < LEAST_USES}
    assert not rare, f"rows of the op table that fewer than {LEAST_USES} random flows use: {rare}"


@pytest.mark.parametrize("seed", range(0, FLOWS, 7))
def test_flows_in_the_runtime_agree_with_the_reference(seed: int) -> None:
    run_beside_the_reference(seed, "eager")


@pytest.mark.parametrize("seed", [3, 58])
def test_some_flows_compiled_agree_with_the_reference(seed: int) -> None:
    run_beside_the_reference(seed, "compiled")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FLOWS))
def test_all_flows_compiled_agree_with_the_reference(seed: int) -> None:
    run_beside_the_reference(seed, "compiled")


def run_beside_the_reference(seed: int, backend: str, device: torch.device | str = "cpu") -> None:
    """Two prefill chunks and three steps of a ragged batch, two KV heads: outputs, lse, scores, selections."""
    flow, geometry = generated()[seed]
    torch.manual_seed(seed)
    p, budget = geometry.page_size, Budget(topk=1, sink=1, recent=1)
    lengths, heads = (1, 4 * p + 1, 6 * p + 2), 2
    runtime = Runtime(flow, budget, page_size=p, backend=backend)
    requests = [runtime.admit() for _ in lengths]
    segments = [[ReferenceSegment(flow, budget, p, layer=geometry.layer) for _ in range(heads)] for _ in lengths]

    def draw(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        widths = (heads * geometry.group, geometry.head_dim), (heads, geometry.head_dim), (heads, geometry.v_head_dim)
        q, k, v = (torch.randn(tokens, *width) for width in widths)
        return q, k, v

    first = [-(-length // 2) for length in lengths]
    for counts in (first, [length - count for length, count in zip(lengths, first, strict=True)]):
        q, k, v = draw(sum(counts))
        runtime.extend(requests, counts).attend(geometry.layer, *(x.to(device) for x in (q, k, v)))
        starts = torch.tensor([0, *counts]).cumsum(0).tolist()
        for i, h in product(range(len(lengths)), range(heads)):
            for token in range(starts[i], starts[i + 1]):
                segments[i][h].write(k[token, h], v[token, h])
    for _ in range(3):
        q, k, v = draw(len(lengths))
        result = runtime.step(requests).attend(geometry.layer, *(x.to(device) for x in (q, k, v)))
        grouped = q.unflatten(1, (heads, geometry.group))
        for i, h in product(range(len(lengths)), range(heads)):
            expected = segments[i][h].step(grouped[i, h], k[i, h], v[i, h])
            assert result.selection.pages[i, h, : result.selection.count[i]].tolist() == expected.selection
            check("out", result.out[i].unflatten(0, (heads, geometry.group))[h].cpu(), expected.out)
            check("lse", result.lse[i, h].cpu(), expected.lse)
