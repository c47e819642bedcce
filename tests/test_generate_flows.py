"""Generated kernels of whole flows beside the flows' own code in float64, in poisoned page-major memory."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import random_flows
from generated_world import close, make_world, run_beside_float64
from kvsieve.backends.triton.generate import Refused, folds, generate_score, generate_summarize, program, tuning
from kvsieve.backends.triton.generate.program import Generated, Variant
from kvsieve.backends.triton.generate.run import Launch
from kvsieve.backends.triton.launch import INTERPRETED
from kvsieve.flow import Flow, build_flow, load_flow
from kvsieve.graph import Geometry, trace_flow
from test_random_flows import FLOWS, run_beside_the_reference, traced
from test_vortex_flows import SHIPPED, USERS
from triton_device import DEVICE, NEEDS_GPU_OR_INTERPRETER

pytestmark = NEEDS_GPU_OR_INTERPRETER
PAGES = ("block_sparse_attention", "gqa_block_sparse_attention", "gqa_quest_sparse_attention", "h2o_sparse_attention",
         "gqa_h2o_sparse_attention", "h2o", "snapkv", "tova")  # fmt: skip
TOKENS = ("h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention")
GEOMETRIES = (  # page size, head_dim, group, KV heads: one head at a time; all in a row; products of 16 padded rows
    (5, 20, 3, 3),
    (33, 80, 7, 2),
    (1, 64, 4, 2),
    (4, 32, 4, 4),
    (3, 16, 1, 2),
)
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Sums of at most 80 products, then a few ops; summaries in 16 bits are stored with one rounding (or a cut, where
Triton's interpreter runs them) of each value."""


QUICK = {(5, torch.float32), (1, torch.float32), (4, torch.float32), (33, torch.bfloat16), (4, torch.bfloat16)}
"""Page sizes and dtypes of the quick suite."""
SETTINGS = [
    pytest.param(name, *geometry, dtype, marks=[pytest.mark.slow] * ((geometry[0], dtype) not in QUICK))
    for name in PAGES + TOKENS
    for geometry in GEOMETRIES
    for dtype in BOUNDS
    if name in PAGES or geometry[0] == 1  # the page size that flows over tokens require
]


@pytest.mark.parametrize(("name", "page", "width", "group", "heads", "dtype"), SETTINGS)
def test_shipped_flows(name: str, page: int, width: int, group: int, heads: int, dtype: torch.dtype) -> None:
    graphs = trace_flow(build_flow(name), Geometry(page, width, width, group))
    world = make_world(graphs, (1, 9, 0, 40, 2), heads, dtype, device=DEVICE)
    run_beside_float64(world, close(BOUNDS[dtype]))


@pytest.mark.parametrize("name", ["gqa_quest_sparse_attention", "h2o", *TOKENS])
def test_windows_of_several_chunks(name: str) -> None:
    """Windows longer than a tile of the last stage; combined results are those of all chunks."""
    flow = build_flow(name)
    graphs = trace_flow(flow, Geometry(1, 16, 16, 2))
    for dtype in (torch.float32, torch.bfloat16):
        world = make_world(graphs, (1500, 1, 1024), 1, dtype, device=DEVICE)
        run_beside_float64(world, close(BOUNDS[dtype]))


