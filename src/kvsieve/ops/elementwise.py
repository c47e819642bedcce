"""Ops that treat every element alike: broadcasting arithmetic, comparisons, casts."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kvsieve.ops.view import Batch, NodeView, Value

_DROPPED = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy")

NAMES = (
    "add sub rsub mul div floor_divide remainder fmod pow square maximum minimum fmax fmin neg abs sign sgn exp exp2 "
    "expm1 log log2 log10 log1p sqrt rsqrt reciprocal sigmoid log_sigmoid tanh sin cos atan atan2 erf relu gelu silu softplus "
    "leaky_relu elu hardtanh clamp clamp_min clamp_max lerp addcmul addcdiv where masked_fill eq ne lt le gt ge "
    "logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__ "
    "__xor__ floor ceil round trunc frac isnan isinf isfinite nan_to_num hypot xlogy to _to_copy type_as clone "
    "contiguous detach detach_ alias lift_fresh_copy full_like zeros_like ones_like"
).split()


class Elementwise:
    """Broadcasts its tensor arguments from the right; in the batch, short ones get singleton axes after N."""

    def check(self, view: NodeView) -> None:
        """Broadcasting keeps the page axis apart; a shape with two of them is refused for every op alike."""

    def lower(self, view: NodeView, batch: Batch) -> Value:
        rank = len(view.shape)
        values = [batch[node] for node in view.node.all_input_nodes]
        batched = any(value.batched for value in values)

        def swap(argument: Any) -> Any:
            return batch.align(batch[argument], rank) if isinstance(argument, fx.Node) else argument

        kwargs = {key: swap(value) for key, value in view.node.kwargs.items() if key not in _DROPPED}
        proxy = view.op(*(swap(argument) for argument in view.node.args), **kwargs)
        return Value(proxy, view.shape, batched)


class Create:
    """A new tensor of one value (``full``, ``zeros``, ``ones``, ``scalar_tensor``, static ``arange``)."""

    def check(self, view: NodeView) -> None:
        pass

    def lower(self, view: NodeView, batch: Batch) -> Value:
        name = view.op._overloadpacket.__name__
        arguments = view.args()
        dtype = view.node.meta["val"].dtype
        if name.startswith("arange"):
            start, step = arguments.get("start") or 0, arguments.get("step") or 1
            proxy = torch.arange(start, arguments["end"], step, dtype=dtype, device=batch.device)
        else:
            fill = {"zeros": 0, "new_zeros": 0, "ones": 1, "new_ones": 1, "scalar_tensor": arguments.get("s")}
            number = fill[name] if name in fill else arguments["fill_value"]
            proxy = torch.full(batch.sizes(view.shape), number, dtype=dtype, device=batch.device)
        return Value(proxy, view.shape, False)


CREATE_NAMES = ("full", "zeros", "ones", "new_full", "new_zeros", "new_ones", "scalar_tensor", "arange")
