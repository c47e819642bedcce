"""Products: matmul and its relatives, einsum, linear. They may run over any axis but the page axis."""

from __future__ import annotations

from string import ascii_letters

import torch
from torch import fx

from kvsieve.ops.view import Batch, NodeView, Proxy, Refused, Value, show

REMEDY = "reduce over pages with sum, mean or softmax; products may run over head_dim or tokens of a page"


class Matmul:
    """matmul, mm, bmm, mv, dot on two operands."""

    over_pages = "a batch or a row axis, never summed over"

    def check(self, view: NodeView) -> None:
        a, b = view.node.all_input_nodes if len(view.node.all_input_nodes) == 2 else (view.node.args[0],) * 2
        assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
        left, right = view.shape_of(a), view.shape_of(b)
        if left[-1] is None or right[-2 if len(right) > 1 else 0] is None:
            raise Refused(f"{view.name} of {show(left)} and {show(right)} sums over pages", REMEDY)

    def lower(self, view: NodeView, batch: Batch) -> Value:
        a, b = (batch[node] for node in view.node.args if isinstance(node, fx.Node))
        proxy = batched_matmul(a, b)
        return Value(proxy, view.shape, a.batched or b.batched)


class Linear:
    """``torch.nn.functional.linear``: x @ weight.T + bias, with a constant or computed weight."""

    over_pages = "a batch or a row axis, never summed over"

    def check(self, view: NodeView) -> None:
        arguments = view.args()
        x, weight = view.shape_of(arguments["input"]), view.shape_of(arguments["weight"])
        if x[-1] is None or weight[-1] is None:
            raise Refused(f"linear of {show(x)} and {show(weight)} sums over pages", REMEDY)

    def lower(self, view: NodeView, batch: Batch) -> Value:
        arguments = view.args()
        x, weight = batch[arguments["input"]], batch[arguments["weight"]]
        if weight.rank > 1:
            weight = Value(torch.transpose(weight.proxy, -1, -2), weight.shape[::-1], weight.batched)
        proxy = batched_matmul(x, weight)
        batched = x.batched or weight.batched
        if arguments["bias"] is not None:
            bias = batch[arguments["bias"]]
            proxy = proxy + batch.align(bias, len(view.shape))
            batched = batched or bias.batched
        return Value(proxy, view.shape, batched)


class Einsum:
    """``torch.einsum``: in the batch, every operand that varies has one letter more."""

    over_pages = "kept in the output, never summed over"

    def check(self, view: NodeView) -> None:
        inputs, output, nodes = letters_of(view)
        for letters, node in zip(inputs, nodes, strict=True):
            axis = view.page_axis(node)
            if axis is not None and letters[axis] not in output:
                shapes = ", ".join(show(view.shape_of(operand)) for operand in nodes)
                raise Refused(f"einsum {view.args()['equation']!r} of {shapes} sums over pages", REMEDY)

    def lower(self, view: NodeView, batch: Batch) -> Value:
        inputs, output, nodes = letters_of(view)
        values = [batch[node] for node in nodes]
        segment = next(letter for letter in ascii_letters if letter not in "".join(inputs) + output)
        terms = [segment + term if value.batched else term for term, value in zip(inputs, values, strict=True)]
        batched = any(value.batched for value in values)
        equation = ",".join(terms) + "->" + (segment if batched else "") + output
        return Value(torch.einsum(equation, *(value.proxy for value in values)), view.shape, batched)


def batched_matmul(a: Value, b: Value) -> Proxy:
    """torch.matmul of two one-segment operands, batched: vectors become matrices, batch axes are lined up."""
    left = torch.unsqueeze(a.proxy, -2) if a.rank == 1 else a.proxy
    right = torch.unsqueeze(b.proxy, -1) if b.rank == 1 else b.proxy
    ranks = max(a.rank, 2), max(b.rank, 2)
    for _ in range(max(ranks) - ranks[0]):
        left = torch.unsqueeze(left, 1) if a.batched else left
    for _ in range(max(ranks) - ranks[1]):
        right = torch.unsqueeze(right, 1) if b.batched else right
    product = torch.matmul(left, right)
    if b.rank == 1:
        product = torch.squeeze(product, -1)
    if a.rank == 1:
        product = torch.squeeze(product, -1 if b.rank == 1 else -2)
    return product


def letters_of(view: NodeView) -> tuple[list[str], str, list[fx.Node]]:
    """Letters of each operand and of the output, ellipsis and implicit output spelled out, and the operands."""
    arguments = view.args()
    nodes = arguments["tensors"]
    left, arrow, output = arguments["equation"].replace(" ", "").partition("->")
    terms = left.split(",")
    spare = [letter for letter in ascii_letters if letter not in left]
    widths = [
        view.rank(node) - len(term.replace("...", "")) if "..." in term else 0
        for term, node in zip(terms, nodes, strict=True)
    ]
    dots = "".join(spare[: max(widths)])
    inputs = [term.replace("...", dots[len(dots) - width :]) for term, width in zip(terms, widths, strict=True)]
    if not arrow:
        output = "..." + "".join(sorted(letter for letter in set(left) - set(",.") if left.count(letter) == 1))
    return inputs, output.replace("...", dots), nodes
