"""The ops of the vortex_torch surface in profile mode, with wrong operands, and called twice."""

from __future__ import annotations

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
from kvsieve.compat.vortex.indexer.triton_kernels.elementwise_impl import _elementwise_rr
from kvsieve.compat.vortex.indexer.triton_kernels.reduce_impl import _reduce_rr
from kvsieve.compat.vortex.indexer.triton_kernels.save_load_impl import _load_pr, _save_rp
from kvsieve.compat.vortex.utils import UNSET, Mode
from vortex_world import BATCHED, PAGED, RAGGED, World, bare

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
