"""A pool of poisoned pages for generated kernels, and what they compute beside the flow's own code in float64.

Memory is page-major as on a GPU unless a test says otherwise. Blocks and state rows lie anywhere; whatever is no
page of a window holds NaN or a large integer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvsieve.backends.triton.generate import ScoreProgram, generate_score, generate_summarize
from kvsieve.flow import DoublePrecision, Flow, PageFields, extra_parameters, with_dtype
from kvsieve.graph import FlowGraphs
from kvsieve.mass import FIELDS as MASS_FIELDS
from kvsieve.paging.pool import LayerPool
from kvsieve.verify.poison import poisoned_pools
from kvsieve.window import Window

F64 = torch.float64
Check = Callable[[str, torch.Tensor, torch.Tensor], float]


@dataclass
class World:
    """Requests with windows of ``widths`` pages, one after another in a batch of more requests than are scored."""

    graphs: FlowGraphs
    pool: LayerPool
    window: Window
    q: torch.Tensor
    widths: tuple[int, ...]

    def own(self, field: torch.Tensor, request: int, head: int, rows: bool) -> torch.Tensor:
        """A request's window pages of a field."""
        table = self.window.row_table if rows else self.window.table
        place = int(self.window.requests[request])
        first = self.window.sink
        return field[head, table[place, first : first + self.widths[request]]]

    def blocks(self) -> torch.Tensor:
        """All blocks of windows."""
        parts = [
            self.window.table[int(place), self.window.sink : self.window.sink + width]
            for place, width in zip(self.window.requests, self.widths, strict=True)
        ]
        return torch.cat(parts)


