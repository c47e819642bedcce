"""Before anything is timed: the step of some segments against the float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvsieve.backends.base import Selection
from kvsieve.errors import KvsieveError
from kvsieve.mass import FIELDS as MASS_FIELDS
from kvsieve.reference import ReferenceSegment
from kvsieve.verify.checks import Fault, Numbers
from kvsieve.verify.segment import SegmentTwin, StepResult

if TYPE_CHECKING:
    from kvsieve.bench.stack import Stack


def check_step(stack: Stack) -> int:
    """Compare the first step of the first and last segment, stage by stage; returns how many were compared.

    Raises:
        KvsieveError: a stage is wrong beyond what rounding explains.
    """
    heads, batch = stack.setting.kv_heads, stack.setting.batch
    segments = sorted({(0, 0), (batch - 1, heads - 1)})
    for request, head in segments:
        try:
            _check_segment(stack, stack.setting.layers - 1, request, head)
        except Fault as fault:
            raise KvsieveError(f"no time is shown, for the step is wrong: {fault}") from None
    return len(segments)


def _check_segment(stack: Stack, index: int, request: int, head: int) -> None:
    setting, runtime, result = stack.setting, stack.runtime, stack.first[index]
    layer, entry = stack.layer(index), runtime.tables[stack.requests[request]]
    budget = setting.budget_of(stack.flow)
    reference = ReferenceSegment(stack.flow, budget, runtime.page_size, scale=layer.scale, layer=index)
    twin = SegmentTwin(reference, layer.graphs, setting.dtype, f"layer {index} request {request} KV head {head}")
    keys, values = (x[index][request, head].cpu() for x in (stack.keys, stack.values))
    twin.write(keys[:-1], values[:-1])
    if twin.mass is not None:
        twin.mass.go_on_from(stack.before[index][request][head].cpu())
    selection = result.selection
    assert isinstance(selection, Selection) and result.lse is not None
    count = int(selection.count[request])
    scores = None if result.scores is None else result.scores[request, head, : budget.window(len(entry.blocks))].cpu()
    mine = slice(head * setting.group, (head + 1) * setting.group)
    received = StepResult(
        result.out[request, mine].cpu(),
        result.lse[request, head].cpu(),
        selection.pages[request, head, :count].tolist(),
        scores,
    )
    pool, full = layer.pool, entry.length // runtime.page_size
    summaries = _rows(pool.summaries, head, entry.blocks[:full])
    own = {name: field for name, field in pool.state.items() if name not in MASS_FIELDS}
    state = _rows(own, head, entry.rows)
    q = stack.draws[index][0][request, mine].cpu()
    twin.step(Numbers(), q, keys[-1], values[-1], summaries, state, received)  # type: ignore[arg-type]
    if twin.mass is not None:
        stored = {name: pool.state[name][head, entry.rows].cpu() for name in MASS_FIELDS}
        twin.mass.check(Numbers(), twin.place, stored, twin.mass.mass.factor**entry.mass.age)


def _rows(fields: dict[str, torch.Tensor], head: int, places: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    picked = {name: field[head, list(places)].cpu() for name, field in fields.items()}
    return [{name: field[i] for name, field in picked.items()} for i in range(len(places))]
