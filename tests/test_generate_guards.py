"""What kernels may not be generated from: neighbours' state that is being written, wide values on tensor cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from generated_world import close, forms, make_world, run_beside_float64
from kvsieve.backends.triton.generate import (
    ScoreProgram,
    functions,
    generate_score,
    generate_summarize,
    program,
    tuning,
)
from kvsieve.backends.triton.generate.program import Variant
from kvsieve.backends.triton.launch import AT_ONCE, INTERPRETED, ONCE_WAITED
from kvsieve.flow import Flow, build_flow
from kvsieve.graph import Geometry, trace_flow
from triton_device import DEVICE, NEEDS_GPU_OR_INTERPRETER

pytestmark = NEEDS_GPU_OR_INTERPRETER


class Votes(Flow):
    """Scores by the state of neighbouring pages, all of which gets new values in the same step."""

    def init_state(self, page_size: int, head_dim: int) -> Mapping[str, torch.Tensor]:
        return {"trail": torch.zeros(())}

    def score(
        self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        votes = torch.nn.functional.avg_pool1d(pages["trail"][None], 5, 1, 2)[0]
        return votes + 0.1 * pages["k"][:, 0, 0], {"trail": pages["trail"] * 0.5 + 3}


def test_neighbours_state_is_read_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Across the borders of chunks, whose programs run in any order."""
    monkeypatch.setattr(tuning, "MOST_PAGES", 4)
    graphs = trace_flow(Votes(), Geometry(3, 20, 12, 3))
    assert len(generate_score(graphs).plan.stages) == 2
    run_beside_float64(make_world(graphs, (1, 30, 0, 13), 2, device=DEVICE), close(2e-6))


class Running(Flow):
    """A running sum over pages, and their sum."""

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits = pages["k"][:, 0] @ q[0] * 0.1
        return logits.cumsum(0) + logits.sum() * pages["position"] * 0.01


def test_a_running_sum_over_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that others would be put together first: it goes on from the chunks before its own."""
    monkeypatch.setattr(program, "GATHERED", 2)
    monkeypatch.setattr(tuning, "MOST_PAGES", 4)
    graphs = trace_flow(Running(), Geometry(1, 20, 12, 3))
    run_beside_float64(make_world(graphs, (1, 30, 0, 13), 2, device=DEVICE), close(2e-6))


class Spread(Flow):
    """The largest share of neighbouring pages, in a softmax over the window."""

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"mean": k.mean(0)}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        shares = (pages["mean"] @ q[0]).softmax(0)
        return torch.nn.functional.max_pool1d(shares[None], 3, 1, 1)[0] if self.pooled else shares.cumsum(0)

    def __init__(self, pooled: bool) -> None:
        self.pooled = pooled


@pytest.mark.parametrize("pooled", [False, True])
def test_no_program_holds_windows_of_pages_that_follow_each_other(pooled: bool) -> None:
    """Running sums, and neighbours of what a whole window has to be known for, go by chunks alone."""
    graphs = trace_flow(Spread(pooled), Geometry(3, 20, 12, 3))
    assert generate_score(graphs).whole is None
    run_beside_float64(make_world(graphs, (1, 30, 0, 13), 2, device=DEVICE), close(2e-6))


class Wide(Flow):
    """Summaries in float32, whose products in 16 bits would be wrong in the third digit."""

    summary_dtypes: ClassVar = {"mean": torch.float32}

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"mean": k.mean(0) + 0.001, "low": k.amin(0)}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return (q @ pages["mean"].T).amax(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_summaries_of_sixteen_bit_pages(dtype: torch.dtype) -> None:
    """Nothing of them goes to tensor cores, and nothing is cut."""
    graphs = trace_flow(Wide(), Geometry(5, 16, 16, 4))
    assert not any(kernel.dots for kernel in generate_score(graphs).built(Variant(2)).kernels)
    world = make_world(graphs, (1, 9, 0, 20), 2, dtype, device=DEVICE)
    assert world.pool.summaries["mean"].dtype == torch.float32 and world.pool.summaries["low"].dtype == dtype
    run_beside_float64(world, lambda what, x, y: close(2.0**-6 if what == "low" else 2e-6)(what, x, y))


class Computed(Flow):
    """Query rows that no 16 bits hold, on either side of a product, with a field of several rows."""

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"mean": k.mean(0), "ends": k[[0, -1]]}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        q = q / q.square().sum(-1, keepdim=True).add(1.0).sqrt()
        return (q @ pages["mean"].T).amax(0) - (pages["ends"] @ q.T).amin((1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("group", "dots"), [(1, 0), (2, 2), (3, 2), (7, 2), (16, 2), (24, 0)])
def test_computed_queries_go_to_tensor_cores_in_parts(group: int, dots: int, dtype: torch.dtype) -> None:
    """Three parts of bfloat16 hold float32's bits; float16 has no room for small ones."""
    graphs = trace_flow(Computed(), Geometry(5, 80, 80, group))
    (kernel,) = generate_score(graphs).built(Variant(2, dtype)).kernels
    assert kernel.dots == (dots if dtype == torch.bfloat16 else 0)
    assert kernel.source.count("f.in_parts(") == kernel.dots
    world = make_world(graphs, (1, 9, 0, 40), 2, dtype, device=DEVICE)
    run_beside_float64(world, lambda what, x, y: close(2.0**-6 if what in ("mean", "ends") else 2e-6)(what, x, y))


