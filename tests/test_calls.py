"""What may happen between the layers of a call, and in which mode of autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from kvsieve import Budget, Evict, Runtime, build_flow
from kvsieve.errors import ConfigError
from kvsieve.verify.data import Draw, IidData, LayerShape
from kvsieve.verify.evicting import EvictingTwin
from kvsieve.verify.twin import Twin, TwinOptions

SHAPE = LayerShape(2, 3, 8, 5)
WAYS: dict[str, dict[str, Any]] = {
    "kept": {"budget": Budget(1, 1, 1)},
    "evicted": {"retention": Evict(6, 2, 4)},
}


def draw(tokens: int, seed: int = 0) -> Draw:
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(size, generator=random) for size in SHAPE.sizes(tokens))
    return q, k, v


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("flow", ["h2o", "streaming_llm"])
def test_a_call_is_over_when_one_of_its_requests_ends(flow: str, way: str) -> None:
    options = {"budget": Budget(0, 1, 1)} if (flow, way) == ("streaming_llm", "kept") else WAYS[way]
    runtime = Runtime(flow, page_size=2, num_blocks=16, **options)
    ends, stays, other = (runtime.admit() for _ in range(3))
    for request in (ends, stays, other):
        call = runtime.extend([request], [8])
        for layer in (0, 1):
            call.attend(layer, *draw(8, layer))
    runtime.preempt(other)
    call = runtime.step([ends, stays])
    call.attend(0, *draw(2))
    runtime.finish([ends])
    runtime.resume(other)  # in the blocks of the one that ended
    pool, blocks = runtime.layers[1].pool, runtime.tables[other].blocks
    before = pool.k[:, blocks].clone()
    with pytest.raises(ConfigError, match="before any of its requests is finished"):
        call.attend(1, *draw(2))
    assert torch.equal(pool.k[:, blocks], before)
    runtime.finish([stays])
    call = runtime.step([other])
    for layer in (0, 1):
        assert call.attend(layer, *draw(1)).out.isfinite().all()


def _life(way: str, backend: str, mode: bool) -> list[torch.Tensor]:
    """A pool that grows in a fork, a copy, a preemption; then steps outside of the mode."""
    with torch.inference_mode(mode):
        runtime = Runtime("h2o", page_size=2, backend=backend, **WAYS[way])
        request = runtime.admit()
        runtime.extend([request], [14]).attend(0, *draw(14))
        forks = [runtime.fork(request) for _ in range(3)]
        twin = copy.deepcopy(runtime)
        runtime.preempt(forks[0])
    results = [twin.step([request, *forks]).attend(0, *draw(4, 1)).out]
    saved = copy.deepcopy(runtime)
    with torch.inference_mode(mode):
        runtime.resume(forks[0])
        forks.append(runtime.fork(forks[0]))
    saved.resume(forks[0])
    for one in (runtime, saved):
        results.append(one.step([request, *forks[:3]]).attend(0, *draw(4, 1)).out)
    results.append(runtime.step(forks).attend(0, *draw(4, 2)).out)
    return results


@pytest.mark.parametrize("backend", ["eager", "compiled"])
@pytest.mark.parametrize("way", WAYS)
def test_memory_made_in_inference_mode_serves_outside_of_it(way: str, backend: str) -> None:
    within, without = (_life(way, backend, mode) for mode in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(within, without, strict=True))
    assert all(torch.equal(a, within[0]) for a in within[:3])


@pytest.mark.parametrize(
    ("scale", "backend", "dtype"),
    [(-0.7, "eager", torch.float32), (-1e-6, "eager", torch.bfloat16), (-0.7, "compiled", torch.float32)],
)
def test_a_negative_scale_turns_the_order_of_the_keys(scale: float, backend: str, dtype: torch.dtype) -> None:
    options = TwinOptions(5, (SHAPE,), dtype=dtype, scale=scale)
    for twin in (
        Twin(build_flow("h2o"), Budget(1, 1, 1), options, IidData(1), backend),
        EvictingTwin(build_flow("h2o"), Evict(8, 1, 3), options, IidData(1), backend),
    ):
        requests = [twin.admit() for _ in range(2)]
        twin.extend(requests, [21, 9])
        twin.step(requests)
        twin.extend(requests, [7, 1])
        twin.step(requests)
