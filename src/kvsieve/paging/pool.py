"""The memory of one layer: K, V and summary fields by block, state fields by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvsieve.graph import FieldSpec
from kvsieve.mass import FIELDS as MASS_FIELDS


def uninitialised(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """All pool memory comes from here, with arbitrary content; tests poison it."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


class LayerPool:
    """``k [H, blocks, p, D]``, ``v [H, blocks, p, Dv]``, ``summaries[name] [H, blocks, *shape]``,
    ``state[name] [H, rows, *shape]``. Block and row 0 are the null ones.

    In memory either heads come first, so that consecutive blocks of a head are one contiguous run, or, if
    ``page_major``, blocks do, so that a page of all heads is one.
    """

    def __init__(
        self,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        summary_fields: Mapping[str, FieldSpec],
        state_fields: Mapping[str, FieldSpec],
        page_major: bool = False,
    ) -> None:
        self.num_kv_heads, self.page_size, self.page_major = num_kv_heads, page_size, page_major
        self.dtype, self.device = dtype, device
        self.initial = {
            name: initial_value(spec).to(device, spec.dtype or dtype) for name, spec in state_fields.items()
        }
        self.k = self._storage(0, (page_size, head_dim), dtype)
        self.v = self._storage(0, (page_size, v_head_dim), dtype)
        self.summaries = {
            name: self._storage(0, spec.shape, spec.dtype or dtype) for name, spec in summary_fields.items()
        }
        self.state = {name: self._storage(0, spec.shape, spec.dtype or dtype) for name, spec in state_fields.items()}

    @property
    def rows(self) -> int:
        """State rows, the null row included; 0 if the flow has no state."""
        return next((field.shape[1] for field in self.state.values()), 0)

    @torch.inference_mode(False)  # a fork or a resume may make it grow in a caller's inference mode
    def reserve(self, blocks: int, rows: int) -> None:
        """Grow to at least this many blocks and rows; what was stored stays."""
        if self.k.shape[1] >= blocks and (not self.state or self.rows >= rows):
            return
        self.k, self.v = self._grown(self.k, blocks), self._grown(self.v, blocks)
        self.summaries = {name: self._grown(field, blocks) for name, field in self.summaries.items()}
        self.state = {name: self._grown(field, rows) for name, field in self.state.items()}

    def flat(self, field: torch.Tensor) -> torch.Tensor:
        """A field as one axis of (head, block or row) in the order of memory, without a copy: see :meth:`places`."""
        return (field.transpose(0, 1) if self.page_major else field).flatten(0, 1)

    def places(self, index: torch.Tensor, size: int) -> torch.Tensor:
        """Where blocks or rows [..., H or 1, n] lie in a :meth:`flat` field of so many blocks or rows, by head:
        [..., H, n]."""
        head = torch.arange(self.num_kv_heads, device=index.device)[:, None]
        return index * self.num_kv_heads + head if self.page_major else head * size + index

    def write(self, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store tokens: k [T, H, D], v [T, H, Dv] at (block, offset) [T]."""
        self.k[:, blocks, offsets] = k.transpose(0, 1)
        self.v[:, blocks, offsets] = v.transpose(0, 1)

    def enter(self, rows: torch.Tensor) -> None:
        """Start the state of pages that entered a request at the flow's initial value."""
        if not len(rows):
            return  # most steps: nothing to launch
        for name, value in self.initial.items():
            self.state[name][:, rows] = value

    def rebase_mass(self, rows: torch.Tensor, factor: float) -> None:
        """Multiply the stored mass of some rows."""
        for name in MASS_FIELDS:
            if name in self.state:
                self.state[name][:, rows] *= factor

    def clear_mass(self, rows: torch.Tensor) -> None:
        """Forget the stored mass of some rows."""
        for name in MASS_FIELDS:
            if name in self.state:
                self.state[name].index_fill_(1, rows.flatten(), 0.0)

    def add_mass(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Add to stored mass: values [..., H, K, p] at state rows [..., H, K]; rows of a head may repeat."""
        capacity = self.state["mass"].shape[1]
        index = self.places(rows, capacity).flatten()
        self.flat(self.state["mass"]).index_add_(0, index, values.reshape(-1, self.page_size))
        if "mass_sum" in self.state:
            self.flat(self.state["mass_sum"]).index_add_(0, index, values.sum(-1).flatten())

    def copy(self, blocks: Sequence[tuple[int, int]], rows: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (K, V, summaries) and state rows, each pair (from, to)."""
        for pairs, fields in ((blocks, self._by_block()), (rows, self.state)):
            if pairs:
                source, target = torch.tensor(pairs, device=self.device).unbind(1)
                for field in fields.values():
                    field[:, target] = field[:, source]

    def tokens(self, blocks: Sequence[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``length`` tokens of a request that lies in ``blocks``: k [length, H, D], v [length, H, Dv]."""
        places = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        k, v = (field.index_select(1, places).flatten(1, 2)[:, :length].transpose(0, 1) for field in (self.k, self.v))
        return k, v

    @torch.inference_mode(False)  # copies of a runtime are made of it, in any mode
    def save(self, blocks: Sequence[int], rows: Sequence[int]) -> dict[str, torch.Tensor]:
        """The content of blocks and rows, on the CPU."""
        saved: dict[str, torch.Tensor] = {}
        for index, fields in ((blocks, self._by_block()), (rows, self.state)):
            places = torch.tensor(index, dtype=torch.int64, device=self.device)
            saved |= {name: field[:, places].cpu() for name, field in fields.items()}
        return saved

    def load(self, saved: Mapping[str, torch.Tensor], blocks: Sequence[int], rows: Sequence[int]) -> None:
        """Put saved content into other blocks and rows."""
        for index, fields in ((blocks, self._by_block()), (rows, self.state)):
            places = torch.tensor(index, dtype=torch.int64, device=self.device)
            for name, field in fields.items():
                field[:, places] = saved[name].to(self.device)

    def _by_block(self) -> dict[str, torch.Tensor]:
        return {"k": self.k, "v": self.v, **self.summaries}

    def _grown(self, old: torch.Tensor, size: int) -> torch.Tensor:
        if old.shape[1] >= size:
            return old
        new = self._storage(size, old.shape[2:], old.dtype)
        new[:, : old.shape[1]] = old
        return new

    def _storage(self, size: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """[H, size, *shape]."""
        heads = self.num_kv_heads
        if self.page_major:
            return uninitialised((size, heads, *shape), dtype, self.device).transpose(0, 1)
        return uninitialised((heads, size, *shape), dtype, self.device)


def initial_value(spec: FieldSpec) -> torch.Tensor:
    """What a state field of a page starts from."""
    assert spec.initial is not None, "a state field starts somewhere"
    return spec.initial
