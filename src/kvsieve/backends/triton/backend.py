"""The Triton backend: selection, attention and mass as hand-written kernels, scoring by ``torch.compile``."""

from __future__ import annotations

import torch

from kvsieve.backends.base import AttentionOptions, Selection
from kvsieve.backends.compiled import CompiledBackend
from kvsieve.backends.triton.attend import attend
from kvsieve.backends.triton.evict import MOST_SLOTS, evict_one
from kvsieve.backends.triton.launch import INTERPRETED
from kvsieve.backends.triton.seed import prompt_mass
from kvsieve.backends.triton.select import select
from kvsieve.backends.triton.store import add_mass, increments, write
from kvsieve.errors import ConfigError
from kvsieve.paging.pool import LayerPool
from kvsieve.paging.slots import Trim
from kvsieve.plan import MassRows, Quota, Rows, Writes


class TritonBackend(CompiledBackend):
    """Runs every flow that traces, on a CUDA GPU; with ``TRITON_INTERPRET=1`` on the CPU, for tests."""

    name = "triton"
    page_major = True

    def kernels(self, pool: LayerPool) -> dict[str, str]:
        names = dict.fromkeys(("summarize", "score"), "torch.compile (inductor)")
        return super().kernels(pool) | dict.fromkeys(("write", "trim", "select", "attend", "mass"), "Triton") | names

    def check_device(self, device: torch.device) -> None:
        """Raises:
        ConfigError: a device that no Triton kernel runs on.
        """
        if device.type != "cuda" and not INTERPRETED:
            raise ConfigError(
                f"backend triton: expected tensors on a CUDA device, received {device}; use backend compiled there"
            )

    def write(self, pool: LayerPool, writes: Writes, k: torch.Tensor, v: torch.Tensor) -> None:
        write(pool, writes, k, v)

    def trim(self, pool: LayerPool, one: Trim) -> None:
        if one.stored == one.kept + 1 and one.stored <= MOST_SLOTS:
            evict_one(pool, one)
        else:  # once a prompt
            super().trim(pool, one)

    def select(self, scores: torch.Tensor | None, quota: Quota, heads: int) -> Selection:
        return select(scores, quota, heads)

    def attend(
        self, q: torch.Tensor, pool: LayerPool, rows: Rows, selection: Selection, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        out, lse, raw = attend(q, pool, rows, selection, options)
        if raw is None or options.mass is None:
            return out, lse, None
        return out, lse, increments(raw, lse, rows, selection, pool.page_size, options.mass)

    def prompt_mass(
        self, q: torch.Tensor, pool: LayerPool, blocks: torch.Tensor, first: int, options: AttentionOptions
    ) -> torch.Tensor:
        return prompt_mass(q, pool, blocks, first, options)

    def add_mass(
        self, pool: LayerPool, rows: Rows, mass: MassRows, selection: Selection, increment: torch.Tensor
    ) -> None:
        self.rebase(pool, rows, mass)
        add_mass(pool, mass, selection, increment)
