"""plan_decode and its relatives against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.extension import sglang_plan_decode, sglang_plan_prefill
from kvsieve.compat.vortex.indexer import Context
from kvsieve.compat.vortex.indexer.context import PAGE_LISTS, WORK_LIST
from kvsieve.compat.vortex.indexer.utils_sglang import (
    chunkwise_hn2nh_transpose,
    chunkwise_nh2hn_transpose,
    plan_decode,
)
from kvsieve.compat.vortex.utils import UNSET
from vortex_world import World

WORLDS = (
    World(),
    World(page_size=1, lengths=(9, 30, 1), heads=3, bos=0, eos=1, topk=5, max_chunk=7),
    World(lengths=(5, 25, 26, 30, 31), heads=1, topk=3, bos=1, eos=2, max_chunk=1),
    World(lengths=(40,), heads=2, topk=0, bos=2, eos=0, max_chunk=100),
    World(lengths=(16, 17), heads=2, topk=4, bos=4, eos=4),
)


def expected(world: World) -> dict[str, list[int]]:
    """The lists of VORTEX plans, by loops over segments and pages. ``-7``: left as it was."""
    out: dict[str, list[int]] = {name: [] for name in (*PAGE_LISTS, *WORK_LIST)}
    out["dense_kv_indptr"], out["sparse_kv_indptr"] = [0], [0]
    bos, eos, topk = world.bos, world.eos, world.topk
    for b, length in enumerate(world.lengths):
        for h in range(world.heads):
            starts = range(0, length, world.page_size)
            rows = [world.slots[b][start] // world.page_size * world.heads + h for start in starts]
            start, pages = out["dense_kv_indptr"][-1], len(rows)
            kept = min(topk + bos + eos, pages)
            middle = [-7] * (kept - bos - eos) if pages > kept else rows[bos : pages - eos]
            out["dense_kv_indices"] += rows
            out["sparse_kv_indices"] += rows if pages == kept else rows[:bos] + middle + rows[pages - eos :]
            out["dense_kv_indptr"].append(start + pages)
            out["sparse_kv_indptr"].append(out["sparse_kv_indptr"][-1] + kept)
            out["kv_last_page_len"].append(length % world.page_size or world.page_size)
            width = pages - bos - eos
            for done in range(0, width, world.max_chunk) if width > topk else ():
                out["winfo_q_indices"].append(b * world.heads + h)
                out["winfo_kv_offsets"].append(start + bos + done)
                out["winfo_kv_lens"].append(min(world.max_chunk, width - done))
    out["winfo_num_workloads"], out["winfo_chunk_size"] = [len(out["winfo_kv_lens"])], [world.max_chunk]
    return out


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"p{world.page_size}-h{world.heads}-b{len(world.lengths)}")
def test_every_output(world: World) -> None:
    world.ctx = world.context()
    ctx = world.plan()
    assert ctx.batch_size == len(world.lengths)
    for name, values in expected(world).items():
        received = getattr(ctx, name).tolist()
        assert received[: len(values)] == values, name
        assert set(received[len(values) :]) <= {-7}, f"{name}: only the prefix is written"


def test_loose_arguments_give_the_same() -> None:
    world = World()
    ctx, other = world.plan(), world.context()
    lists, winfo = ([getattr(other, name) for name in names] for names in (PAGE_LISTS, WORK_LIST))
    indptr, indices, sparse_indptr, sparse_indices, last = lists
    lens = torch.tensor(world.lengths, dtype=torch.int32)
    tables = world.req_to_token, world.req_indices
    geometry = world.page_size, world.heads, world.topk, world.bos, world.eos, world.max_chunk, 1
    sglang_plan_decode(lens, indptr, indices, sparse_indptr, sparse_indices, last, *tables, *winfo, *geometry)
    for name in (*PAGE_LISTS, *WORK_LIST):
        assert torch.equal(getattr(ctx, name), getattr(other, name)), name


def test_many_requests_and_many_pages() -> None:
    """More than 1,024 requests, and more pages than 15 or 16 bits count."""
    lengths = [70_000, *[3] * 1_500]
    ctx = Context()
    ctx.page_size, ctx.num_kv_heads, ctx.topk_val, ctx.page_reserved_bos, ctx.page_reserved_eos = 1, 2, 4, 1, 1
    ctx.max_chunk_size = 64
    table = torch.arange(70_000, dtype=torch.int32).expand(2, -1)
    plan_decode(torch.tensor(lengths), table, torch.tensor([1, *[0] * 1_500]), ctx)
    assert ctx.dense_kv_indptr.tolist()[1:4] == [70_000, 140_000, 140_003]
    assert int(ctx.winfo_num_workloads) == 2 * -(-69_998 // 64)
    count = int(ctx.winfo_num_workloads)
    assert int(ctx.winfo_kv_lens[:count].sum()) == 2 * 69_998
    assert ctx.dense_kv_indices[139_999] == 2 * 69_999 + 1


def test_too_small_outputs_change_nothing() -> None:
    world = World()
    world.ctx.winfo_kv_lens = world.ints(3)
    with pytest.raises(OpError, match=r"winfo_kv_lens: expected room for \d+ elements, received 3"):
        world.plan()
    assert set(world.ctx.dense_kv_indptr.tolist()) == {-7}


WRONG_PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "topk": ({"topk_val": -1}, "plan_decode: topk_val: expected at least 0, received -1"),
    "heads": ({"num_kv_heads": 0}, "plan_decode: num_kv_heads: expected at least 1"),
    "unset": ({"page_reserved_eos": UNSET}, "ctx.page_reserved_eos: expected a value, received none"),
    "fraction": ({"topk_val": 2.5}, "ctx.topk_val: expected a whole number, received 2.5"),
    "list": (
        {"cached_seq_lens": [9, 12]},
        r"cached_seq_lens: expected an integer tensor.*received \[9, 12\]",
    ),
    "one axis": ({"req_to_token": torch.arange(9)}, "req_to_token: expected an integer tensor of 2 axes"),
    "too few rows": ({"req_indices": torch.tensor([0])}, "a row of req_to_token for each of 2 lengths, received 1"),
    "no such row": ({"req_indices": torch.tensor([0, 9])}, "received length 12 in row 9"),
}


@pytest.mark.parametrize("name", WRONG_PLANS)
def test_wrong_plans(name: str) -> None:
    """Named as the context and the arguments are, with a remedy."""
    changes, says = WRONG_PLANS[name]
    ctx, table = World().context(), torch.arange(60, dtype=torch.int32).view(3, 20)
    arguments = {"cached_seq_lens": torch.tensor([9, 12]), "req_to_token": table, "req_indices": torch.tensor([0, 1])}
    arguments |= {key: value for key, value in changes.items() if key in arguments}
    vars(ctx).update({key: value for key, value in changes.items() if key not in arguments})
    with pytest.raises(OpError, match=says) as raised:
        plan_decode(**arguments, ctx=ctx)
    assert "Remedy: " in str(raised.value)


def test_numbers_out_of_range() -> None:
    world = World()
    world.ctx.page_size = 0
    with pytest.raises(OpError, match="page_size: expected at least 1"):
        world.plan()


def test_prefill_lists() -> None:
    world, new = World(), [4, 1, 3]
    out = [torch.full((200,), -7, dtype=torch.int32) for _ in range(5)]
    table = torch.full((8,), 99, dtype=torch.uint16)
    lens = torch.tensor(world.lengths), torch.tensor(new)
    sglang_plan_prefill(
        lens[0], out[0], out[1], lens[1], out[2], out[3], out[4], world.req_to_token, world.req_indices, table, 5, 5
    )
    values = expected(world)
    assert out[0].tolist()[:16] == values["dense_kv_indptr"]
    assert out[1].tolist()[: values["dense_kv_indptr"][-1]] == values["dense_kv_indices"]
    assert out[2].tolist()[:4] == [0, 4, 5, 8]
    assert out[3].tolist()[:16] == [0, 4, 8, 12, 16, 20, 21, 22, 23, 24, 25, 28, 31, 34, 37, 40]
    assert out[4].tolist()[:15] == values["kv_last_page_len"]
    assert table.tolist() == [0, 0, 0, 0, 1, 2, 2, 2]


def test_head_major_transposition() -> None:
    x, indptr = torch.arange(7 * 3 * 2.0).view(7, 3, 2), torch.tensor([0, 4, 7])
    out = torch.empty_like(x)
    chunkwise_nh2hn_transpose(x, out, indptr)
    assert torch.equal(
        out, torch.cat([x[:4].transpose(0, 1).flatten(0, 1), x[4:].transpose(0, 1).flatten(0, 1)]).view_as(x)
    )
    back = torch.empty_like(x)
    chunkwise_hn2nh_transpose(out, back, indptr)
    assert torch.equal(back, x)


def unset(world: World) -> Context:
    """The world's context without outputs: the planner makes them."""
    ctx = Context()
    for name, value in vars(world.context()).items():
        if name not in (*PAGE_LISTS, *WORK_LIST):
            setattr(ctx, name, value)
    return ctx


