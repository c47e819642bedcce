"""What the contexts of both sides have in common."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kvsieve.compat.vortex.utils import UNSET, Mode


class ContextBase:
    """A bag of fields that callers assign freely. A known field that nobody has set reads as ``UNSET``."""

    fields: ClassVar[tuple[str, ...]] = ("name", "mode", "_created", "_aux_total_bytes", "_aux_total_flops")
    title: ClassVar[str] = ""

    def __init__(self) -> None:
        for field in self.fields:
            setattr(self, field, UNSET)
        self.name: str = self.title
        self.mode: Mode | None = Mode.profile
        self._created: bool = False
        self._aux_total_bytes: int = 0
        self._aux_total_flops: int = 0

    def __setattr__(self, name: str, value: Any) -> None:  # tells type checkers that any name may be assigned
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:  # reached for unknown names only
        raise AttributeError(f"{type(self).__name__} has no field {name!r}; assign it first")

    @property
    def created(self) -> bool:
        """Whether :meth:`create` has filled the context."""
        return bool(self._created)

    def create(self, *args: Any, overwrite: bool = False, **fields: Any) -> Any:
        """Fill the context from keyword arguments; subclasses also read vortex_torch's server objects.

        Raises:
            RuntimeError: it was filled before and ``overwrite`` is not set.
        """
        if self._created and not overwrite:
            raise RuntimeError(f"{self.title} context: created before; pass overwrite=True to fill it again")
        if args:
            self.read_server(*args)
        for name, value in fields.items():
            setattr(self, name, value)
        self._created = True
        return self

    def read_server(self, parent: Any, model_runner: Any) -> None:
        """Take fields from an attention backend (or pool) and a model runner of SGLang's kind."""
        raise TypeError(f"{self.title} context: create takes keyword arguments here, received positional ones")

    def profile(self) -> None:
        """Ops check and allocate from now on."""
        self.mode = Mode.profile

    def execute(self) -> None:
        """Ops compute from now on."""
        self.mode = Mode.execute

    def assert_created(self) -> None:
        """Raise RuntimeError unless :meth:`create` was called."""
        if not self._created:
            raise RuntimeError(f"{self.title} context: not created yet; call create(...)")

    def missing(self) -> list[str]:
        """Known fields that nobody has set."""
        return [field for field in self.fields if field != "_created" and getattr(self, field) is UNSET]

    def add_aux_memory(self, obj: int | torch.Tensor) -> int:
        """Count bytes, or those of a tensor; returns what was added."""
        if isinstance(obj, torch.Tensor):
            obj = obj.numel() * obj.element_size()
        if not isinstance(obj, int):
            raise TypeError(f"add_aux_memory: expected bytes or a tensor, received {type(obj).__name__}")
        if obj < 0:
            raise ValueError(f"add_aux_memory: expected bytes >= 0, received {obj}")
        self._aux_total_bytes += obj
        return obj

    def add_aux_flops(self, nflops: int) -> int:
        """Count elements that are read per page; returns what was added."""
        self._aux_total_flops += nflops
        return nflops

    def clear_aux_memory(self) -> None:
        """Count bytes from 0 again."""
        self._aux_total_bytes = 0

    def clear_aux_flops(self) -> None:
        """Count elements from 0 again."""
        self._aux_total_flops = 0

    def summary(self) -> None:
        """Print the fields that are set; tensors by shape, dtype and device."""
        print(f"{self.title} context")
        for field in self.fields:
            value = getattr(self, field)
            if isinstance(value, torch.Tensor):
                value = f"{tuple(value.shape)} {value.dtype} {value.device}"
            if value is not UNSET:
                print(f"  {field}: {value}")
        print(f"  auxiliary: {self._aux_total_bytes} bytes, {self._aux_total_flops} elements a page")
