"""What a row of the op table sees: one ATen node, its arguments as ops, and the builder of the new program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kvsieve.backends.triton.generate.errors import Refused
from kvsieve.backends.triton.generate.ir import TRITON_TYPES, Builder, Op
from kvsieve.ops import NodeView, Shape, show

Results = Op | tuple[Op, ...]


@dataclass
class Call:
    """One ATen node on its way into the program."""

    builder: Builder
    view: NodeView
    values: Mapping[fx.Node, Results]
    arguments: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.arguments = self.view.args()

    @property
    def name(self) -> str:
        """The op's, as in the op table."""
        return self.view.name

    @property
    def shape(self) -> Shape:
        """Of the result, for one segment."""
        return self.view.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the (first) result."""
        value = self.view.node.meta["val"]
        dtype: torch.dtype = value[0].dtype if isinstance(value, (list, tuple)) else value.dtype
        if dtype not in TRITON_TYPES:
            raise Refused(f"op {self.name} computes in {dtype}")
        return dtype

    def of(self, node: fx.Node) -> Op:
        """What a node has become."""
        value = self.values[node]
        assert isinstance(value, Op)
        return value

    def op(self, name: str) -> Op:
        """An argument as an op; a Python number becomes one."""
        argument = self.arguments[name]
        if isinstance(argument, fx.Node):
            return self.of(argument)
        dtype = torch.bool if isinstance(argument, bool) else torch.int64 if isinstance(argument, int) else None
        return self.builder.number(argument, dtype or torch.float32)

    def promoted(self, *names: str) -> torch.dtype:
        """The dtype that torch computes arguments in."""
        values = [_sample(self.arguments[name]) for name in names]
        result = values[0]
        for value in values[1:]:
            dtype = torch.result_type(result, value)
            rank = max(getattr(x, "ndim", 0) for x in (result, value))
            result = torch.empty((1,) * rank, dtype=dtype, device="meta")
        return result.dtype if isinstance(result, torch.Tensor) else torch.result_type(torch.empty(0), result)

    def refuse(self, why: str) -> Refused:
        """The error that names this op and its shapes."""
        shapes = ", ".join(show(self.view.shape_of(node)) for node in self.view.node.all_input_nodes)
        return Refused(f"op {self.name} on {shapes}: {why}")


@dataclass(frozen=True)
class Row:
    """A row of the op table.

    Args:
        build: makes the op's value out of its arguments' values.
        prints: what appears in the kernel, in words or as text with the operands' places.
        error: how the rounding error of the result comes about; u is 2**-24.
    """

    build: Callable[[Call], Results]
    prints: str
    error: str


def _sample(argument: Any) -> Any:
    """A tensor that promotes as the argument does."""
    if not isinstance(argument, fx.Node):
        return argument
    value = argument.meta["val"]
    return torch.empty((1,) * value.ndim, dtype=value.dtype, device="meta")
