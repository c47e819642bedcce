"""Why ``Evict`` keeps sinks and recent tokens: what is lost without them, in data in which it shows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kvsieve import Evict, Runtime, build_flow
from kvsieve.paging.slots import POSITION
from kvsieve.verify.data import Draw, LayerShape

SHAPE = LayerShape(1, 3, 20, 12)
CAPACITY, PROMPT = 64, 200
HITTER = 240
"""A generated token that every later query attends more than others."""
DORMANT = range(PROMPT, PROMPT + 600)
"""Steps whose queries do not look at the first token; those before and after give it nearly everything."""
UNIT = SHAPE.head_dim**0.5
"""Key component that adds 1 to the logits of queries whose component is 1."""


def noise(tokens: int) -> Draw:
    """Draws with nothing planted: the first component of queries and keys is free for it."""
    random = torch.Generator().manual_seed(4)
    q, k, v = (0.3 * torch.randn(size, generator=random) for size in SHAPE.sizes(tokens))
    q[..., 0] = k[..., 0] = 0.0
    return q, k, v


def with_a_hitter(tokens: int, strength: float) -> Draw:
    q, k, v = noise(tokens)
    q[..., 0], k[HITTER, :, 0] = 1.0, strength * UNIT
    return q, k, v


def with_a_sink(tokens: int) -> Draw:
    """Token 0 is attended by the prompt and again at the end; its value is unlike all others."""
    q, k, v = noise(tokens)
    q[..., 0], k[0, :, 0] = 2.0, 6 * UNIT
    q[DORMANT.start : DORMANT.stop, :, 0] = -1.0
    v += 1.0
    v[0] = -1.0
    return q, k, v


@dataclass
class Life:
    """Step by step: the tokens that are stored, and the output's relative distance from dense attention's."""

    stored: list[set[int]]
    errors: list[float]


def live(retention: Evict, draw: Draw, decay: float | None) -> Life:
    q, k, v = draw
    runtime, life = Runtime(build_flow("h2o", decay=decay), page_size=5, retention=retention), Life([], [])
    request = runtime.admit()
    runtime.extend([request], [PROMPT]).attend(0, q[:PROMPT], k[:PROMPT], v[:PROMPT])
    for step in range(PROMPT, len(q)):
        out = runtime.step([request]).attend(0, q[step, None], k[step, None], v[step, None]).out[0]
        entry = runtime.tables[request]
        position = runtime.layers[0].pool.state[POSITION][0, entry.rows].flatten()[: entry.stored]
        life.stored.append(set(position.tolist()))
        dense = torch.softmax(q[step] @ k[: step + 1, 0].T / UNIT, -1) @ v[: step + 1, 0]
        life.errors.append(float((out - dense).norm() / dense.norm()))
    return life


@pytest.mark.parametrize("decay", [1.0, None])
@pytest.mark.parametrize("sink", [0, 4])
def test_without_recent_tokens_the_prompt_is_frozen(decay: float | None, sink: int) -> None:
    """A new token has the mass of its own step and the next: less than any that the prompt left, so it goes at once."""
    life = live(Evict(CAPACITY, sink, 1), with_a_hitter(PROMPT + 300, 2.0), decay)
    first, last = ({token for token in stored if token < PROMPT} for stored in (life.stored[0], life.stored[-1]))
    assert len(first) == CAPACITY and len(last) == CAPACITY - 1 and last < first
    for step, stored in enumerate(life.stored[1:], 1):
        assert {token for token in stored if token >= PROMPT} == {PROMPT + step - 1, PROMPT + step}
        assert step == 1 or stored >= last
    assert HITTER not in life.stored[HITTER - PROMPT + 2]


@pytest.mark.parametrize("decay", [1.0, None])
def test_a_heavy_hitter_of_the_generation_stays(decay: float | None) -> None:
    life = live(Evict(CAPACITY), with_a_hitter(PROMPT + 300, 2.0), decay)
    assert all(HITTER in stored for stored in life.stored[HITTER - PROMPT :])
    settled = range(PROMPT, PROMPT + 300 - 33)  # generated, and not protected any more
    assert life.stored[-1] & set(settled) == {HITTER}


def test_a_dormant_sink_is_lost_unless_sinks_stay() -> None:
    draw = with_a_sink(DORMANT.stop + 20)
    guarded, bare = live(Evict(CAPACITY), draw, None), live(Evict(CAPACITY, sink=0), draw, None)
    asleep = slice(0, len(DORMANT))
    lost = next(step for step, stored in enumerate(bare.stored) if 0 not in stored)
    assert 100 < lost < len(DORMANT) and all(0 not in stored for stored in bare.stored[lost:])
    assert all(stored >= {0, 1, 2, 3} for stored in guarded.stored)
    assert max(bare.errors[asleep]) < 0.1 and max(guarded.errors[asleep]) < 0.1  # nothing shows it yet
    awake = slice(len(DORMANT), None)
    assert min(bare.errors[awake]) > 1.5 and max(guarded.errors[awake]) < 0.02
