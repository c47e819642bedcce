"""Every op, executed directly, against float64 formulas row by row; memory that is not listed is NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvsieve.compat.vortex.cache as cache_side
import kvsieve.compat.vortex.indexer as indexer
from kvsieve.compat.vortex.abs import as_vtensor
from kvsieve.compat.vortex.cache.triton_kernels.fill_impl import _fill_p
from kvsieve.compat.vortex.cache.triton_kernels.reduce_impl import _reduce_pp
from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.extension import topk_output
from kvsieve.compat.vortex.indexer.triton_kernels.elementwise_impl import _elementwise_rr
from kvsieve.compat.vortex.indexer.triton_kernels.reduce_impl import _reduce_rr
from kvsieve.compat.vortex.indexer.triton_kernels.save_load_impl import _load_pr, _save_rp
from kvsieve.compat.vortex.utils import UNSET, Mode
from vortex_world import BATCHED, PAGED, RAGGED, World, bare

F64 = torch.float64
Formula = Callable[..., torch.Tensor]
U = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(x))


def hidden(predicate: torch.Tensor) -> torch.Tensor:
    return torch.where(predicate, 0.0, -1e30).to(F64)


def kron(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.kron(x, y)


def rows_kron(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack([a * b for a in x for b in y])


def columns_kron(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:, i : i + 1] * y for i in range(x.shape[1])], 1)


def groups(function: Formula, k: int) -> Formula:
    return lambda x: torch.stack([function(x[i : i + k], 0) for i in range(0, len(x), k)])


A, B = 0.30078125, -1.703125  # representable in bfloat16
UNARY: dict[str, tuple[Any, Formula]] = {
    "Relu": (lambda m: m.Relu(A, B), lambda x: torch.where(x >= A, x, B)),
    "Sigmoid": (lambda m: m.Sigmoid(A, B), lambda x: sigmoid(B * x + A)),
    "Sigmoid default": (lambda m: m.Sigmoid(), lambda x: x * 0 + 0.5),
    "Silu": (lambda m: m.Silu(A, B), lambda x: x * sigmoid(B * x + A)),
    "Silu default": (lambda m: m.Silu(), lambda x: x / 2),
    "Add_Mul": (lambda m: m.Add_Mul(A, B), lambda x: B * x + A),
    "Abs": (lambda m: m.Abs(A, B), lambda x: (B * x + A).abs()),
    "Exp": (lambda m: m.Exp(A, B), lambda x: torch.exp(B * x + A)),
    "Log": (lambda m: m.Log(8.0, 0.5), lambda x: torch.log(0.5 * x + 8)),
    "Mean 1": (lambda m: m.Mean(dim=1), lambda x: x.mean(0, keepdim=True)),
    "Mean 2": (lambda m: m.Mean(dim=2), lambda x: x.mean(1, keepdim=True)),
    "Max 1": (lambda m: m.Max(), lambda x: x.amax(0, keepdim=True)),
    "Max 2": (lambda m: m.Max(2), lambda x: x.amax(1, keepdim=True)),
    "Min 1": (lambda m: m.Min(1), lambda x: x.amin(0, keepdim=True)),
    "Min 2": (lambda m: m.Min(2), lambda x: x.amin(1, keepdim=True)),
    "Sum 1": (lambda m: m.Sum(1), lambda x: x.sum(0, keepdim=True)),
    "Sum 2": (lambda m: m.Sum(2), lambda x: x.sum(1, keepdim=True)),
    "L2Norm 1": (lambda m: m.L2Norm(1), lambda x: (x**2).sum(0, keepdim=True).sqrt()),
    "L2Norm 2": (lambda m: m.L2Norm(2), lambda x: (x**2).sum(1, keepdim=True).sqrt()),
    "Reshape": (lambda m: m.Reshape(-1, 6, 2), lambda x: x.reshape(6, 2)),
    "MaskSlice 1": (
        lambda m: m.MaskSlice(1, 3, 1, A, B),
        lambda x: torch.where(torch.arange(4) % 3 > 0, A, B)[:, None] + 0 * x,
    ),
    "MaskSlice 2": (lambda m: m.MaskSlice(0, 1, 2, A, B), lambda x: torch.where(torch.arange(3) < 1, A, B) + 0 * x),
}
INDEXER_ONLY: dict[str, tuple[Any, Formula]] = {
    "Transpose": (lambda m: m.Transpose(), lambda x: x.T),
}
CACHE_ONLY: dict[str, tuple[Any, Formula]] = {
    "MeanInterleave": (lambda m: m.MeanInterleave(1, 2), groups(torch.mean, 2)),
    "MaxInterleave": (lambda m: m.MaxInterleave(1, 2), groups(torch.amax, 2)),
    "MinInterleave": (lambda m: m.MinInterleave(1, 4), groups(torch.amin, 4)),
    "L2NormInterleave": (lambda m: m.L2NormInterleave(2, 3), lambda x: (x**2).sum(1, keepdim=True).sqrt()),
}
BINARY: dict[str, tuple[Any, tuple[int, int], tuple[int, int], Formula]] = {
    "Maximum": (lambda m: m.Maximum(), (4, 3), (1, 3), torch.maximum),
    "Minimum": (lambda m: m.Minimum(), (4, 1), (1, 3), torch.minimum),
    "Add": (lambda m: m.Add(A, B), (1, 3), (4, 3), lambda x, y: A * x + B * y),
    "Multiply": (lambda m: m.Multiply(5.0, 6.0), (4, 3), (4, 1), lambda x, y: x * y),
    "GeMM": (lambda m: m.GeMM(), (2, 3), (4, 3), lambda x, y: y @ x.T),
    "WhereEqual": (lambda m: m.WhereEqual(), (1, 1), (4, 3), lambda x, y: hidden(x == y)),
    "WhereNotEqual": (lambda m: m.WhereNotEqual(), (4, 3), (1, 1), lambda x, y: hidden(x != y)),
    "WhereGreater": (lambda m: m.WhereGreater(), (4, 3), (4, 3), lambda x, y: hidden(x > y)),
    "WhereGreaterEqual": (lambda m: m.WhereGreaterEqual(), (4, 3), (4, 3), lambda x, y: hidden(x >= y)),
    "WhereLess": (lambda m: m.WhereLess(), (4, 3), (4, 3), lambda x, y: hidden(x < y)),
    "WhereLessEqual": (lambda m: m.WhereLessEqual(), (4, 3), (4, 3), lambda x, y: hidden(x <= y)),
}
INDEXER_BINARY: dict[str, tuple[Any, tuple[int, int], tuple[int, int], Formula]] = {
    "GeMV": (lambda m: m.GeMV(), (1, 7), (1, 7), lambda x, y: (x * y).sum().reshape(1, 1)),
    "Kron": (lambda m: m.Kron(), (2, 3), (4, 2), kron),
    "Kron 1": (lambda m: m.Kron(dim=1), (2, 3), (4, 3), rows_kron),
    "Kron 2": (
        lambda m: m.Kron(dim=2),
        (4, 3),
        (1, 2),
        columns_kron,
    ),
}
SOURCES = {"b": World.batched, "r": World.ragged, "p": World.paged}
PAIRS = ("bb", "br", "bp", "rb", "rr", "rp", "pb", "pr", "pp")


def close(received: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """One rounding of the store, and float32 arithmetic."""
    u = U[dtype]
    assert received.shape == expected.shape
    bound = 1.01 * u * expected.abs() + 200 * U[torch.float32] * max(1.0, float(expected.abs().max().clamp(max=1e3)))
    assert bool(((received.to(F64) - expected).abs() <= bound).all()), (received.double() - expected).abs().max()


def row_of(x: Any, segment: int, place: int, row: int) -> torch.Tensor:
    return bare(x)[{BATCHED: segment, RAGGED: place, PAGED: row}[x._format]].to(F64)


def check_indexer(world: World, op: Any, operands: list[Any], formula: Formula) -> None:
    ctx = world.plan()
    before = [bare(x).clone() for x in operands]
    out = op(*operands, ctx=ctx)
    for x, old in zip(operands, before, strict=True):
        assert torch.equal(torch.nan_to_num(bare(x), 9.0), torch.nan_to_num(old, 9.0)), "operands are not changed"
    if all(x._format is BATCHED for x in operands):
        assert out._format is BATCHED
        for segment in range(world.segments):
            close(bare(out)[segment], formula(*(bare(x)[segment].to(F64) for x in operands)), world.dtype)
        return
    assert out._format is RAGGED and out.dtype is world.dtype and len(out) == ctx.max_num_pages
    assert world.scored()
    for where in world.scored():
        close(bare(out)[where[1]], formula(*(row_of(x, *where) for x in operands)), world.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", "brp")
@pytest.mark.parametrize("name", [*UNARY, *INDEXER_ONLY])
def test_indexer_unary(name: str, kind: str, dtype: torch.dtype) -> None:
    make, formula = {**UNARY, **INDEXER_ONLY}[name]
    world = World(dtype=dtype)
    check_indexer(world, make(indexer), [SOURCES[kind](world, 4, 3)], formula)


@pytest.mark.parametrize("kinds", PAIRS)
@pytest.mark.parametrize("name", [*BINARY, *INDEXER_BINARY])
def test_indexer_binary(name: str, kinds: str) -> None:
    make, x, y, formula = {**BINARY, **INDEXER_BINARY}[name]
    world = World(dtype=torch.bfloat16 if name in ("Add", "GeMM") else torch.float32)
    check_indexer(
        world, make(indexer), [SOURCES[kind](world, *d) for kind, d in zip(kinds, (x, y), strict=True)], formula
    )


def along_window(world: World, x: Any) -> dict[int, torch.Tensor]:
    """The window's rows of every scored segment, float64."""
    found: dict[int, list[torch.Tensor]] = {}
    for segment, place, _ in world.scored():
        found.setdefault(segment, []).append(bare(x)[place].to(F64))
    return {segment: torch.stack(rows) for segment, rows in found.items()}


