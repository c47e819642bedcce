"""What is measured: geometry, budget, storage, threads."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvsieve.budget import Budget
from kvsieve.errors import ConfigError
from kvsieve.flow import Flow


@dataclass(frozen=True)
class Setting:
    """The geometry of a measurement.

    ``budget`` counts pages of ``page_size`` tokens; ``layers`` share a step's plan; 0: as many as suit the device.
    ``tune``: on a GPU, tilings of generated kernels are tried first.
    """

    device: str = "cpu"
    backend: str = "compiled"
    batch: int = 1
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    budget: Budget = field(default_factory=lambda: Budget(64, 1, 2))
    dtype: torch.dtype = torch.bfloat16
    layers: int = 0
    repeats: int = 25
    tune: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def on_gpu(self) -> bool:
        """Whether times are taken on a CUDA device."""
        return self.device.startswith("cuda")

    def page_size_of(self, flow: Flow) -> int:
        """The page size that a flow runs at: its own, if it requires one."""
        return flow.page_size or self.page_size

    def budget_of(self, flow: Flow) -> Budget:
        """The same number of tokens in the flow's pages; a flow without ``score`` keeps more recent ones instead."""
        sink, topk, recent = (
            -(-pages * self.page_size // self.page_size_of(flow))
            for pages in (self.budget.sink, self.budget.topk, self.budget.recent)
        )
        return Budget(topk, sink, recent) if flow.score is not None else Budget(0, sink, topk + recent)

    def dense_bytes(self, context: int) -> int:
        """K and V that dense attention reads in one layer."""
        return self.batch * self.kv_heads * context * 2 * self.head_dim * self.dtype.itemsize


def parse_heads(text: str) -> tuple[int, int]:
    """``"32/8"``: query heads and KV heads.

    Raises:
        ConfigError: another form, or query heads that no KV head shares evenly.
    """
    parts = text.split("/")
    if (
        len(parts) != 2
        or not all(part.strip().isdecimal() and int(part) for part in parts)
        or int(parts[0]) % int(parts[1])
    ):
        raise ConfigError(
            f"--heads: expected query heads/KV heads, the first a multiple, such as 32/8, received {text!r}"
        )
    return int(parts[0]), int(parts[1])
