"""Arguments of generated kernels: a name in the kernel, and where the launcher finds its value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kvsieve.backends.triton.generate.ir import Op


@dataclass(frozen=True)
class Argument:
    """``source``: ``field``, ``field_head``, ``field_page``, ``field_token`` (strides), ``input`` (of the window or the
    call), ``constant``, ``scratch``, ``whole`` (scratch of all chunks together), ``chunks``, ``pages`` (of a stage)."""

    name: str
    source: str
    key: str = ""


@dataclass(frozen=True)
class Scratch:
    """Memory between stages: for each page, or chunk of pages of ``stage``, of a segment, a ``shape`` of ``dtype``;
    once for a segment, if the stage is that of the queries alone."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    per_chunk: bool
    stage: int

    @property
    def elements(self) -> int:
        """Elements of one page or chunk."""
        return math.prod(self.shape)


@dataclass
class Arguments:
    """Collects what kernels take, each once."""

    listed: dict[str, Argument] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, source: str, key: str = "") -> str:
        """An argument of the kernel, and its name."""
        self.listed.setdefault(name, Argument(name, source, key or name))
        return name

    def constant(self, op: Op, name: str) -> str:
        """The pointer to a tensor of the flow."""
        self.constants[name] = op.data
        return self.add(f"{name}_ptr", "constant", name)
