"""Ops that treat every element alike: broadcasting arithmetic, comparisons, casts."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kvsieve.ops.view import Batch, NodeView, Value

_DROPPED = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy")
_DIVISIONS = ("div", "floor_divide", "remainder", "fmod")

_NAMES = (
    "add sub rsub mul div floor_divide remainder fmod pow square maximum minimum max.other min.other fmax fmin neg "
    "abs sign sgn copysign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sigmoid log_sigmoid tanh sin "
    "cos tan asin acos atan atan2 sinh cosh asinh acosh atanh erf erfc relu gelu silu softplus leaky_relu elu "
    "hardtanh clamp clamp_min clamp_max lerp addcmul addcdiv where masked_fill eq ne lt le gt ge logical_and "
    "logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__ __xor__ floor "
    "ceil round trunc frac isnan isinf isfinite nan_to_num hypot xlogy full_like zeros_like ones_like"
)
NAMES = tuple(_NAMES.split())

COPY_NAMES = (
    "to",
    "_to_copy",
    "type_as",
    "clone",
    "contiguous",
    "detach",
    "detach_",
    "alias",
    "lift_fresh_copy",
    "dropout",
)

CREATE_NAMES = ("full", "zeros", "ones", "new_full", "new_zeros", "new_ones", "scalar_tensor", "arange")


class Elementwise:
    """Broadcasts its tensor arguments from the right; in the batch, short ones get singleton axes after N."""

    over_pages = "kept: pages meet their own values, and values without a page axis"

    def check(self, view: NodeView) -> None:
        """Broadcasting keeps the page axis apart; a shape with two of them is refused for every op alike."""

    def lower(self, view: NodeView, batch: Batch) -> Value:
        rank = len(view.shape)
        values = [batch[node] for node in view.node.all_input_nodes]
        if view.name in _DIVISIONS and not view.dtype(view.node).is_floating_point:
            values = [batch.filled(value, 1) for value in values]  # padding may hold a zero divisor, which raises
        aligned = dict(zip(view.node.all_input_nodes, values, strict=True))

        def swap(argument: Any) -> Any:
            if not isinstance(argument, fx.Node):
                return argument
            proxy, wanted = batch.align(aligned[argument], rank), _weak_dtype(view, argument)
            return proxy if wanted is None else proxy.to(wanted)

        kwargs = {key: swap(value) for key, value in view.node.kwargs.items() if key not in _DROPPED}
        proxy = view.op(*(swap(argument) for argument in view.node.args), **kwargs)
        return Value(proxy, view.shape, any(value.batched for value in values))


def _weak_dtype(view: NodeView, argument: fx.Node) -> torch.dtype | None:
    """The dtype that a 0-dim operand takes beside tensors with axes of its own kind, if it is another than its own.

    In one segment a 0-dim tensor never widens another; in the batch it has an axis, and would.
    """
    others = [node for node in view.node.all_input_nodes if len(view.shape_of(node))]
    own = view.dtype(argument)
    if len(view.shape_of(argument)) or not others:
        return None
    kinds = [dtype for dtype in map(view.dtype, others) if dtype.is_floating_point == own.is_floating_point]
    kinds = [dtype for dtype in kinds if (dtype is torch.bool) == (own is torch.bool)]
    wanted = kinds[0] if kinds else None
    for dtype in kinds[1:]:
        wanted = torch.promote_types(wanted, dtype)  # type: ignore[arg-type]
    return wanted if wanted is not own else None


class Copy:
    """Casts, copies, idle dropout, moves between devices: only the dtype matters, the batch stays on its device."""

    over_pages = "kept; floating results must be float32, moves between devices are ignored"

    def check(self, view: NodeView) -> None:
        pass

    def lower(self, view: NodeView, batch: Batch) -> Value:
        node = view.node.all_input_nodes[0]
        source, dtype = batch[node], view.dtype(view.node)
        proxy = source.proxy if view.dtype(node) is dtype else source.proxy.to(dtype)
        return Value(proxy, source.shape, source.batched)


class Create:
    """A new tensor of one value (``full``, ``zeros``, ``ones``, ``scalar_tensor``, static ``arange``)."""

    over_pages = "may be sized by the page count, never filled with it"

    def check(self, view: NodeView) -> None:
        pass

    def lower(self, view: NodeView, batch: Batch) -> Value:
        arguments: dict[str, Any] = view.args()
        dtype, name = view.dtype(view.node), view.name
        if name == "arange":
            start, step = arguments.get("start") or 0, arguments.get("step") or 1
            proxy = torch.arange(start, arguments["end"], step, dtype=dtype, device=batch.device)
        else:
            fill = {"zeros": 0, "new_zeros": 0, "ones": 1, "new_ones": 1}
            number: Any = fill[name] if name in fill else arguments.get("fill_value", arguments.get("s"))
            proxy = torch.full(batch.sizes(view.shape, False), number, dtype=dtype, device=batch.device)
        return Value(proxy, view.shape, False)
