"""What an op's rule sees: one graph node of a flow, and the batch that replaces the single segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

Shape = tuple[int | None, ...]
"""One-segment shape; None is the page axis, the only size that varies."""

Proxy = Any
"""A torch.fx proxy: calling torch functions on it appends nodes to the lowered graph."""


class Refused(Exception):
    """An op that the page axis forbids; graph.py turns it into a FlowError with the user's line."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


@dataclass(frozen=True)
class NodeView:
    """A call_function node with its arguments by schema name, and the one-segment shape of every value."""

    node: fx.Node
    shape_of: Callable[[fx.Node], Shape]

    @property
    def op(self) -> Any:
        return self.node.target

    @property
    def name(self) -> str:
        """The op's name without overload: ``add``."""
        return str(self.op._overloadpacket.__name__)

    def args(self) -> dict[str, Any]:
        """All arguments by name, defaults included."""
        bound = {}
        for position, argument in enumerate(self.op._schema.arguments):
            if position < len(self.node.args):
                bound[argument.name] = self.node.args[position]
            elif argument.name in self.node.kwargs:
                bound[argument.name] = self.node.kwargs[argument.name]
            else:
                bound[argument.name] = argument.default_value
        return bound

    @property
    def shape(self) -> Shape:
        return self.shape_of(self.node)

    def page_axis(self, node: fx.Node) -> int | None:
        shape = self.shape_of(node)
        return shape.index(None) if None in shape else None

    def rank(self, node: fx.Node) -> int:
        return len(self.shape_of(node))

    def axis(self, node: fx.Node, dim: int) -> int:
        """``dim`` counted from the front.

        Raises:
            Refused: the tensor has no such dim (fake tensors do not notice).
        """
        rank = max(self.rank(node), 1)
        if not -rank <= dim < rank:
            raise Refused(f"{self.name} on {show(self.shape_of(node))}: there is no dim {dim}", "name a dim it has")
        return dim % rank

    def axes(self, node: fx.Node, dim: int | Sequence[int] | None) -> tuple[int, ...]:
        """Non-negative, sorted axes that ``dim`` names; None or an empty list names all."""
        if dim is None or (not isinstance(dim, int) and len(dim) == 0):
            return tuple(range(self.rank(node)))
        named = sorted(self.axis(node, axis) for axis in ([dim] if isinstance(dim, int) else dim))
        return tuple(named) if self.rank(node) else ()

    def dtype(self, node: fx.Node) -> torch.dtype:
        dtype: torch.dtype = node.meta["val"].dtype
        return dtype


@dataclass(frozen=True)
class Value:
    """A value of the lowered graph: ``[N, *shape]`` if batched, else ``[*shape]``, the page axis being padded."""

    proxy: Proxy
    shape: Shape
    batched: bool

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def page_axis(self) -> int | None:
        return self.shape.index(None) if None in self.shape else None

    def shifted(self, axes: Sequence[int]) -> tuple[int, ...]:
        """Axes of one segment as axes of the lowered value."""
        return tuple(axis + 1 for axis in axes) if self.batched else tuple(axes)


class Batch:
    """Builds the lowered graph: N segments side by side on axis 0, page axes padded to the widest window.

    ``valid [N, W]`` marks the real pages. Page-axis reductions replace the padding by their identity; nothing else
    may look across the page axis, so what the padding holds never reaches a real page.
    """

    def __init__(self, valid: Proxy, anchor: Proxy) -> None:
        self.valid = valid
        self.anchor = anchor  # some batched input: gives N and the device
        self.env: dict[fx.Node, Value | tuple[Value, ...]] = {}

    @property
    def device(self) -> Proxy:
        return self.anchor.device

    @property
    def segments(self) -> Proxy:
        return self.anchor.shape[0]

    def __getitem__(self, node: fx.Node) -> Value:
        value = self.env[node]
        assert isinstance(value, Value)
        return value

    def align(self, value: Value, rank: int) -> Proxy:
        """The value with singleton axes put after N so that broadcasting lines up at one-segment rank ``rank``."""
        proxy = value.proxy
        if value.batched:
            for _ in range(rank - value.rank):
                proxy = torch.unsqueeze(proxy, 1)
        return proxy

    def expanded(self, value: Value) -> Proxy:
        """The value with the segment axis, whether it varies over segments or not."""
        return value.proxy if value.batched else value.proxy.expand(self.sizes(value.shape, True))

    def mask(self, rank: int, axis: int) -> Proxy:
        """``valid`` shaped to broadcast against ``[N, *shape]`` with the page axis at ``axis``."""
        mask = self.valid
        for _ in range(axis):
            mask = torch.unsqueeze(mask, 1)
        for _ in range(rank - 1 - axis):
            mask = torch.unsqueeze(mask, -1)
        return mask

    def filled(self, value: Value, number: float | bool) -> Value:
        """The value with padded pages replaced by ``number``; itself if it has no page axis."""
        if value.page_axis is None:
            return value
        proxy = torch.where(self.mask(value.rank, value.page_axis), value.proxy, number)
        return Value(proxy, value.shape, True)

    def count(self, rank: int) -> Proxy:
        """Pages of each segment as float32 ``[N, 1, ..., 1]`` with ``rank`` singleton axes."""
        count = torch.sum(self.valid, 1, dtype=torch.float32)
        for _ in range(rank):
            count = torch.unsqueeze(count, -1)
        return count

    def sizes(self, shape: Shape, batched: bool) -> list[Proxy | int]:
        """Sizes of a lowered value, the page axis as the padded width."""
        sizes = [self.valid.shape[1] if size is None else size for size in shape]
        return [self.segments, *sizes] if batched else sizes


def unpack(view: NodeView, results: Proxy, batched: bool) -> tuple[Value, ...]:
    """The results of an op with several, as far as the flow uses them."""
    shapes: dict[Any, Shape] = {user.args[1]: view.shape_of(user) for user in view.node.users}
    return tuple(Value(results[index], shapes.get(index, ()), batched) for index in range(max(shapes, default=0) + 1))


def show(shape: Sequence[int | None]) -> str:
    """A one-segment shape for messages: the page axis prints as W."""
    return "[" + ", ".join("W" if size is None else str(size) for size in shape) + "]"
