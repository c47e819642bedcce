"""The op table: every ATen op a flow may use, and how one segment becomes many.

A row maps an ATen op name to a kind with two methods: ``check`` refuses what the page axis forbids, ``lower`` writes
the batched op. Adding an op is one entry here (and one line in tests/op_cases.py).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kvsieve.ops import along, contract, convolve, elementwise, index, reduce, shape
from kvsieve.ops.view import Batch, NodeView, Refused, Shape, Value, show

__all__ = ["Batch", "NodeView", "OpKind", "Refused", "Shape", "Value", "kind_of", "op_name", "row_of", "show", "table"]


class OpKind(Protocol):
    """How a family of ops meets the page axis; ``over_pages`` says it in words, for docs/ops.md."""

    over_pages: str

    def check(self, view: NodeView) -> None:
        """Raise Refused if the op mixes pages."""

    def lower(self, view: NodeView, batch: Batch) -> Value | tuple[Value, ...]:
        """Append the batched op to the lowered graph."""


def _build() -> dict[str, OpKind]:
    rows: dict[str, OpKind] = dict.fromkeys(elementwise.NAMES, elementwise.Elementwise())
    rows |= dict.fromkeys(elementwise.COPY_NAMES, elementwise.Copy())
    rows |= dict.fromkeys(elementwise.CREATE_NAMES, elementwise.Create())
    rows |= dict.fromkeys(reduce.IDENTITY, reduce.Reduction())
    rows |= dict.fromkeys(("softmax", "_softmax"), along.AlongAxis(along.softmax, -reduce.INFINITY))
    rows |= dict.fromkeys(("log_softmax", "_log_softmax"), along.AlongAxis(along.log_softmax, -reduce.INFINITY))
    rows["logcumsumexp"] = along.AlongAxis(torch.logcumsumexp, -reduce.INFINITY)
    rows["cumsum"] = along.AlongAxis(torch.cumsum, 0.0)
    rows["cumprod"] = along.AlongAxis(torch.cumprod, 1.0)
    within = ("sort", "topk", "kthvalue", "median", "argmax", "argmin", "flip", "cummax", "cummin")
    rows |= dict.fromkeys(within, along.WithinPage())
    rows["avg_pool1d"] = along.AvgPool()
    rows["max_pool1d"] = along.MaxPool()
    rows["conv1d"] = convolve.Conv1d()
    reshapes = ("reshape", "view", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
    rows |= dict.fromkeys(reshapes, shape.Reshape())
    permutes = ("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "numpy_T", "mT")
    rows |= dict.fromkeys(permutes, shape.Permute())
    rows |= dict.fromkeys(("expand", "expand_as", "broadcast_to"), shape.Expand())
    rows |= dict.fromkeys(("slice", "select", "narrow"), index.Slice())
    rows |= dict.fromkeys(("index", "index_select", "embedding"), index.Index())
    rows["gather"] = index.Gather()
    rows |= dict.fromkeys(("pad", "constant_pad_nd"), shape.Pad())
    rows |= dict.fromkeys(("cat", "concat", "concatenate", "stack"), shape.Join())
    rows |= dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), shape.Split())
    rows |= dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), contract.Matmul())
    rows["linear"] = contract.Linear()
    rows["einsum"] = contract.Einsum()
    return rows


table: dict[str, OpKind] = _build()


def op_name(target: Any) -> str | None:
    """``add`` for aten.add.Tensor; None for anything that is no ATen or kvsieve op."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "kvsieve"):
        return None
    return str(target._overloadpacket.__name__)


def row_of(target: Any) -> str | None:
    """The name of an op's row in the table, or None if flows may not use it."""
    name = op_name(target)
    if name is None:
        return None
    exact = f"{name}.{target._overloadname}"
    if exact == "view.dtype":  # reinterprets bits, which have no meaning in the float64 reference
        return None
    return exact if exact in table else name if name in table else None


def kind_of(target: Any) -> OpKind | None:
    """The table row of an op, or None if flows may not use it."""
    row = row_of(target)
    return table[row] if row else None
