"""What is under test: a flow on a backend, in a dtype, on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvsieve.backends import Backend
from kvsieve.budget import Budget
from kvsieve.flow import Flow, flow_name
from kvsieve.verify.data import Data, LayerShape
from kvsieve.verify.twin import Twin, TwinOptions


@dataclass(frozen=True)
class Subject:
    """A flow and where it runs. ``budget``: small, so that short requests are sparse."""

    flow: Flow
    backend: str | Backend = "eager"
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    given_budget: Budget | None = field(default=None)

    @property
    def name(self) -> str:
        return flow_name(self.flow)

    @property
    def page_size(self) -> int:
        """The flow's own, else 5: no power of two."""
        return self.flow.page_size or 5

    @property
    def budget(self) -> Budget:
        if self.given_budget is not None:
            return self.given_budget
        return Budget(3, 1, 2) if self.flow.score is not None else Budget(0, 1, 3)

    def twin(
        self,
        shapes: Sequence[LayerShape],
        data: Data,
        *,
        page_size: int | None = None,
        judged: float = 1.0,
        **options: Any,
    ) -> Twin:
        """A runtime beside the reference."""
        settings = TwinOptions(
            page_size or self.page_size, tuple(shapes), dtype=self.dtype, device=self.device, **options
        )
        return Twin(self.flow, self.budget, settings, data, self.backend, judged=judged)
