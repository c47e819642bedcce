"""conv1d along the last axis: a weighted vote of neighbours."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.ops.reduce import masked
from kvsieve.ops.shape import WHOLE
from kvsieve.ops.view import Batch, NodeView, Proxy, Refused, Value, show


class Conv1d:
    """``torch.nn.functional.conv1d`` over the last axis; over the page axis the length must stay W."""

    over_pages = "allowed over the segment's own pages, if their number stays; never the channel axis"

    def check(self, view: NodeView) -> None:
        arguments = view.args()
        x, weight = view.shape_of(arguments["input"]), view.shape_of(arguments["weight"])
        if x[-2] is None or None in weight:
            raise Refused(f"conv1d of {show(x)} with weight {show(weight)} mixes pages as channels", WHOLE)

    def lower(self, view: NodeView, batch: Batch) -> Value:
        """Segments beside each other as groups where the weight varies over them, else as a batch."""
        arguments = view.args()
        source, weight = batch[arguments.pop("input")], batch[arguments.pop("weight")]
        bias = None if arguments["bias"] is None else batch[arguments["bias"]]
        arguments["bias"] = None
        x = masked(batch, source, (source.rank - 1,), 0.0, torch.float32)
        if weight.batched:
            proxy = _grouped(batch, x, weight, view, arguments)
        else:
            flat = torch.flatten(x.proxy, 0, -3) if x.rank + x.batched > 3 else x.proxy
            proxy = torch.reshape(view.op(flat, weight.proxy, **arguments), batch.sizes(view.shape, x.batched))
        batched = x.batched or weight.batched
        if bias is not None:
            column = Value(torch.unsqueeze(bias.proxy, -1), (*bias.shape, 1), bias.batched)
            proxy, batched = proxy + batch.align(column, len(view.shape)), batched or bias.batched
        return Value(proxy, view.shape, batched)


def _grouped(batch: Batch, x: Value, weight: Value, view: NodeView, arguments: dict[str, Any]) -> Proxy:
    proxy = batch.expanded(x)  # [N, (B,) C, L]
    if x.rank == 2:
        proxy = torch.unsqueeze(proxy, 1)
    folded = torch.flatten(torch.transpose(proxy, 0, 1), 1, 2)  # [B, N * C, L]
    arguments["groups"] = arguments["groups"] * batch.segments
    result = view.op(folded, torch.flatten(weight.proxy, 0, 1), **arguments)
    split = torch.transpose(torch.unflatten(result, 1, (batch.segments, -1)), 0, 1)
    return torch.reshape(split, batch.sizes(view.shape, True))
