"""Runs built kernels: what each is launched with, and the memory between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
import triton.language as tl

from kvsieve.backends.triton.generate.arguments import Argument, Scratch
from kvsieve.backends.triton.generate.kernel import Kernel
from kvsieve.backends.triton.generate.loader import load_source
from kvsieve.backends.triton.generate.tuning import GATHERING, Tiling, registers
from kvsieve.backends.triton.launch import AT_END, INTERPRETED, launch_options, power_of_two
from kvsieve.paging.pool import LayerPool

SHARED = ("tokens", "count", "width_bound", "sink", "page_size")
"""Arguments of all of a program's kernels."""
_AXES = {"field_head": 0, "field_page": 1, "field_token": 2}
"""The axis of a field whose stride an argument is, by its source."""


@dataclass
class Built:
    """Kernels for a number of KV heads, with their tiles; one module holds them all."""

    kernels: list[Kernel]
    tilings: list[Tiling]
    gatherings: dict[int, Kernel]
    source: str
    ahead: list[tuple[Kernel, Tiling]] = field(default_factory=list)
    """What is computed of the queries alone, before all stages."""
    tuned: dict[tuple[torch.device, int], tuple[Tiling, ...] | None] = field(default_factory=dict)
    """Tilings in place of these, by GPU and class of work (:mod:`~kvsieve.backends.triton.generate.autotune`)."""
    _constants: dict[tuple[str, torch.device], torch.Tensor] = field(default_factory=dict)

    @cached_property
    def module(self) -> ModuleType:
        """The kernels, imported."""
        return load_source(self.kernels[0].name.rpartition("_")[0], self.source)

    def constant(self, kernel: Kernel, name: str, device: torch.device) -> torch.Tensor:
        """A tensor of the flow on a device, sent once."""
        key = f"{kernel.name}.{name}", device
        if key not in self._constants:
            self._constants[key] = kernel.constants[name].contiguous().to(device)
        return self._constants[key]


@dataclass
class Launch:
    """One run of a program: its inputs, and the memory between its stages."""

    built: Built
    tilings: Sequence[Tiling]
    heads: int
    requests: int
    call: Mapping[str, Any]
    pool: LayerPool
    chunks: list[int]
    """Per stage, as many as the next stages combine."""
    memory: dict[str, torch.Tensor] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)

    def reserve(self, one: Scratch, pages: int) -> None:
        """Memory for a value of so many pages, or chunks of pages, of each segment."""
        self.memory[one.name] = self._empty(one, pages)

    def _empty(self, one: Scratch, pages: int) -> torch.Tensor:
        dtype = torch.int8 if one.dtype is torch.bool else one.dtype
        count = self.requests * self.heads * pages * one.elements
        return torch.empty(count, dtype=dtype, device=self.pool.k.device)

    def start(self, kernel: Kernel, tile: Tiling, chunks: int, when: int = AT_END) -> None:
        """Launch a kernel for so many chunks of each request. ``when``: it lets the next one start (:mod:`launch`)."""
        values = [self._find(one, kernel) for one in kernel.arguments if one.source != "pages"]
        shared = [self.call[name] for name in SHARED if name in self.call]
        constants = [self.tilings[int(one.key)].pages for one in kernel.arguments if one.source == "pages"]
        constants += [tile.pages, self.heads]
        if "tokens" in self.call:
            constants += [self.pool.page_size, self.pool.k.shape[-1], self.pool.v.shape[-1]]
        constants += [tile.each, tile.stages, dot_type(self.pool.k.dtype)] if kernel.loops else []
        dealt = self._dealt(kernel, tile, chunks)
        programs = (dealt or chunks) * (1 if kernel.wide else self.heads // tile.each)
        chosen = {"REQUESTS": power_of_two(self.requests) if dealt else 0, "LATE": self.call.get("settled", False)}
        getattr(self.built.module, kernel.name)[programs, self.requests](
            *values,
            *shared,
            self.heads,
            *constants,
            **{name: value for name, value in chosen.items() if name in kernel.chosen},
            **launch_options(self.pool.k.device, programs * self.requests, when),
            maxnreg=registers(kernel, tile),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def _dealt(self, kernel: Kernel, tile: Tiling, chunks: int) -> int:
        """Chunks for each request when those of all are dealt out in one row; 0 where that saves less than half."""
        if "REQUESTS" not in kernel.chosen:
            return 0
        most = self.call["most_pages"] // tile.pages + self.requests
        share = -(-most // self.requests)
        return share if 2 * share <= chunks else 0

    def gather(self, stage: int, parts: Sequence[Scratch]) -> None:
        """Put the chunks of a stage together: the next ones find a single one."""
        self.whole = {one.name: self._empty(one, 1) for one in parts}
        self.start(self.built.gatherings[stage], GATHERING, 1)
        self.memory |= self.whole
        self.chunks[stage] = 1

    def _find(self, one: Argument, kernel: Kernel) -> Any:
        if one.source == "input":
            return self.call[one.name]
        if one.source in ("scratch", "whole"):
            return (self.memory if one.source == "scratch" else self.whole)[one.key]
        if one.source == "chunks":
            return self.chunks[int(one.key)]
        if one.source == "constant":
            return self.built.constant(kernel, one.key, self.pool.k.device)
        stored = {"k": self.pool.k, "v": self.pool.v, **self.pool.summaries, **self.pool.state}[one.key]
        return stored if one.source == "field" else stored.stride(_AXES[one.source])


def dot_type(stored: torch.dtype) -> Any:
    """What tensor cores multiply. Triton's interpreter knows no bfloat16."""
    return tl.float32 if INTERPRETED else {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[stored]