@pytest.mark.parametrize("slots", [4, 8])
def test_parts_add_up_to_the_rows(slots: int) -> None:
    """As bfloat16 on a GPU, as float16 in the interpreter, which cuts bfloat16: all bits that fit, zeros behind."""
    dtype, narrow = (tl.float16, torch.float16) if INTERPRETED else (tl.bfloat16, torch.bfloat16)
    torch.manual_seed(0)
    x = torch.randn(4, 16, device=DEVICE)
    x[0, :3] = torch.tensor([float("inf"), float("-inf"), 0.0])
    out = torch.full((slots * 4, 16), float("nan"), dtype=narrow, device=DEVICE)
    parts_kernel[(1,)](x, out, ROWS=4, N=16, SLOTS=slots, DOT=dtype)
    parts = out.view(slots, 4, 16).double()
    assert not parts[3:].any() and not parts[1:, 0, :3].any()
    error = (parts.sum(0) - x.double())[x.isfinite()].abs()
    assert (error <= (2.0**-24 if INTERPRETED else 0.0)).all() and parts[1].any() and parts[2].any()


@triton.jit
def parts_kernel(x, out, ROWS: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, DOT: tl.constexpr):
    column = tl.arange(0, N)[None, :]
    rows = tl.load(x + tl.arange(0, ROWS)[:, None] * N + column)
    tl.store(out + tl.arange(0, SLOTS * ROWS)[:, None] * N + column, functions.in_parts(rows, SLOTS, DOT))


@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_tensor_cores_multiply_what_is_stored_alike(asked: torch.dtype, stored: torch.dtype) -> None:
    """Queries of another dtype than the pages would be cut (by a GPU: the interpreter multiplies float32)."""
    graphs = trace_flow(Wide(), Geometry(5, 16, 16, 4))
    world = make_world(graphs, (2,), 2, stored, q_dtype=asked, device=DEVICE)
    variant = ScoreProgram._variant(world.q, world.pool)
    assert variant.narrow == (asked if asked == stored != torch.float32 else None)


class Poles(Flow):
    """Query rows that are infinite or NaN where a tile pads them with zeros; and halves of rows, padded one by one."""

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"mean": k.mean(0)}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        mean, half = pages["mean"], q.shape[1] // 2
        signs = (mean @ (q / q.abs()).T).amax(1)
        halves = torch.einsum("wcd,rd->wcr", mean.reshape(-1, 2, half), q[0].reshape(2, half))
        more = torch.einsum("wcd,rd->wcr", mean.reshape(-1, 2, half), (q[0] + 1).reshape(2, half))
        return signs + halves.amax((1, 2)) + more.amin((1, 2)) + (mean @ q.abs().log().T).amax(1)


@pytest.mark.parametrize(("width", "group"), [(40, 3), (80, 3), (80, 7), (32, 4)])
def test_padding_adds_nothing_to_products(width: int, group: int) -> None:
    """Whatever the flow makes of the zeros behind a query row, or a regrouping of its last values."""
    graphs = trace_flow(Poles(), Geometry(5, width, width, group))
    (kernel,) = generate_score(graphs).built(Variant(2)).kernels
    assert kernel.dots >= 3
    world = make_world(graphs, (1, 9, 0, 20), 2, torch.bfloat16, device=DEVICE)
    run_beside_float64(world, lambda what, x, y: close(2.0**-6 if what == "mean" else 4e-6)(what, x, y))


