"""The pages that the tokens of a call complete."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.core.formats import FORMAT
from kvsieve.compat.vortex.core.memory import remembered


@dataclass(frozen=True)
class Completed:
    """Rows of the completed pages, one a (token, KV head) pair: ``paged`` [n] in the pool, ``ragged`` [n] in the call.

    A token's row in the pool is ``(slot // page_size) * heads + head``.
    """

    paged: torch.Tensor
    ragged: torch.Tensor

    @classmethod
    def of(cls, loc: torch.Tensor, page_size: int, heads: int) -> Completed:
        """From the slots ``loc`` [n] of the tokens of a call."""
        key = int(page_size), int(heads)
        if min(key) < 1:
            problem = f"expected page_size and KV heads of at least 1, received {key[0]} and {key[1]}"
            raise OpError("pages", problem, "pass the geometry of the pool")
        return remembered("completed", [loc], key, lambda: cls._make(loc, *key))

    @classmethod
    def _make(cls, loc: torch.Tensor, page_size: int, heads: int) -> Completed:
        token = torch.arange(len(loc), device=loc.device)
        if page_size > 1:  # the size of the result depends on the slots
            token = token[(loc + 1) % page_size == 0]
        head = torch.arange(heads, device=loc.device)
        page = loc[token].long() // page_size
        return cls((page[:, None] * heads + head).flatten(), (token[:, None] * heads + head).flatten())

    def rows(self, kind: FORMAT) -> torch.Tensor:
        """Rows of a tensor of a format."""
        return self.paged if kind is FORMAT.PAGED else self.ragged