def make_world(
    graphs: FlowGraphs,
    widths: Sequence[int],
    heads: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    q_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    page_major: bool = True,
) -> World:
    """Random K, V and state in the windows' pages; summaries are not computed yet."""
    torch.manual_seed(seed)
    geometry, sink, recent = graphs.geometry, 2, 1
    p, total, sizes = geometry.page_size, sum(widths), (geometry.head_dim, geometry.v_head_dim)
    fields = graphs.summary_fields, graphs.state_fields
    with poisoned_pools():
        pool = LayerPool(heads, p, *sizes, dtype, torch.device(device), *fields, page_major=page_major)
        pool.reserve(total + 5, total + 7)
    requests = torch.randperm(len(widths) + 2)[: len(widths)]
    table = torch.full((len(widths) + 2, sink + max(widths) + recent + 3), 0, dtype=torch.int64)
    rows = table.clone()
    blocks, places = torch.randperm(total + 4) + 1, torch.randperm(total + 6) + 1
    lengths, first = torch.full((len(widths) + 2,), 3), 0
    for place, width in zip(requests.tolist(), widths, strict=True):
        table[place, sink : sink + width] = blocks[first : first + width]
        rows[place, sink : sink + width] = places[first : first + width]
        lengths[place] = (sink + width) * p + max(1, recent * p - p // 2)
        first += width
    for field in (pool.k, pool.v):
        field[:, blocks[:total]] = torch.randn(heads, total, *field.shape[2:], device=device).to(dtype)
    for name, field in pool.state.items():
        floating = field.dtype.is_floating_point
        shape = heads, total, *field.shape[2:]
        drawn = torch.randn(shape) if floating else torch.randint(0, 7, shape)
        drawn = drawn.abs() if name in MASS_FIELDS else drawn
        field[:, places[:total]] = drawn.to(field)
    scale = torch.rand(len(widths), 1) + 0.5 if set(MASS_FIELDS) & set(pool.state) else None
    window = Window(
        requests=requests.to(device),
        table=table.to(device),
        row_table=rows.to(device),
        lengths=lengths.to(device),
        widths=torch.tensor(widths, device=device),
        width=max(widths) + 2,
        sink=sink,
        page_size=p,
        topk=torch.zeros(len(widths), dtype=torch.int64, device=device),
        max_topk=0,
        total_pages=total,
        mass_scale=None if scale is None else scale.to(device),
    )
    q = torch.randn(len(widths), geometry.group, heads, geometry.head_dim).transpose(1, 2).to(q_dtype or dtype)
    return World(graphs, pool, window, q.to(device), tuple(widths))


def store_token_by_token(pool: LayerPool) -> None:
    """Move K and V to where an engine keeps all heads of a token side by side: tokens of a page are apart."""
    for name in ("k", "v"):
        field = getattr(pool, name)
        heads, blocks, p, width = field.shape
        moved = torch.full((blocks, p, 2 * heads, width), math.nan, dtype=field.dtype, device=field.device)
        moved = moved[:, :, :heads].permute(2, 0, 1, 3)
        setattr(pool, name, moved.copy_(field))


def run_beside_float64(world: World, check: Check) -> float:
    """Summaries, scores and states of generated kernels beside the flow's own code in float64; the worst error."""
    exact, error = with_dtype(world.graphs.flow, F64), 0.0
    heads = range(world.pool.num_kv_heads)
    if world.graphs.summarize is not None:
        error = max(error, _summarize_beside(world, exact, check))
    if world.graphs.score is None:
        return error
    expected = {
        (request, head): _scored(world, exact, request, head) for request in range(len(world.widths)) for head in heads
    }
    before = {name: field.clone() for name, field in world.pool.state.items()}
    for program in forms(generate_score(world.graphs)):
        for name, field in before.items():
            world.pool.state[name].copy_(field)
        scores = program.run(world.q, world.pool, world.window)
        assert scores.dtype == torch.float32 and scores.shape == (len(world.widths), len(heads), world.window.width)
        for (request, head), results in expected.items():
            for name, result in results.items():
                if name == "scores":
                    received = scores[request, head, : world.widths[request]]
                else:
                    received = world.own(world.pool.state[name], request, head, True)
                if len(result):
                    error = max(error, check(f"{name}, W = {len(result)}", received.cpu(), result))
    return error


def forms(program: ScoreProgram) -> list[ScoreProgram]:
    """By chunks of pages, as windows too long for one program are scored; and the form for shorter ones, if any."""
    whole, program.whole = program.whole, None
    return [program] if whole is None else [program, whole]


def _summarize_beside(world: World, exact: Flow, check: Check) -> float:
    assert exact.summarize is not None
    error, blocks = 0.0, world.blocks()
    zeros = torch.zeros(3, dtype=torch.int64, device=blocks.device)
    mixed = torch.cat([zeros[:1], blocks, zeros])
    null = world.pool.k[:, 0].clone(), world.pool.v[:, 0].clone()
    world.pool.k[:, 0], world.pool.v[:, 0] = 1, 1  # a summary of the null block would be a number
    generate_summarize(world.graphs).run(world.pool, mixed)
    world.pool.k[:, 0], world.pool.v[:, 0] = null
    for head in range(world.pool.num_kv_heads):
        pages = zip(world.pool.k[head, blocks].cpu(), world.pool.v[head, blocks].cpu(), strict=True)
        with DoublePrecision():
            rows = [exact.summarize(k.to(F64), v.to(F64)) for k, v in pages]
        for name, field in world.pool.summaries.items():
            wanted = torch.stack([row[name] for row in rows])
            error = max(error, check(name, field[head, blocks].cpu(), wanted))
    for field in world.pool.summaries.values():
        if field.dtype.is_floating_point:
            others = torch.ones(field.shape[1], dtype=torch.bool)
            others[blocks.cpu()] = False
            assert field[:, others.to(field.device)].isnan().all(), "a block that was not asked for was written"
    return error


def _scored(world: World, exact: Flow, request: int, head: int) -> Mapping[str, torch.Tensor]:
    """The flow's own code on what is stored."""
    assert exact.score is not None
    geometry, window, width = world.graphs.geometry, world.window, world.widths[request]
    if not width:
        return {}
    pool = world.pool
    stored = {"k": (pool.k, False), "v": (pool.v, False)}
    stored |= {name: (field, False) for name, field in pool.summaries.items()}
    stored |= {name: (field, True) for name, field in pool.state.items()}
    fields = {name: world.own(field, request, head, rows).cpu() for name, (field, rows) in stored.items()}
    fields = {name: value.to(F64) if value.is_floating_point() else value for name, value in fields.items()}
    for name in set(MASS_FIELDS) & set(fields):
        assert window.mass_scale is not None
        fields[name] = fields[name] * window.mass_scale[request].to(F64).cpu()
    fields["position"] = (window.sink + torch.arange(width, dtype=F64)) * geometry.page_size
    fields["age"] = int(window.lengths[window.requests[request]]) - geometry.page_size - fields["position"]
    numbers = {"layer": geometry.layer, "scale": geometry.attention_scale}
    with DoublePrecision():
        q = world.q[request, head].cpu().to(F64)
        result = exact.score(q, PageFields(fields), **{name: numbers[name] for name in extra_parameters(exact)})
    scores, state = result if isinstance(result, tuple) else (result, {})
    return {"scores": scores, **state}


def close(bound: float, small: float = 0.1) -> Check:
    """A check of errors relative to the largest value (or to ``small``: means may cancel); integers are equal."""

    def check(what: str, received: torch.Tensor, expected: torch.Tensor) -> float:
        assert received.shape == expected.shape, f"{what}: {tuple(received.shape)} for {tuple(expected.shape)}"
        if not expected.is_floating_point():
            assert torch.equal(received.to(expected.dtype), expected), what
            return 0.0
        difference = (received.to(F64) - expected).abs().max()
        error = float(difference / expected.abs().max().clamp(min=small))
        assert math.isfinite(error) and error <= bound, f"{what}: relative error {error:.1e}"
        return error

    return check