WEIGHT = torch.tensor([[[0.5, -1.0]], [[1.0, 2.0]], [[-0.25, 0.0]], [[3.0, 1.0]]])


def convolved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    taps = len(weight)
    out = torch.zeros_like(x)
    for s in range(len(x)):
        for k in range(taps):
            if 0 <= s + k - taps // 2 < len(x):
                out[s] += weight[k].double() * x[s + k - taps // 2]
    return out


SCANS: dict[str, tuple[Any, Formula]] = {
    "Softmax": (lambda: indexer.Softmax(dim=0, scale=1.75), lambda x: torch.softmax(1.75 * x, 0)),
    "Softmax negative": (lambda: indexer.Softmax(scale=-0.5), lambda x: torch.softmax(-0.5 * x, 0)),
    "Softmax zero": (lambda: indexer.Softmax(scale=0.0), lambda x: torch.full_like(x, 1 / len(x))),
    "Normalize": (lambda: indexer.Normalize(), lambda x: x / (x**2).sum(0).sqrt().clamp(min=1e-12)),
    "Conv1d odd": (lambda: indexer.Conv1d(WEIGHT[:3].tolist()), lambda x: convolved(x, WEIGHT[:3])),
    "Conv1d even": (lambda: indexer.Conv1d(WEIGHT), lambda x: convolved(x, WEIGHT)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCANS)
def test_scans(name: str, dtype: torch.dtype) -> None:
    make, formula = SCANS[name]
    world, op = World(dtype=dtype, lengths=(61, 23, 30, 48)), make()
    ctx = world.plan()
    x = world.ragged(1, 2)
    before, windows = bare(x).clone(), along_window(world, x)
    out = op(x, ctx=ctx)
    assert (out is x) == op.in_place and out._format is RAGGED
    if not op.in_place:
        assert torch.equal(torch.nan_to_num(bare(x), 9.0), torch.nan_to_num(before, 9.0))
    places = [place for _, place, _ in world.scored()]
    for segment, rows in windows.items():
        mine = [place for one, place, _ in world.scored() if one == segment]
        close(bare(out)[mine], formula(rows), dtype)
    if op.in_place:
        others = torch.ones(len(x), dtype=torch.bool)
        others[places] = False
        assert bool(bare(x)[others].isnan().all()), "rows outside the windows are not touched"
    assert not windows.keys() & {5, 6, 7, 8, 9}, "the request under budget is not scored"


@pytest.mark.parametrize("name", ["Mean", "Max", "Min", "Sum", "L2Norm"])
def test_reductions_over_the_window(name: str) -> None:
    formula = {
        "Mean": lambda x: x.mean(0),
        "Max": lambda x: x.amax(0),
        "Min": lambda x: x.amin(0),
        "Sum": lambda x: x.sum(0),
        "L2Norm": lambda x: (x**2).sum(0).sqrt(),
    }[name]
    world = World()
    ctx = world.plan()
    x = world.ragged(2, 3)
    out = getattr(indexer, name)(dim=0)(x, ctx=ctx)
    assert out._format is BATCHED and out.shape == (world.segments, 2, 3)
    windows = along_window(world, x)
    for segment in range(world.segments):
        wanted = formula(windows[segment]) if segment in windows else torch.zeros(2, 3, dtype=F64)
        close(bare(out)[segment], wanted, torch.float32)
    indexer.Add()(out, x, ctx=ctx)  # a BATCHED result is an operand like q


def test_save_and_load() -> None:
    world = World()
    ctx = world.plan()
    x, field = world.ragged(2, 1), world.paged(2, 1)
    bare(field).fill_(7.0)
    assert indexer.Save()(x, field, ctx=ctx) is field
    for _, place, row in world.scored():
        assert torch.equal(bare(field)[row], bare(x)[place])
    others = torch.ones(world.rows, dtype=torch.bool)
    others[[row for _, _, row in world.scored()]] = False
    assert bool((bare(field)[others] == 7).all())
    loaded = indexer.Load()(field, ctx=ctx)
    for _, place, _ in world.scored():
        assert torch.equal(bare(loaded)[place], bare(x)[place])


@pytest.mark.parametrize("op", [indexer.topK, lambda: indexer.approxTopK(1.0)])
@pytest.mark.parametrize("values", ["random", "ties", "strange"])
def test_topk(op: Any, values: str) -> None:
    world = World(lengths=(200, 23, 48), topk=4, dtype=torch.bfloat16)
    ctx = world.plan()
    score = world.ragged(1, 1)
    places = [place for _, place, _ in world.scored()]
    if values == "ties":
        bare(score)[places] = torch.randint(0, 2, (len(places), 1, 1), generator=world.random).bfloat16()
    if values == "strange":
        strange = torch.tensor([math.nan, -math.inf, 0.0, -0.0, -math.inf, math.inf, math.nan, 0.0]).bfloat16()
        bare(score)[places] = strange.repeat(len(places))[: len(places), None, None]
    o = as_vtensor(torch.full((ctx.max_num_pages, 1, 1), -5, dtype=torch.int32), RAGGED)
    listed = ctx.sparse_kv_indices.clone()
    op()(score, o, ctx=ctx)
    expected = torch.full_like(bare(o), -5).flatten()
    for segment in range(world.segments):
        mine = [(place, row) for one, place, row in world.scored() if one == segment]
        scores = [float(bare(score)[place]) for place, _ in mine]
        order = sorted(
            range(len(mine)), key=lambda i: (math.isnan(scores[i]), -scores[i] if not math.isnan(scores[i]) else 0, i)
        )
        first = int(ctx.sparse_kv_indptr[segment]) + world.bos
        for rank, i in enumerate(order[: world.topk]):
            expected[first + rank] = listed[first + rank] = mine[i][1]
    assert torch.equal(bare(o).flatten(), expected)
    assert torch.equal(ctx.sparse_kv_indices, listed), "the context's list is completed too"


def test_topk_of_more_pages_than_a_block_holds() -> None:
    scores = torch.randperm(70_000, generator=torch.Generator().manual_seed(0)).float()
    indptr, sparse = torch.tensor([0, 70_000], dtype=torch.int32), torch.tensor([0, 12], dtype=torch.int32)
    out = torch.zeros(12, dtype=torch.int32)
    topk_output(scores[:, None, None], indptr, sparse, torch.arange(70_000, dtype=torch.int32), out, 1, 10, 1, 1, 4096)
    best = torch.argsort(scores[1:-1], descending=True)[:10] + 1
    assert out.tolist() == [0, *best.tolist(), 0]


# The cache side


@pytest.mark.parametrize("kinds", ["pp", "pr", "rp", "rr", "p", "r"])
@pytest.mark.parametrize("name", [*UNARY, *CACHE_ONLY])
def test_cache_unary(name: str, kinds: str) -> None:
    make, formula = {**UNARY, **CACHE_ONLY}[name]
    check_cache(make(cache_side), kinds[:1], kinds[1:], [(4, 3)], formula)


@pytest.mark.parametrize("kinds", ["ppp", "ppr", "prp", "rr", "rpp"])
@pytest.mark.parametrize("name", BINARY)
def test_cache_binary(name: str, kinds: str) -> None:
    make, x, y, formula = BINARY[name]
    check_cache(make(cache_side), kinds[:2], kinds[2:], [x, y], formula)


def check_cache(op: Any, kinds: str, target: str, shapes: list[tuple[int, int]], formula: Formula) -> None:
    world = World(dtype=torch.bfloat16)
    loc = torch.tensor([slot for slots in world.slots for slot in slots[7:18]])
    ctx = world.cache_context(len(loc) + 2)

    def tensor(kind: str, d0: int, d1: int) -> Any:
        rows = world.rows if kind == "p" else ctx.max_new_tokens_per_batch * world.heads
        return as_vtensor(world.random_tensor(rows, d0, d1), PAGED if kind == "p" else RAGGED)

    operands = [tensor(kind, *shape) for kind, shape in zip(kinds, shapes, strict=True)]
    result = formula(*(bare(x)[0].to(F64) for x in operands))
    output = tensor(target, *result.shape) if target else None
    before = None if output is None else bare(output).clone()
    out = op(*operands, output, loc=loc, ctx=ctx)
    assert out is output if target else (out._format is RAGGED and len(out) == len(loc) * world.heads + 2 * world.heads)
    touched = set()
    for token, slot in enumerate(loc.tolist()):
        for h in range(world.heads):
            rows = {PAGED: slot // 5 * world.heads + h, RAGGED: token * world.heads + h}
            if (slot + 1) % world.page_size == 0:
                touched.add(rows[out._format])
                wanted = formula(*(bare(x)[rows[x._format]].to(F64) for x in operands))
                close(bare(out)[rows[out._format]], wanted, world.dtype)
    assert len(touched) == 6 * world.heads
    if before is not None:
        others = [row for row in range(len(before)) if row not in touched]
        assert torch.equal(bare(out)[others], before[others]), "rows of other pages are not touched"


def test_fill_rounds_to_bfloat16() -> None:
    world = World()
    field = as_vtensor(torch.zeros(world.rows, 2, 3), PAGED)
    slot = torch.tensor([world.page_size - 1])
    assert cache_side.Fill(0.1)(field, loc=slot, ctx=world.cache_context(1)) is field
    assert bool((bare(field)[: world.heads] == float(torch.tensor(0.1).bfloat16())).all())
    assert not bare(field)[world.heads :].any()


def test_numbers_are_rounded_to_bfloat16_and_results_once() -> None:
    """0.3 * x + 0.7 * y: coefficients in bfloat16, the rest in float32, one rounding."""
    world = World(dtype=torch.bfloat16)
    ctx, x, y = world.plan(), world.ragged(1, 64), world.ragged(1, 64)
    out = bare(indexer.Add(0.3, 0.7)(x, y, ctx=ctx))
    a, b = torch.tensor(0.3).bfloat16().double(), torch.tensor(0.7).bfloat16().double()
    places = [place for _, place, _ in world.scored()]
    exact = a * bare(x)[places].double() + b * bare(y)[places].double()
    assert torch.equal(out[places], exact.float().bfloat16())
    assert not torch.equal(out[places], (0.3 * bare(x)[places].double() + 0.7 * bare(y)[places].double()).bfloat16())


# Profile mode


def profiled() -> indexer.Context:
    ctx = indexer.Context()
    ctx.max_num_pages = 11
    return ctx


def empty(kind: Any, d0: int, d1: int, rows: int = 0) -> Any:
    return as_vtensor(torch.zeros(rows, d0, d1, dtype=torch.bfloat16), kind)


def test_profile_allocates_and_counts() -> None:
    ctx = profiled()
    out = indexer.GeMM()(empty(BATCHED, 3, 8, 2), empty(PAGED, 5, 8), ctx=ctx)
    assert out._format is RAGGED and out.shape == (11, 5, 3) and out.dtype is torch.bfloat16
    assert ctx._aux_total_bytes == 11 * 15 * 2 and ctx._aux_total_flops == 40
    assert indexer.Add()(empty(PAGED, 1, 8), empty(PAGED, 5, 8), ctx=ctx).shape == (11, 5, 8)
    assert ctx._aux_total_flops == 88
    assert indexer.Mean(0)(empty(RAGGED, 2, 2), ctx=ctx)._format is BATCHED
    assert indexer.Softmax()(out, ctx=ctx) is out
    assert indexer.topK()(empty(RAGGED, 1, 1), empty(RAGGED, 1, 1), ctx=ctx) is None
    ctx.clear_aux_memory()
    ctx.clear_aux_flops()
    assert (ctx._aux_total_bytes, ctx._aux_total_flops) == (0, 0)


NO_TOKENS = torch.zeros(0, dtype=torch.int64)
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "plain tensor": (lambda c: indexer.Relu()(torch.zeros(0, 1, 1), ctx=c), "expected a vTensor, received Tensor"),
    "rank": (lambda c: indexer.Relu()(as_vtensor(torch.zeros(2, 2)), ctx=c), r"expected rank 3.*\[2, 2\]"),
    "broadcast": (lambda c: indexer.Add()(empty(RAGGED, 2, 3), empty(RAGGED, 4, 3), ctx=c), "broadcast"),
    "contraction": (lambda c: indexer.GeMM()(empty(BATCHED, 2, 3), empty(PAGED, 2, 4), ctx=c), "with one K"),
    "GeMV of many": (lambda c: indexer.GeMV()(empty(BATCHED, 2, 3), empty(PAGED, 1, 3), ctx=c), "GeMM takes more"),
    "softmax of pages": (
        lambda c: indexer.Softmax()(empty(PAGED, 1, 1), ctx=c),
        "RAGGED, received PAGED",
    ),
    "dim 0 of q": (lambda c: indexer.Mean(0)(empty(BATCHED, 1, 1), ctx=c), "expected format RAGGED, received BATCHED"),
    "dim 3": (lambda c: indexer.Mean(3), "expected dim in"),
    "cache dim 0": (lambda c: cache_side.Mean(0), "expected dim in"),
    "softmax dim": (lambda c: indexer.Softmax(dim=1), "expected dim 0"),
    "score shape": (lambda c: indexer.topK()(empty(RAGGED, 1, 2), empty(RAGGED, 1, 1), ctx=c), r"\(1, 1\)"),
    "score format": (
        lambda c: indexer.topK()(empty(PAGED, 1, 1), empty(RAGGED, 1, 1), ctx=c),
        "expected format RAGGED",
    ),
    "save format": (lambda c: indexer.Save()(empty(RAGGED, 1, 1), empty(RAGGED, 1, 1), ctx=c), "expected format PAGED"),
    "save shape": (
        lambda c: indexer.Save()(empty(RAGGED, 1, 2), empty(PAGED, 1, 1), ctx=c),
        r"expected inner shape \(1, 2\)",
    ),
    "load format": (lambda c: indexer.Load()(empty(RAGGED, 1, 2), ctx=c), "expected format PAGED"),
    "number": (lambda c: indexer.Add()(empty(RAGGED, 1, 2), ctx=c), "expected 2 operand"),
    "reshape": (lambda c: indexer.Reshape(-1, 2, 2)(empty(RAGGED, 1, 3), ctx=c), "expected 4 elements a row"),
    "no context": (lambda c: indexer.Relu()(empty(RAGGED, 1, 3)), "expected ctx="),
    "output shape": (
        lambda c: cache_side.Mean()(
            empty(PAGED, 5, 3), empty(PAGED, 5, 3), loc=torch.zeros(0, dtype=torch.int64), ctx=c
        ),
        r"output: expected inner shape \(1, 3\)",
    ),
    "loc of two axes": (
        lambda c: cache_side.Fill()(empty(PAGED, 5, 3), loc=torch.zeros(3, 1, dtype=torch.int64), ctx=c),
        r"loc: expected token slots \[n\], an integer tensor, received a torch.int64 tensor of shape \[3, 1\]",
    ),
    "o": (
        lambda c: indexer.topK()(empty(RAGGED, 1, 1), empty(PAGED, 1, 1), ctx=c),
        "o: expected.* received format PAGED",
    ),
    "no o": (lambda c: indexer.topK()(empty(RAGGED, 1, 1), None, ctx=c), "o: expected a RAGGED int32 tensor"),
    "a name": (lambda c: indexer.Relu()(z=empty(RAGGED, 1, 1), ctx=c), "expected operands named x, each once"),
    "x twice": (
        lambda c: indexer.Add()(empty(RAGGED, 1, 1), x=empty(RAGGED, 1, 1), ctx=c),
        "each once, received x=",
    ),
    "field first": (
        lambda c: cache_side.Add()(empty(PAGED, 1, 1), z=empty(PAGED, 1, 1), loc=NO_TOKENS, ctx=c),
        "expected operands named x and y",
    ),
    "alpha": (lambda c: indexer.Add("1"), "Add: expected a number alpha, received '1'"),
    "loc": (lambda c: cache_side.Fill()(empty(PAGED, 5, 3), loc=None, ctx=c), "loc: expected token slots"),
    "interleave": (
        lambda c: cache_side.MeanInterleave(1, 2)(
            empty(PAGED, 5, 3), None, loc=torch.zeros(0, dtype=torch.int64), ctx=c
        ),
        "divisible by k=2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_operands(name: str) -> None:
    call, says = WRONG[name]
    with pytest.raises(OpError, match=says) as raised:
        call(profiled())
    assert "Remedy: " in str(raised.value) and "\n" not in str(raised.value)
    assert issubclass(OpError, AssertionError), "vortex_torch asserts"


def executed(**fields: Any) -> indexer.Context:
    """A planned step of one request, three pages scored of five; ``fields`` are changed afterwards."""
    ctx = World(lengths=(25,), heads=1, topk=2, bos=1, eos=1).plan()
    vars(ctx).update(fields)
    return ctx


def pool(**fields: Any) -> cache_side.Context:
    """The cache side's context, of pages of five tokens and one KV head; ``fields`` are changed afterwards."""
    ctx = World(heads=1).cache_context(1)
    vars(ctx).update(fields)
    return ctx


def listed(d0: int, rows: int = 40, dtype: torch.dtype = torch.bfloat16, kind: Any = RAGGED) -> Any:
    return as_vtensor(torch.zeros(rows, d0, 1, dtype=dtype), kind)


WRONG_STEPS: dict[str, tuple[Callable[[], Any], str]] = {
    "no plan": (
        lambda: indexer.GeMM()(listed(1), listed(1), ctx=executed(winfo_kv_lens=UNSET)),
        "ctx.winfo_kv_lens: expected a value, received none. Remedy: call plan_decode first",
    ),
    "no page list": (
        lambda: indexer.Softmax()(listed(1), ctx=executed(dense_kv_indptr=UNSET)),
        "ctx.dense_kv_indptr: expected a value.*plan_decode",
    ),
    "no budget": (lambda: indexer.Softmax()(listed(1), ctx=executed(topk_val=UNSET)), "ctx.topk_val: expected a value"),
    "half a page": (lambda: indexer.Softmax()(listed(1), ctx=executed(topk_val=2.5)), "a whole number, received 2.5"),
    "more segments than planned": (
        lambda: indexer.Softmax()(listed(1), ctx=executed(batch_size=50)),
        "at least 51 elements, received 5",
    ),
    "no pool": (
        lambda: cache_side.Fill()(listed(1, kind=PAGED), loc=torch.tensor([4]), ctx=pool(head_num=UNSET)),
        "ctx.head_num: expected a value, received none. Remedy: assign it",
    ),
    "slot outside the pool": (
        lambda: cache_side.Mean()(listed(5, 2, kind=PAGED), None, loc=torch.tensor([49]), ctx=pool()),
        "Mean: reads or writes a row",
    ),
    "o of bfloat16": (
        lambda: indexer.topK()(listed(1), listed(1), ctx=executed()),
        "expected sparse_kv_indices of int32 or int64, received torch.bfloat16",
    ),
    "short scores": (
        lambda: indexer.topK()(listed(1, 2), listed(1, dtype=torch.int32), ctx=executed()),
        "topK: reads or writes a row that a tensor does not have",
    ),
    "short pool": (
        lambda: indexer.Load()(listed(1, 1, kind=PAGED), ctx=executed(dense_kv_indices=torch.full((9,), 7))),
        "Load: reads or writes a row",
    ),
}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_wrong_steps(name: str) -> None:
    """What only execution can see: no plan, numbers that nobody set, tensors of too few rows."""
    call, says = WRONG_STEPS[name]
    with pytest.raises(OpError, match=says) as raised:
        call()
    assert "Remedy: " in str(raised.value)


WORK = torch.tensor([0]), torch.tensor([4]), torch.tensor([1]), 4
PLACES = torch.arange(4, dtype=torch.int32)


def tall(d0: int = 1) -> torch.Tensor:
    return torch.zeros(4, d0, 1)


WRONG_LOOSE: dict[str, tuple[Callable[[], Any], str]] = {
    "op type": (lambda: _elementwise_rr(tall(), tall(), *WORK, "reluu"), "received 'reluu'.*members are Relu, Sigmoid"),
    "reduction": (lambda: _reduce_rr(tall(), tall(), 1, 99, *WORK), "expected a ReduceType, received 99"),
    "over the pages": (lambda: _reduce_rr(tall(), tall(), 0, 1, *WORK), "expected dim 1 or 2, received 0"),
    "cache reduction": (
        lambda: _reduce_pp(tall(), tall(), torch.arange(2), 1, 1, 0, 1),
        "expected dim 1 or 2, received 0",
    ),
    "rank": (lambda: _elementwise_rr(torch.zeros(4), tall(), *WORK, "relu"), r"\[L, D0, D1\], received shape \[4\]"),
    "result": (lambda: _elementwise_rr(tall(1), tall(2), *WORK, "relu"), r"room for rows \(1, 1\), received \(2, 1\)"),
    "saved": (lambda: _save_rp(tall(1), tall(2), PLACES, *WORK), r"room for rows \(1, 1\), received \(2, 1\)"),
    "loaded": (lambda: _load_pr(tall(1), tall(2), PLACES, *WORK), r"room for rows \(1, 1\), received \(2, 1\)"),
    "page size": (lambda: _fill_p(tall(), torch.arange(2), 1, 0, 0.0), "expected page_size and KV heads of at least 1"),
}


@pytest.mark.parametrize("name", WRONG_LOOSE)
def test_wrong_loose_arguments(name: str) -> None:
    """A result that would be repeated to fill a larger row, among others, is refused and not written."""
    call, says = WRONG_LOOSE[name]
    with pytest.raises(OpError, match=says):
        call()


def test_modes() -> None:
    world = World()
    ctx = world.plan()
    x = world.ragged(1, 1)
    for mode in (None, Mode.execute):
        ctx.mode = mode
        assert bool(bare(indexer.Relu()(x, ctx=ctx))[[place for _, place, _ in world.scored()]].isfinite().all())
    ctx.mode = "profile"
    with pytest.raises(ValueError, match="expected mode profile, execute or None"):
        indexer.Relu()(x, ctx=ctx)


def test_one_op_at_two_call_sites() -> None:
    """No hidden buffer: the first result stays."""
    world = World()
    ctx, op = world.plan(), indexer.Add_Mul(1.0, 2.0)
    x, y = world.ragged(1, 2), world.ragged(1, 2)
    first = op(x, ctx=ctx)
    kept = bare(first).clone()
    op(y, ctx=ctx)
    assert torch.equal(torch.nan_to_num(bare(first)), torch.nan_to_num(kept))


def test_plain_tensors_after_profiling() -> None:
    """An engine profiles with vTensors and executes with plain tensors."""
    world = World()
    ctx, op = world.plan(), indexer.Add(0.5, 2.0)
    x, y = world.ragged(1, 2), world.paged(1, 2)
    with pytest.raises(OpError, match="expected a vTensor"):
        op(bare(x), bare(y), ctx=ctx)
    ctx.profile()
    op(x=x, y=y, ctx=ctx)
    ctx.execute()
    named, places = op(y=y, x=x, ctx=ctx), [place for _, place, _ in world.scored()]
    assert torch.equal(bare(op(bare(x), bare(y), ctx=ctx))[places], bare(named)[places])
    field = bare(world.paged(1, 2))
    indexer.Save()(bare(x), field, ctx=ctx)
    assert torch.equal(bare(indexer.Load()(field, ctx=ctx))[places], bare(x)[places])
    caches, reduce = world.cache_context(1), cache_side.Max(1)
    k, out, loc = world.paged(5, 3, all_pages=True), world.paged(1, 3), torch.tensor([world.slots[0][4]])
    caches.profile()
    reduce(k, out, loc=loc, ctx=caches)
    caches.execute()
    reduce(bare(k), bare(out), loc, caches)
    row = world.slots[0][4] // 5 * world.heads
    assert torch.equal(bare(out)[row : row + world.heads, 0], bare(k)[row : row + world.heads].amax(1))


def test_a_window_of_exactly_topk_pages_is_left_alone() -> None:
    """Six pages at a budget of 1 + 3 + 2: everything fits, so softmax, normalisation and top-k do nothing."""
    world = World(lengths=(30,), heads=2)
    ctx = world.plan()
    x = as_vtensor(torch.ones(ctx.max_num_pages, 1, 1), RAGGED)
    o = as_vtensor(torch.full((ctx.max_num_pages, 1, 1), -5, dtype=torch.int32), RAGGED)
    for op in (indexer.Softmax(), indexer.Normalize()):
        op(x, ctx=ctx)
    indexer.topK()(x, o, ctx=ctx)
    assert bool((bare(x) == 1).all()) and bool((bare(o) == -5).all()) and not world.scored()
    ctx.topk_val = 2
    indexer.Softmax()(x, ctx=ctx)
    assert bare(x).flatten()[:12].tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3, 1, 1] * 2)


def test_every_segment_has_a_row_in_batched_operands() -> None:
    """Fewer would be computed without a word, or read at a place that is not there."""
    world = World()
    ctx, n = world.plan(), world.segments

    def batched(rows: int) -> Any:
        return as_vtensor(world.random_tensor(rows, 2, 6), BATCHED)

    ragged = world.ragged(1, 6)
    for rows in (0, 1, n - 1):
        says = f"expected BATCHED operands of at least {n} rows, received {rows}"
        calls = (
            lambda rows=rows: indexer.Relu()(batched(rows), ctx=ctx),
            lambda rows=rows: indexer.Max(1)(batched(rows), ctx=ctx),
            lambda rows=rows: indexer.GeMM()(batched(rows), ragged, ctx=ctx),
            lambda rows=rows: indexer.Add()(batched(n), batched(rows), ctx=ctx),
        )
        for call in calls:
            with pytest.raises(OpError, match=says) as caught:
                call()
            assert "\n" not in str(caught.value)
    with pytest.raises(OpError, match=rf"operands of equally many rows, received \[{n}, {n + 2}\]"):
        indexer.Add()(batched(n), batched(n + 2), ctx=ctx)
    x = batched(n + 2)  # an engine's tensor may have room to spare
    assert torch.equal(bare(indexer.Relu()(x, ctx=ctx)), bare(x).relu())