def plan(world: World, ctx: Context, lengths: tuple[int, ...]) -> None:
    plan_decode(torch.tensor(lengths), world.req_to_token, world.req_indices[: len(lengths)], ctx)


GROWING = ((7,), (61,), (9, 4), (30, 23, 12), (32, 23, 14), (61, 23, 48))


def test_outputs_that_the_planner_made_grow_with_the_requests() -> None:
    world = World()
    ctx, made = unset(world), 0
    for lengths in GROWING:
        held = {name: getattr(ctx, name) for name in (*PAGE_LISTS, *WORK_LIST)}
        plan(world, ctx, lengths)
        fresh = unset(world)
        plan(world, fresh, lengths)
        segments, count = len(lengths) * world.heads, int(fresh.winfo_num_workloads)
        sizes = {"dense_kv_indices": int(fresh.dense_kv_indptr[-1]), "kv_last_page_len": segments}
        sizes |= {"dense_kv_indptr": segments + 1, "sparse_kv_indptr": segments + 1}
        sizes |= dict.fromkeys(("winfo_q_indices", "winfo_kv_offsets", "winfo_kv_lens"), count)
        sizes |= dict.fromkeys(("winfo_num_workloads", "winfo_chunk_size"), 1)
        for name, size in sizes.items():
            assert torch.equal(getattr(ctx, name)[:size], getattr(fresh, name)[:size]), (lengths, name)
        made += sum(getattr(ctx, name) is not tensor for name, tensor in held.items())
        check_sparse(world, ctx)
    assert made < 10 * len(GROWING) / 2, "what has room is kept"


