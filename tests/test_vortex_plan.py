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