@pytest.mark.parametrize("name", ["gqa_quest_sparse_attention", "h2o", "block_sparse_attention"])
@pytest.mark.parametrize("more", [0, 700])
def test_a_long_request_among_short_ones(name: str, more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of all requests follow each other in one launch, which may have more room than there are pages."""
    dealt: list[int] = []
    usual = Launch._dealt
    monkeypatch.setattr(Launch, "_dealt", lambda *given: dealt.append(usual(*given)) or dealt[-1])
    monkeypatch.setattr(tuning, "MOST_PAGES", 64)
    graphs = trace_flow(build_flow(name), Geometry(1, 16, 16, 2))
    world = make_world(graphs, (3, 1, 900, 0, 64, 65, 1, 2, 0), 2, device=DEVICE)
    world.window = replace(world.window, most_pages=world.window.total_pages + more)
    run_beside_float64(world, close(BOUNDS[torch.float32]))
    assert any(dealt)


@pytest.mark.parametrize(
    ("left_out", "copied", "late"), [(0, False, True), (1, False, False), (0, True, False)], ids=str
)
def test_a_score_waits_for_queries_that_were_copied(
    left_out: int, copied: bool, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts beside the kernel just before only where that has written nothing that it reads."""
    seen: list[Any] = []
    monkeypatch.setattr(Generated, "launch", lambda self, variant, requests, width, call, *_: seen.append(call))
    graphs = trace_flow(build_flow("gqa_quest_sparse_attention"), Geometry(4, 16, 16, 3))
    world = make_world(graphs, (3, 5, 2), 2, device=DEVICE)
    rows = world.window.lengths[: 3 + left_out]
    window = replace(world.window, lengths=rows, settled=True)
    q = world.q.transpose(2, 3).contiguous().transpose(2, 3) if copied else world.q
    generate_score(graphs).run(q, world.pool, window)
    assert [call["settled"] for call in seen] == [late] and torch.equal(seen[0]["q_ptr"], q)


def test_queries_of_another_dtype_than_pages() -> None:
    """Then nothing runs on tensor cores: query values would be rounded."""
    graphs = trace_flow(build_flow("gqa_quest_sparse_attention"), Geometry(4, 32, 32, 4))
    world = make_world(graphs, (3, 20), 2, torch.bfloat16, q_dtype=torch.float32, device=DEVICE)
    run_beside_float64(world, close(BOUNDS[torch.bfloat16]))


def test_memory_in_which_heads_come_first() -> None:
    for name in ("block_sparse_attention", "h2o"):
        graphs = trace_flow(build_flow(name), Geometry(4, 32, 32, 4))
        world = make_world(graphs, (3, 20), 4, device=DEVICE, page_major=False)
        assert world.pool.k.stride(0) > world.pool.k.stride(1)
        run_beside_float64(world, close(BOUNDS[torch.float32]))


def run_random(seed: int) -> None:
    graphs = traced(seed)
    run_beside_float64(make_world(graphs, (1, 6, 0, 3), 2, seed=seed, device=DEVICE), close(1e-5))


@pytest.mark.parametrize("seed", range(0, FLOWS, 50 if INTERPRETED else 10))
def test_some_random_flows(seed: int) -> None:
    run_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FLOWS))
def test_all_random_flows(seed: int) -> None:
    run_random(seed)


POWERS = {(3, 7, 12): (4, 8, 16), (1, 5, 33): (1, 4, 8), (1, 5): (1, 4), (3, 5): (4, 8), (1, 3, 7): (1, 2, 4)}


@pytest.mark.parametrize("seed", [42, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(0, FLOWS, 14))])
def test_random_flows_in_the_runtime(seed: int) -> None:
    run_beside_the_reference(seed, "triton", DEVICE)


class PowersOfTwo(random.Random):
    """Draws such sizes instead of odd ones."""

    def choice(self, options: Any) -> Any:
        return super().choice(POWERS.get(options, options) if isinstance(options, tuple) else options)


