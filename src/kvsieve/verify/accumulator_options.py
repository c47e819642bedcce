"""The setting of an accumulator run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvsieve.budget import Budget
from kvsieve.dtypes import DTYPES, STATE_DTYPES
from kvsieve.errors import ConfigError


@dataclass(frozen=True)
class AccumulatorOptions:
    """What is run. Defaults are the setting of the published figures, but for the state's dtype.

    Args:
        seq_len: tokens of the segment, the same at every step. steps: decode steps.
        group_size: query heads of the KV head. head_dim: width of K and V.
        topk, sink, recent: the budget, in pages.
        decay: of the accumulator; None: the flow's own.
        state_dtype: floating dtype of the state rows; None: the flow's own.
        seed: first of ``seeds`` consecutive ones, a request each.

    Raises:
        ConfigError: a number out of range, or a window that is not larger than ``topk``.
    """

    seq_len: int = 128
    steps: int = 600
    group_size: int = 4
    head_dim: int = 128
    topk: int = 32
    sink: int = 4
    recent: int = 8
    decay: float | None = None
    state_dtype: torch.dtype | None = None
    seed: int = 0
    seeds: int = 1
    page_size: int | None = None
    backend: str = "eager"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, least in {"seq_len": 2, "steps": 2, "group_size": 1, "head_dim": 1, "topk": 1, "seeds": 1}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected an integer >= {least}, received {getattr(self, name)}")
        if self.decay is not None and not 0 <= self.decay <= 1:
            raise ConfigError(f"decay: expected a number in [0, 1], received {self.decay}")

    @property
    def budget(self) -> Budget:
        """The budget in pages."""
        return Budget(self.topk, self.sink, self.recent)

    def window(self, page_size: int) -> int:
        """Pages that compete.

        Raises:
            ConfigError: not more than ``topk``.
        """
        width = self.budget.window(-(-self.seq_len // page_size))
        if width <= self.topk:
            raise ConfigError(
                f"a segment of {self.seq_len} tokens in pages of {page_size} leaves {width} pages between sink and "
                f"recent: expected more than topk {self.topk}; raise --seq-len or lower --topk"
            )
        return width


def state_dtype_named(name: str) -> torch.dtype:
    """``bfloat16``, ``float16`` or ``float32``, or their short names.

    Raises:
        ConfigError: another name.
    """
    known = {**STATE_DTYPES, **DTYPES}
    if name not in known:
        raise ConfigError(f"--state-dtype: expected one of {', '.join(known)}, received {name!r}")
    return known[name]
