"""What the hand-written Triton kernels are run on: quotas, scores, page-major pools of NaN with ragged requests."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from kvsieve.backends.base import Selection
from kvsieve.backends.triton.launch import INTERPRETED
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.slots import POSITION, Trim, slot_fields
from kvsieve.plan import Quota, Rows
from kvsieve.window import Window
from triton_device import DEVICE

SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-42])
LENGTHS = [1, 4, 5, 6, 32, 33, 34, 66, 99, 161]


def quota_of(widths: list[int], k: int, scored: list[int]) -> Quota:
    """Sink 1, recent 2, window pages of all requests; those that are not scored attend everything."""
    pages = [width + 3 for width in widths]
    count = [k + 3 if i in scored else width + 3 for i, width in enumerate(widths)]
    table = torch.randperm(len(widths) * max(pages), device=DEVICE).view(len(widths), -1) + 1
    send = [torch.tensor(x, device=DEVICE) for x in (pages, count, scored, [widths[i] for i in scored])]
    topk = torch.full((len(scored),), k, device=DEVICE)
    width = max(widths[i] for i in scored)
    window = Window(send[2], table, table, send[0], send[3], width, 1, 1, topk, k, sum(widths))
    return Quota(1, 2, send[0], send[1], max(count), True, window, 0, table)


def rankings(rows: int, heads: int, width: int) -> list[torch.Tensor]:
    """Scores: random, tied, equal, special, ascending, neighbours in float32, and all the best in one place."""
    shape = rows, heads, width
    bunched = torch.randn(shape)
    bunched[..., width // 3 : width // 3 + 99] += 9
    return [
        torch.randn(shape),
        torch.randint(0, 3, shape).float(),
        torch.full(shape, -2.5),
        SPECIAL[torch.randint(len(SPECIAL), shape)],
        torch.arange(width).float().expand(shape).contiguous(),
        (1.0 + torch.randperm(width) * 2.0**-23).expand(shape).contiguous(),
        bunched,
    ]


def all_but_tied(width: int, few: int) -> torch.Tensor:
    """Scores [1, 1, width]: nearly half of the pages are equal, ``few`` of these a last bit better, the others far
    below; all lie scattered."""
    scores = torch.full((width,), -1.0)
    scores[::2][: width * 4 // 9] = 1.0
    scores[::2][:few] = 1.0 + 2.0**-23
    return scores[torch.randperm(width)].view(1, 1, width)


def a_bit_apart(width: int, ones: int, twos: int) -> torch.Tensor:
    """Scores [1, 1, width]: some pages lie one or two last bits above the others; of every 64 the sixth does not."""
    steps = torch.zeros(width)
    place = torch.tensor([page for page in range(width) if page % 64 != 5])[torch.randperm(width - (width + 58) // 64)]
    steps[place[:ones]] = 1.0
    steps[place[ones : ones + twos]] = 2.0
    return (1.0 + steps * 2.0**-23).view(1, 1, width)


class World:
    """Ragged requests on a page-major pool of NaN, each with a selection of its own per head."""

    def __init__(
        self,
        lengths: list[int],
        page: int,
        heads: int,
        group: int,
        widths: tuple[int, int],
        dtype: torch.dtype,
        page_major: bool = True,
    ) -> None:
        torch.manual_seed(page * 100 + group)
        pages = [-(-length // page) for length in lengths]
        total, fields = sum(pages) + 2, slot_fields(page, True)
        sums = replace(fields["mass"], shape=(), initial=torch.zeros(()))
        self.pool = LayerPool(heads, page, *widths, dtype, DEVICE, {}, {**fields, "mass_sum": sums}, page_major)
        self.pool.reserve(total, total)
        for field in (self.pool.k, self.pool.v):
            field.fill_(math.nan)
        order = (torch.randperm(total - 1) + 1).tolist()
        table = torch.zeros(len(lengths), max(pages), dtype=torch.int64)
        for row, count in zip(table, pages, strict=True):
            row[:count] = torch.tensor([order.pop() for _ in range(count)])
        for request, length in enumerate(lengths):
            places = torch.arange(length)
            blocks, offsets = table[request, places // page], places % page
            for field in (self.pool.k, self.pool.v):
                field[:, blocks, offsets] = torch.randn(heads, length, field.shape[3]).to(dtype).to(DEVICE)
        self.rows = Rows((), (), tuple(lengths), table.to(DEVICE), torch.tensor(lengths, device=DEVICE))
        kept = [min(count, 5) for count in pages]
        chosen = torch.zeros(len(lengths), heads, max(kept), dtype=torch.int64)
        for request, (count, keep) in enumerate(zip(pages, kept, strict=True)):
            for head in range(heads):
                some = torch.randperm(count - 1)[: keep - 1].sort().values
                chosen[request, head, :keep] = torch.cat([some, torch.tensor([count - 1])])
        self.selection = Selection(chosen.to(DEVICE), torch.tensor(kept, device=DEVICE))
        self.q = torch.randn(len(lengths), heads, group, widths[0]).to(dtype).to(DEVICE)


def full_slots(page: int, kept: int, with_mass: bool) -> tuple[LayerPool, Trim]:
    """Requests with one token more than they keep, the newest in the last slot; mass is tied, and NaN in one head."""
    heads, requests = 3, 4
    pages = -(-(kept + 1) // page)
    pool = LayerPool(heads, page, 20, 12, torch.float32, DEVICE, {}, slot_fields(page, with_mass), True)
    pool.reserve(requests * pages + 1, requests * pages + 1)
    torch.manual_seed(kept)
    for field in (pool.k, pool.v):
        field.copy_(torch.randn(field.shape))
    table = (torch.randperm(requests * pages) + 1).view(requests, pages).to(DEVICE)
    recent = torch.tensor([kept - 3, kept - 1, kept, kept - 9], device=DEVICE)
    slots = torch.arange(kept + 1)
    for head in range(heads):
        for row in table:
            order = torch.cat([torch.randperm(kept), torch.tensor([kept])])
            pool.state[POSITION][head, row[slots // page], slots % page] = order.to(DEVICE)
            if with_mass:
                mass = torch.randint(0, 3, (kept + 1,)).float()
                mass[kept // 2] = math.nan if head == 1 else 0.5
                if head == 2:
                    mass = torch.where(order < 2, 0.0, mass + 1)  # sinks have the least
                pool.state["mass"][head, row[slots // page], slots % page] = mass.to(DEVICE)
    return pool, Trim(table, table, kept + 1, kept, 2, recent)


def same_slots(got: torch.Tensor, want: torch.Tensor, one: Trim) -> bool:
    """Whether two fields agree in the slots that are kept."""
    slots = torch.arange(one.kept)
    page = got.shape[2]
    places = [(row[slots // page], slots % page) for row in one.blocks]
    parts = [[field[:, blocks, offsets].nan_to_num(-7) for field in (got, want)] for blocks, offsets in places]
    return all(torch.equal(*pair) for pair in parts)


def within_one_rounding(out: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether 16-bit values are float32 ones, rounded once."""
    unit = torch.finfo(out.dtype).eps * (1 if INTERPRETED else 0.5)  # the interpreter cuts where a GPU rounds
    return bool(((out.float() - exact).abs() <= 1.2 * unit * exact.abs() + 2e-5).all())