@pytest.mark.parametrize("seeds", [range(1000, 1003), pytest.param(range(1003, 1080), marks=pytest.mark.slow)])
def test_random_flows_with_all_heads_in_a_row(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are powers of two: most kernels take all heads of a page at once."""
    monkeypatch.setattr(random_flows, "random", SimpleNamespace(Random=PowersOfTwo))
    uses: Counter[tuple[str, str]] = Counter()
    in_rows = 0
    for seed in seeds:
        graphs = trace_flow(*random_flows.random_flow(seed, uses))
        run_beside_float64(make_world(graphs, (1, 6, 0, 3), 2, seed=seed, device=DEVICE), close(1e-5))
        in_rows += any(kernel.wide for kernel in generate_score(graphs).built(Variant(2, None)).kernels)
    assert in_rows > len(seeds) / 2


@pytest.mark.parametrize(
    "spec",
    [pytest.param(one, marks=[pytest.mark.slow] * (i % 5 > 0)) for i, one in enumerate((*USERS, *SHIPPED))],
    ids=lambda spec: spec.rpartition(":")[2],
)
def test_flows_in_op_form(spec: str) -> None:
    flow = load_flow(spec)
    geometry = Geometry(flow.page_size or 5, 20, 20 if flow.equal_widths else 12, 7)
    run_beside_float64(make_world(trace_flow(flow, geometry), (1, 6, 0, 9), 2, device=DEVICE), close(2e-6))


# What is generated


class Scan(Flow):
    """Every kind of meeting of pages, over several chunks."""

    def init_state(self, page_size: int, head_dim: int) -> Mapping[str, torch.Tensor]:
        return {"trail": torch.zeros(2), "seen": torch.zeros((), dtype=torch.int64)}

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"first": k[0], "big": k.abs().amax() > 2.5}

    def score(
        self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        logits = pages["first"] @ q[0] * 0.1
        near = torch.nn.functional.max_pool1d(logits[None], 5, 1, 2)[0]
        rest = torch.nn.functional.avg_pool1d(pages["trail"].T, 3, 1, 1).sum(0)
        run = (
            logits.softmax(0).cumsum(0)
            + logits.logcumsumexp(0) * 0.1
            + (logits.var(0, correction=0) - logits.min() + 1).sqrt()
        )
        scores = near + rest + run + torch.where(pages["big"], 0.1, -0.2) + 8 / (pages["age"] + 8)
        seen = pages["seen"] + pages["big"].cumsum(0) + (pages["position"] > 9).long()
        trail = torch.stack([scores.tanh(), pages["trail"][:, 0] * 0.5], 1)
        return scores, {"trail": trail, "seen": seen}


@pytest.mark.parametrize("heads", [1, 2])
def test_pages_meet_over_several_chunks(heads: int) -> None:
    graphs = trace_flow(Scan(), Geometry(3, 20, 5, 3))
    world = make_world(graphs, (1100, 0, 1, 37), heads, device=DEVICE)
    run_beside_float64(world, close(5e-6))


class Late(Flow):
    """New state that is known before the scores which still read the old one."""

    def init_state(self, page_size: int, head_dim: int) -> Mapping[str, torch.Tensor]:
        return {"trail": torch.zeros(())}

    def score(
        self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        old = pages["trail"]
        return (pages["k"][:, 0] @ q.mean(0)).softmax(0) + old, {"trail": old * 0.5 + 1}


class Padding(Flow):
    """What padding holds is no zero: exp(0) = 1."""

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        product = torch.einsum("wpd,gd->gwp", pages["k"].exp(), (q * 0.3).exp()).mean(2)
        return product.amax(0) * 0.05 + (pages["k"].exp() * q[0].exp()).sum((1, 2)) * 0.01


@pytest.mark.parametrize("flow", [Late, Padding])
def test_state_and_padding(flow: type[Flow]) -> None:
    world = make_world(trace_flow(flow(), Geometry(5, 20, 20, 3)), (3, 0, 600), 2, device=DEVICE)
    run_beside_float64(world, close(BOUNDS[torch.float32]))


@pytest.mark.parametrize("gathered", [8, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gqa_block_sparse_attention", "h2o", TOKENS[0]])
def test_many_chunks_are_combined_in_several_rounds(name: str, gathered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of few pages, few chunks at once: by each program of the next stage, or by a kernel in between."""
    monkeypatch.setattr(program, "GATHERED", gathered)
    monkeypatch.setattr(tuning, "MOST_PAGES", 4)
    monkeypatch.setattr(folds, "COMBINED", 4)
    graphs = trace_flow(build_flow(name), Geometry(1, 16, 16, 2))
    for dtype in (torch.float32, torch.bfloat16):
        world = make_world(graphs, (70, 32, 1), 2, dtype, device=DEVICE)
        world.q *= 4
        run_beside_float64(world, close(BOUNDS[dtype]))


def test_only_stored_values_go_to_tensor_cores() -> None:
    """Computed values of pages would be rounded to 16 bits."""

    class Bent(Flow):
        def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
            return (q @ pages["k"][:, 0].tanh().clamp(min=0).T).amax(0)

    graphs = trace_flow(Bent(), Geometry(1, 16, 16, 4))
    assert "tl.dot(" not in generate_score(graphs).source
    run_beside_float64(make_world(graphs, (3, 20), 2, torch.bfloat16, device=DEVICE), close(BOUNDS[torch.float32]))


class Parts(Flow):
    """An envelope of each of four parts of a page."""

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        parts = k.unflatten(0, (4, -1))
        return {"high": parts.amax(1), "low": parts.amin(1)}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        q = q[:, None, None]
        return torch.maximum(q * pages["high"], q * pages["low"]).sum(-1).amax((0, 2))


@pytest.mark.parametrize("group", [4, 3, 8, 16])
def test_no_field_is_padded_for_tensor_cores(group: int) -> None:
    """Few query rows are not repeated; parts of a page are rows of a product."""
    graphs = trace_flow(Parts(), Geometry(8, 16, 16, group))
    (kernel,) = generate_score(graphs).built(Variant()).kernels
    assert kernel.dots == 2 and tuning.fewest_pages(kernel) == 4
    loads = re.findall(r"tl.load\(\s*(?:high|low)_ptr.*?mask=([^\n]*)", kernel.source, re.DOTALL)
    assert len(loads) == 2 and not any("<" in mask for mask in loads)
    for dtype in (torch.bfloat16, torch.float16):
        run_beside_float64(make_world(graphs, (3, 20, 0, 1), 2, dtype, device=DEVICE), close(BOUNDS[dtype]))


class Rotated(Flow):
    """Products with a part of a constant; what would be larger than its parts is left to the kernel."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.basis = torch.randn(64, 64, generator=generator, dtype=torch.float64)
        self.weights = torch.rand(4, generator=generator)

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"low": k @ self.basis[: k.shape[-1], 3:10:2].float()}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        low = q @ self.basis[: q.shape[-1], 3:10:2].float()
        outer = self.weights[:, None] * self.weights.flip(0)
        return (pages["low"] @ outer @ low.T).amax((1, 2))


def test_what_is_made_of_constants_is_computed_once() -> None:
    """A kernel loads the part of a constant that it needs, and nothing else of it."""
    graphs = trace_flow(Rotated(), Geometry(5, 20, 20, 3))
    source = generate_score(graphs).source
    assert "tl.gather(" not in source and "tl.arange(0, 64)" not in source
    run_beside_float64(make_world(graphs, (1, 9, 0, 40), 2, device=DEVICE), close(BOUNDS[torch.float32]))


def test_results_are_the_same_bits_again() -> None:
    graphs = trace_flow(build_flow("h2o"), Geometry(1, 16, 16, 2))
    results = []
    for _ in range(2):
        world = make_world(graphs, (1500, 3), 2, torch.bfloat16, device=DEVICE)
        generate_summarize(graphs).run(world.pool, world.blocks())
        results.append(generate_score(graphs).run(world.q, world.pool, world.window))
    first, second = (torch.cat([one[i, :, :width] for i, width in enumerate((1500, 3))], 1) for one in results)
    assert torch.equal(first, second)


def test_source_reads_like_the_flow() -> None:
    """Names of fields and graph nodes, the user's lines, a shape with each value."""
    source = generate_score(trace_flow(build_flow("h2o"), Geometry(16, 128, 128, 4))).source
    for text in ('# promise = torch.softmax(scale * q @ pages["k_mean"].T, -1).sum(0)', "k_mean = tl.load(",
                 "mass_sum = tl.load(", "# [W, 128]", "matmul = ", "# [4, W]", "def h2o_score_1("):  # fmt: skip
        assert text in source
    lines = [line for line in source.splitlines() if not line.lstrip().startswith("#")]
    assert sum(len(line) > 120 for line in lines) * 20 < len(lines), "few lines are longer than a screen is wide"


def test_the_bound_of_an_envelope_is_two_products() -> None:
    """Only where summarize proves which end is larger."""

    class Free(Flow):
        def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
            return {"k_max": k.amax(0), "k_min": v.amin(0)}

        score = type(build_flow("gqa_quest_sparse_attention")).score

    geometry = Geometry(4, 32, 32, 4)
    quest = generate_score(trace_flow(build_flow("gqa_quest_sparse_attention"), geometry)).source
    assert quest.count("tl.dot(") == 2
    graphs = trace_flow(Free(), geometry)
    assert "tl.dot(" not in generate_score(graphs).source
    run_beside_float64(make_world(graphs, (3, 20), 2, torch.bfloat16, device=DEVICE), close(BOUNDS[torch.bfloat16]))


def test_scratch_is_small() -> None:
    """Between stages there are values per page, never copies of fields."""
    for name in ("h2o", "gqa_block_sparse_attention"):
        program = generate_score(trace_flow(build_flow(name), Geometry(16, 128, 128, 4)))
        stored = [one for one in program.scratch.values() if not one.per_chunk]
        assert [one.elements for one in stored] == [4], "one logit for each query head"


def test_too_large_a_page_is_refused() -> None:
    class Outer(Flow):
        def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
            k = pages["k"]
            return (k[:, :, None, :, None] * k[:, None, :, None, :]).tanh().amax((1, 2, 3, 4))

    with pytest.raises(Refused, match="Outer score holds 4194304 values of one page at once, above 262144"):
        generate_score(trace_flow(Outer(), Geometry(16, 128, 128, 2)))
