"""Does a step grow slower as a request grows longer? One layer under ``Evict``: ``python examples/evict_speed.py``."""

from __future__ import annotations

import statistics
import sys
import time

import torch

from kvsieve import Evict, Runtime

CAPACITY, KV_HEADS, GROUP, HEAD_DIM = 512, 8, 4, 128
TOKENS = (1_000, 20_000)


class Generation:
    """A request of one layer that has generated some tokens from a prompt of 600."""

    def __init__(self, tokens: int, backend: str) -> None:
        self.runtime = Runtime("h2o", page_size=16, retention=Evict(CAPACITY), backend=backend)
        self.request = self.runtime.admit()
        self.runtime.extend([self.request], [600]).attend(0, *draw(600))
        for _ in range(tokens):
            self.step()

    def step(self) -> float:
        """Seconds of a step."""
        qkv = draw(1)
        start = time.perf_counter()
        self.runtime.step([self.request]).attend(0, *qkv)
        return time.perf_counter() - start

    def bytes(self) -> int:
        """Of the layer's K, V and state."""
        pool = self.runtime.layers[0].pool
        return sum(field.nbytes for field in (pool.k, pool.v, *pool.state.values()))


def draw(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(tokens, KV_HEADS * GROUP, HEAD_DIM)
    return q, torch.randn(tokens, KV_HEADS, HEAD_DIM), torch.randn(tokens, KV_HEADS, HEAD_DIM)


def main(backend: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generations = [Generation(tokens, backend) for tokens in TOKENS]
    rounds = [[one.step() for one in generations] for _ in range(400)]  # in turn: a disturbance meets both
    for tokens, one, times in zip(TOKENS, generations, zip(*rounds, strict=True), strict=True):
        median, least = 1e6 * statistics.median(times), 1e6 * min(times)
        print(f"after {tokens:6,} tokens: median {median:.0f} µs, least {least:.0f} µs, {one.bytes():,} bytes")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "eager")
