"""What tables and pools hold, as a twin compares it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from kvsieve.mass import FIELDS as MASS_FIELDS
from kvsieve.paging.allocator import NULL_BLOCK
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.table import RequestId, RequestTables
from kvsieve.verify.checks import expect


def page_by_page(
    fields: Mapping[str, torch.Tensor], head: int, places: Sequence[int] | torch.Tensor
) -> list[Mapping[str, torch.Tensor]]:
    """Fields [H, N, ...] of one KV head at some places [S] of N, on the CPU: for each place, values by name."""
    picked = {name: field[head, places].cpu() for name, field in fields.items()}
    return [{name: field[i] for name, field in picked.items()} for i in range(len(places))]


def flow_state(pool: LayerPool) -> dict[str, torch.Tensor]:
    """State fields that the flow's ``score`` returns: all but the attention mass."""
    return {name: field for name, field in pool.state.items() if name not in MASS_FIELDS}


def stored_mass(pool: LayerPool, head: int, rows: Sequence[int] | torch.Tensor) -> dict[str, torch.Tensor]:
    """The attention mass as it is stored, all rows at once: in a long request they are many."""
    return {name: pool.state[name][head, rows].cpu() for name in MASS_FIELDS}


def check_tables(
    tables: RequestTables, lengths: Mapping[RequestId, int], out: Collection[RequestId], page_size: int
) -> None:
    """Requests, their lengths, and their blocks and rows, none of those that are ``out`` of the pool.

    Raises:
        Fault: one of them is not what it must be.
    """
    expect(set(tables) == set(lengths), "life cycle", "runtime", f"holds requests {sorted(tables)}")
    for request, length in lengths.items():
        entry, place = tables[request], f"request {request}"
        expect(entry.length == length, "life cycle", place, f"length {entry.length}, expected {length}")
        pages = 0 if request in out else -(-entry.stored // page_size)
        expect(len(entry.blocks) == pages, "storage", place, f"{len(entry.blocks)} blocks, expected {pages}")
        for table, listed in ((tables.blocks, entry.blocks), (tables.rows, entry.rows)):
            row = table[entry.slot].tolist()
            padding = [int(NULL_BLOCK)] * (len(row) - len(listed))
            expect(row == [*listed, *padding], "storage", place, f"table {row}, expected {listed} and null blocks")