def check_sparse(world: World, ctx: Context) -> None:
    """First and last pages of what is attended, of every segment."""
    for segment in range(ctx.batch_size * world.heads):
        dense, sparse = (
            indices[slice(*indptr[segment : segment + 2].tolist())].tolist()
            for indices, indptr in (
                (ctx.dense_kv_indices, ctx.dense_kv_indptr),
                (ctx.sparse_kv_indices, ctx.sparse_kv_indptr),
            )
        )
        if len(sparse) == len(dense):
            assert sparse == dense
        else:
            assert sparse[: world.bos] == dense[: world.bos] and sparse[-world.eos :] == dense[-world.eos :]


@pytest.mark.parametrize("name", [*PAGE_LISTS, *WORK_LIST[:3]])
def test_outputs_of_the_caller_are_never_replaced(name: str) -> None:
    """Set before or after the planner made the others: too small is an error, large enough stays the same tensor."""
    for early in (True, False):
        world = World()
        ctx, small, large = unset(world), world.ints(2), world.ints(400)
        if not early:
            plan(world, ctx, (26, 23))
        setattr(ctx, name, small)
        with pytest.raises(OpError, match=rf"{name}: expected room for \d+ elements, received 2"):
            plan(world, ctx, (61, 23, 48))
        assert getattr(ctx, name) is small and small.tolist() == [-7, -7]
        setattr(ctx, name, large)
        plan(world, ctx, (61, 23, 48))
        assert getattr(ctx, name) is large and set(large[:2].tolist()) != {-7}


WRONG_LENGTHS = {
    "negative length": ((61, -1, 48), None, r"lengths in \[0, 61\] .* received length -1 in row 2"),
    "longer than the table is wide": ((62, 23, 48), None, r"lengths in \[0, 61\] .* received length 62 in row 4"),
    "no such row": ((61, 23, 48), (4, 6, 0), r"rows in \[0, 6\) .* received length 23 in row 6"),
    "negative row": ((61, 23, 48), (4, 2, -1), r"rows in \[0, 6\) .* received length 48 in row -1"),
    "more lengths": ((61, 23, 48), (4, 2), "a row of req_to_token for each of 3 lengths, received 2"),
    "fewer lengths": ((61, 23), None, "a row of req_to_token for each of 2 lengths, received 3"),
}


@pytest.mark.parametrize("case", WRONG_LENGTHS)
def test_lengths_and_rows_that_the_table_does_not_hold(case: str) -> None:
    lengths, rows, says = WRONG_LENGTHS[case]
    world = World()
    if rows is not None:
        world.req_indices = torch.tensor(rows)
    lens, table, ctx = torch.tensor(lengths, dtype=torch.int32), (world.req_to_token, world.req_indices), world.ctx
    lists, winfo = ([getattr(ctx, name) for name in names] for names in (PAGE_LISTS, WORK_LIST))
    geometry = world.page_size, world.heads, world.topk, world.bos, world.eos, world.max_chunk
    out = [world.ints(200) for _ in range(6)]
    calls = (
        lambda: world.plan(lengths),
        lambda: plan_decode(lens, *table, unset(world)),
        lambda: sglang_plan_decode(lens, *lists, *table, *winfo, *geometry),
        lambda: sglang_plan_prefill(lens, out[0], out[1], lens.abs(), *out[2:5], *table, out[5], 5, 5),
    )
    for call in calls:
        with pytest.raises(OpError, match=says) as caught:
            call()
        assert "\n" not in str(caught.value)
    for tensor in (*lists, *winfo, *out):
        assert set(tensor.tolist()) == {-7}


@pytest.mark.parametrize("new", [(4, -1, 3), (4, 1), (4, 1, 3, 2)])
def test_new_tokens_of_a_prefill(new: tuple[int, ...]) -> None:
    world = World()
    out = [world.ints(200) for _ in range(6)]
    lens, table = torch.tensor(world.lengths), (world.req_to_token, world.req_indices)
    with pytest.raises(OpError, match=r"input_seq_lens: expected 3 numbers >= 0, received \["):
        sglang_plan_prefill(lens, out[0], out[1], torch.tensor(new), *out[2:5], *table, out[5], 5, 5)
    assert all(set(tensor.tolist()) == {-7} for tensor in out)
