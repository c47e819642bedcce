"""Random flows, seeded: programs of the grammar as flows of ``summarize``, ``init_state`` and ``score``."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flow_builder import F64, WIDTHS, Builder, Program
from kvsieve.flow import DoublePrecision, Flow
from kvsieve.graph import Geometry


class RandomFlow(Flow):
    """Runs its programs; the constants are tensors of the flow, the rest is code."""

    def __init__(self, seed: int, summary: Program | None, scoring: Program, state: Mapping[str, torch.Tensor]) -> None:
        self.seed, self._summary, self._scoring = seed, summary, scoring
        self.summary_constants = summary.constants if summary else []
        self.score_constants = scoring.constants
        self.initial = dict(state)


def _summarize(self: RandomFlow, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
    assert self._summary is not None
    return self._summary.run(self.summary_constants, {"k": k, "v": v})


def _init_state(self: RandomFlow, page_size: int, head_dim: int) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in self.initial.items()}


def _score(self: RandomFlow, q: torch.Tensor, pages: Mapping[str, torch.Tensor], layer: int, scale: float) -> Any:
    named = {name: pages[name] for name in self._scoring.inputs if name not in ("q", "layer", "scale")}
    results = self._scoring.run(self.score_constants, {**named, "q": q, "scale": scale, "layer": layer * 0.1})
    scores = results.pop("scores")
    return (scores, results) if results else scores


def random_flow(seed: int, uses: Counter[tuple[str, str]]) -> tuple[Flow, Geometry]:
    """The flow of a seed. ``uses`` counts what earlier flows drew and steers towards what they did not."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    geometry = Geometry(
        page_size=rng.choice((1, 5, 33)) if seed % 3 else rng.choice((1, 5)),
        head_dim=rng.choice((3, 7, 12)),
        v_head_dim=rng.choice((3, 5)),
        group=rng.choice((1, 3, 7)),
        layer=rng.choice((0, 4)),
    )
    summary, fields = _summary_program(rng, uses, geometry) if rng.random() < 0.8 else (None, {})
    state = _initial_state(rng, geometry) if rng.random() < 0.5 else {}
    scoring = _score_program(rng, uses, geometry, fields, state)
    methods: dict[str, Any] = {"score": _score, "__module__": __name__}
    methods |= {"summarize": _summarize} if summary else {}
    methods |= {"init_state": _init_state} if state else {}
    return type("RandomFlow", (RandomFlow,), methods)(seed, summary, scoring, state), geometry


def _summary_program(
    rng: random.Random, uses: Counter[tuple[str, str]], geometry: Geometry
) -> tuple[Program, dict[str, torch.Tensor]]:
    builder = Builder(rng, uses)
    k, v = (torch.randn(geometry.page_size, width).to(F64) for width in (geometry.head_dim, geometry.v_head_dim))
    builder.leaf("k", k, k)
    builder.leaf("v", v, v)
    builder.grow(rng.randint(1, 3))
    ends = builder.unused() or [0]
    first, second = _end(ends[0]), _pooled_end(ends)
    builder.program.outputs["f"] = first
    if rng.random() < 0.4:
        builder.program.outputs["flag"] = lambda values: second(values) > 0.123
    if rng.random() < 0.4:
        builder.program.outputs["level"] = lambda values: (4 * second(values) + 0.29).floor().to(torch.int32)
    builder.program.outputs["total"] = second
    with DoublePrecision():
        fields = builder.program.run([c.to(F64) for c in builder.program.constants], {"k": k, "v": v})
    return builder.program, fields


def _end(index: int) -> Callable[[Any], torch.Tensor]:
    return lambda values: values[index]


def _pooled_end(ends: Sequence[int]) -> Callable[[Any], torch.Tensor]:
    return lambda values: sum((0.5 + 0.1 * i) * values[i].mean() for i in ends)  # type: ignore[return-value]