class Shares(Flow):
    """Shares of pages in softmaxes of one to three values; of no field, or of one that may be infinite."""

    def __init__(self, what: str) -> None:
        self.what = what

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"mean": k.mean(0)}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        mean = pages["mean"]
        if self.what == "numbers":
            alike = torch.zeros_like(pages["position"]).softmax(0) + torch.ones_like(mean[:, :3]).softmax(0).sum(1)
            return alike + mean[:, 0]
        return (mean @ q.T).softmax(0).sum(1)


def test_shares_of_numbers() -> None:
    graphs = trace_flow(Shares("numbers"), Geometry(5, 20, 20, 3))
    run_beside_float64(make_world(graphs, (1, 9, 0, 20), 2, device=DEVICE), close(2e-6))


def test_an_infinite_logit_leaves_no_share() -> None:
    """In a window of one program as in chunks: NaN everywhere, as torch says."""
    graphs = trace_flow(Shares("a field"), Geometry(5, 20, 20, 3))
    world = make_world(graphs, (1, 9, 0, 20), 2, device=DEVICE)
    world.pool.summaries["mean"].normal_()
    world.pool.summaries["mean"][:, world.window.table[world.window.requests[1], world.window.sink + 4]] = torch.inf
    for form in forms(generate_score(graphs)):
        scores = form.run(world.q.abs(), world.pool, world.window)
        assert scores[1, :, :9].isnan().all() and not scores[0, :, :1].isnan().any()


@pytest.mark.parametrize("name", ["h2o", "gqa_block_sparse_attention", "tova", "block_sparse_attention"])
def test_stages_wait_for_each_other(name: str) -> None:
    """Each kernel waits once, also where it ends early; later stages look up places ahead of that, and read nothing
    else."""
    for form in forms(generate_score(trace_flow(build_flow(name), Geometry(16, 32, 32, 4)))):
        for number, kernel in enumerate(form.built(Variant(2)).kernels):
            late = ", LATE" if not number else ""
            before, wait, after = kernel.source.partition(f"wait_for_inputs(PDL{late})")
            assert wait and "wait_for_inputs" not in after and "tl.store" not in before
            loaded = {word.split("_ptr")[0].split("(")[-1] for word in before.split("tl.load")[1:]}
            assert loaded <= {"widths", "requests", "table", "row_table", "mass_scale", "lengths"}
            early = f"let_next_start(PDL{late or ', True'})\n        return\n"
            assert kernel.source.count("        return\n") == kernel.source.count(early) == 1
            assert kernel.source.rstrip().endswith(f"let_next_start(PDL{late})")


def test_when_programs_let_the_next_one_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A score at once where it runs, for selection is small; summaries by what follows them."""
    seen: list[int] = []
    monkeypatch.setattr(program.Generated, "launch", lambda self, *rest: seen.append(rest[-1]))
    graphs = trace_flow(build_flow("h2o"), Geometry(4, 16, 16, 3))
    world = make_world(graphs, (3, 5), 2, device=DEVICE)
    generate_score(graphs).run(world.q, world.pool, world.window)
    generate_summarize(graphs).run(world.pool, torch.tensor([1], device=DEVICE))
    assert seen == [ONCE_WAITED, AT_ONCE]


class Swapped(Flow):
    """State fields of which each is made of the other, as they were before the step."""

    def init_state(self, page_size: int, head_dim: int) -> Mapping[str, torch.Tensor]:
        return {"one": torch.zeros(()), "other": torch.zeros(())}

    def score(
        self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        logits = pages["k"][:, 0] @ q[0] * 0.1
        return logits.softmax(0), {"one": pages["other"] + logits, "other": pages["one"] * 0.5}


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_state_is_read_before_other_state_is_written(heads: int) -> None:
    graphs = trace_flow(Swapped(), Geometry(3, 20, 12, 3))
    for form in forms(generate_score(graphs)):  # threads of the kernel that writes wait for each other's loads
        counts = [kernel.source.count("tl.debug_barrier()") for kernel in form.built(Variant(heads)).kernels]
        assert counts == [0, 1]
    run_beside_float64(make_world(graphs, (1, 30, 0, 13), heads, device=DEVICE), close(2e-6))
