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
from kvsieve.compat.vortex.extension import topk_output
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