def _initial_state(rng: random.Random, geometry: Geometry) -> dict[str, torch.Tensor]:
    shape = rng.choice(((), (geometry.page_size,), (geometry.head_dim,), (2, 3)))
    state = {"trail": torch.full(shape, 0.25)}
    if rng.random() < 0.4:
        state["seen"] = torch.zeros((), dtype=torch.int64)
    return state


def _score_program(
    rng: random.Random,
    uses: Counter[tuple[str, str]],
    geometry: Geometry,
    fields: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
) -> Program:
    builder = Builder(rng, uses)
    p, d, dv = geometry.page_size, geometry.head_dim, geometry.v_head_dim

    def per_page(name: str, *shape: int) -> None:
        builder.leaf(name, *(torch.randn(w, *shape, dtype=F64) for w in WIDTHS))

    q = torch.randn(geometry.group, d, dtype=F64)
    builder.leaf("q", q, q)
    builder.leaf("scale", geometry.attention_scale, geometry.attention_scale)
    builder.leaf("layer", geometry.layer * 0.1, geometry.layer * 0.1)
    per_page("k", p, d)
    if rng.random() < 0.5:
        per_page("v", p, dv)
    for name, value in fields.items():
        if value.is_floating_point():
            per_page(name, *value.shape)
    if "trail" in state:
        per_page("trail", *state["trail"].shape)
    _whole_number_leaves(builder, rng, fields, state)
    builder.grow(rng.randint(3, 7))
    _outputs(builder, builder.unused(), state)
    return builder.program


def _whole_number_leaves(
    builder: Builder, rng: random.Random, fields: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> None:
    """position, age, and integer and boolean fields, used through a first step that makes them small floats."""
    names = [name for name in ("position", "age") if rng.random() < 0.6]
    names += [name for name in ("flag", "level") if name in fields] + [name for name in ("seen",) if name in state]
    for name in names:
        dtype = {"flag": torch.bool, "level": torch.int32, "seen": torch.int64}.get(name, F64)
        builder.leaf(name, *(torch.ones(w, dtype=dtype) for w in WIDTHS))
    for name in names:
        index = builder.program.inputs.index(name)
        function = _soften(name)
        position = len(builder.program.inputs) + len(builder.program.steps)
        builder.program.steps.append((function, [index]))
        builder.hidden.add(index)
        builder.examples[position] = tuple(torch.rand(w, dtype=F64) for w in WIDTHS)  # type: ignore[assignment]


def _soften(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name in ("position", "age"):
        return lambda x: torch.where(x < 14.5, 0.5, 8 / (x + 8))
    if name == "flag":
        return lambda x: x.float() - 0.2917
    return lambda x: 0.2917 * (x // 2 % 5).float() + 0.1093 * x.clamp(-3, 3)


def _outputs(builder: Builder, ends: Sequence[int], state: Mapping[str, torch.Tensor]) -> None:
    """scores [W]: every end reduced to one number a page, or one for all pages; new state from the scores."""
    terms = []
    for index in ends:
        rest = [axis for axis in range(len(builder.shape(index))) if axis != builder.page(index)]
        terms.append((index, rest, float(builder.random.uniform(0.5, 1.5))))
    anchor = builder.program.inputs.index("k")

    def scores(values: Any) -> torch.Tensor:
        total = 0.2 * values[anchor].mean((1, 2))
        for index, rest, weight in terms:
            total = total + weight * (values[index].mean(rest) if rest else values[index])
        return total

    builder.program.outputs["scores"] = scores
    if "trail" in state:
        trail = builder.program.inputs.index("trail")
        ones = [1] * state["trail"].dim()
        builder.program.outputs["trail"] = lambda values: (
            0.5 * values[trail] + 0.3 * torch.tanh(values["scores"]).reshape(-1, *ones)
        )
    if "seen" in state:
        seen = builder.program.inputs.index("seen")
        builder.program.outputs["seen"] = lambda values: values[seen] + (values["scores"] > 0.117).long()
