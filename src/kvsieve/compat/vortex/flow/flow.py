"""The flow interface of vortex_torch v1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from numbers import Integral
from typing import Any, ClassVar

import torch

from kvsieve.compat.vortex.abs.tensor import FORMAT, as_vtensor
from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.indexer.context import Context
from kvsieve.flow import Flow


class vFlow(ABC):
    """One class, three methods, written for one segment (a request and one of its KV heads).

    Tensors are ``[L, D0, D1]``. ``q`` is ``[segments, G, D]``; a cache field ``[pages, r, c]``.
    """

    registered_name: ClassVar[str] = ""

    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        """Extra fields: name to the shape ``(r, c)`` of a page's value. ``k`` and ``v`` are there anyway."""

    @abstractmethod
    def forward_cache(self, cache: Mapping[str, Any], loc: torch.Tensor, ctx: Any) -> None:
        """Fill the fields of the pages that the tokens in slots ``loc`` [n] (int64) complete."""

    @abstractmethod
    def forward_indexer(self, q: Any, o: Any, cache: Mapping[str, Any], ctx: Any) -> None:
        """Score the window's pages for ``q`` and end with ``topK(score, o)``: score [S, 1, 1], o [S, 1, 1] int32."""

    def get_cache_meta_info(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        """All fields: those of :meth:`create_cache`, which is called each time, and ``k`` and ``v``."""
        where, fields = f"{type(self).__name__}.create_cache", self.create_cache(page_size, head_dim)
        if not isinstance(fields, Mapping) or not all(map(_is_shape, fields.values())):
            raise OpError(
                where, f"expected {{name: (r, c)}} with r, c >= 1, received {fields!r}", "give every field two sizes"
            )
        reserved = sorted({"k", "v"} & set(fields))
        if reserved:
            names = " and ".join(reserved)
            raise OpError(where, f"expected fields beside k and v, received {names}", "rename the field")
        return {**fields, "k": (page_size, head_dim), "v": (page_size, head_dim)}

    def get_token_ratio(self, page_size: int, head_dim: int) -> float:
        """Elements of all fields a page, in units of ``page_size * head_dim``; 2 for K and V alone."""
        fields = self.get_cache_meta_info(page_size, head_dim)
        return sum(rows * columns for rows, columns in fields.values()) / (page_size * head_dim)

    def run_indexer_virtual(self, group_size: int, page_size: int, head_dim: int) -> int:
        """Profile :meth:`forward_indexer` on empty tensors: elements of fields that it reads per page."""
        ctx = Context()
        ctx.group_size = ctx.num_qo_heads = group_size
        ctx.num_kv_heads, ctx.head_dim, ctx.page_size = 1, head_dim, page_size
        ctx.max_num_pages = ctx.max_num_pages_per_request = 0
        device = "cuda" if torch.cuda.is_available() else "cpu"

        def empty(kind: FORMAT, *shape: int) -> torch.Tensor:
            return as_vtensor(torch.zeros(shape, device=device, dtype=torch.bfloat16), kind)

        fields = self.get_cache_meta_info(page_size, head_dim)
        cache = {name: empty(FORMAT.PAGED, 0, *shape) for name, shape in fields.items()}
        with torch.no_grad():
            q = empty(FORMAT.BATCHED, 1, group_size, head_dim)
            self.forward_indexer(q, empty(FORMAT.RAGGED, 0, 1, 1), cache, ctx=ctx)
        return ctx._aux_total_flops

    @classmethod
    def __kvsieve_flow__(cls) -> type[Flow]:
        """This flow as a kvsieve flow: what ``kvsieve.load_flow`` builds."""
        from kvsieve.compat.vortex.bridge import flow_class

        return flow_class(cls)


def _is_shape(value: Any) -> bool:
    """Two whole numbers from 1 on."""
    if not isinstance(value, (tuple, list, torch.Size)) or len(value) != 2:
        return False
    return all(isinstance(size, Integral) and int(size) >= 1 for size in value)
