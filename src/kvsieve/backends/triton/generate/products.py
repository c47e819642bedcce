"""Rows of products and sliding windows: contractions over static axes."""

from __future__ import annotations

from string import ascii_letters

import torch

from kvsieve.backends.triton.generate.call import Call, Row
from kvsieve.backends.triton.generate.ir import Builder, Op
from kvsieve.backends.triton.generate.reductions import INFINITY
from kvsieve.backends.triton.generate.shapes import pick
from kvsieve.ops import Shape
from kvsieve.ops.contract import letters_of


def matmul(b: Builder, x: Op, y: Op) -> Op:
    """torch.matmul of two ops of any rank."""
    batch = max(len(x.shape), len(y.shape), 2) - 2
    spare = ascii_letters[:batch]
    first = spare[batch - max(len(x.shape) - 2, 0) :] + ("mk" if len(x.shape) > 1 else "k").translate(_UPPER)
    second = spare[batch - max(len(y.shape) - 2, 0) :] + ("kn" if len(y.shape) > 1 else "k").translate(_UPPER)
    output = spare + ("M" if len(x.shape) > 1 else "") + ("N" if len(y.shape) > 1 else "")
    return einsum(b, x, y, first, second, output)


_UPPER = str.maketrans("mkn", "MKN")


def einsum(b: Builder, x: Op, y: Op, first: str, second: str, output: str) -> Op:
    """A contraction; axes of size 1 that stand beside larger ones of the same letter are dropped first."""
    x, first = diagonal(b, x, first)
    y, second = diagonal(b, y, second)
    sizes: dict[str, int | None] = {}
    for letter, size in [*zip(first, x.shape, strict=True), *zip(second, y.shape, strict=True)]:
        if sizes.get(letter, 1) == 1:
            sizes[letter] = size
    x, first = _without_ones(b, x, first, sizes)
    y, second = _without_ones(b, y, second, sizes)
    lonely = [letter for letter in output if letter not in first + second]  # of size 1 in both
    result = b.contract(x, y, first, second, "".join(letter for letter in output if letter not in lonely))
    return b.regroup(result, tuple(sizes[letter] for letter in output)) if lonely else result


def _without_ones(b: Builder, x: Op, letters: str, sizes: dict[str, int | None]) -> tuple[Op, str]:
    for axis in reversed(range(len(letters))):
        if x.shape[axis] == 1 and sizes[letters[axis]] != 1:
            x, letters = b.squeeze(x, axis), letters[:axis] + letters[axis + 1 :]
    return x, letters


def diagonal(b: Builder, x: Op, letters: str) -> tuple[Op, str]:
    """Letters that an operand has twice: only the elements where both agree stay."""
    for axis in reversed(range(len(letters))):
        other = letters.index(letters[axis])
        if other < axis:
            rank, size = len(x.shape), x.shape[axis]
            assert size is not None
            here, there = b.along(size, axis, rank), b.along(size, other, rank)
            same = b.map("({0} == {1})", here, there, dtype=torch.bool)
            x = b.reduce("sum", b.where(same, x, b.number(0, x.dtype)), (axis,))
            letters = letters[:axis] + letters[axis + 1 :]
    return x, letters


def _matmul(call: Call) -> Op:
    x, y = (call.of(node) for node in call.view.node.args)  # type: ignore[arg-type]
    return matmul(call.builder, x, y)


def _linear(call: Call) -> Op:
    b, x, weight = call.builder, call.op("input"), call.op("weight")
    if len(weight.shape) > 1:
        weight = b.permute(weight, (1, 0))
    result = matmul(b, x, weight)
    return result if call.arguments["bias"] is None else b.map("({0} + {1})", result, call.op("bias"))


def _einsum(call: Call) -> Op:
    b = call.builder
    terms, output, nodes = letters_of(call.view)
    x, letters = call.of(nodes[0]), terms[0]
    for number, (node, term) in enumerate(zip(nodes[1:], terms[1:], strict=True), 2):
        later = output + "".join(terms[number:])
        kept = "".join(dict.fromkeys(letter for letter in letters + term if letter in later))
        kept = output if number == len(nodes) else kept
        x, letters = einsum(b, x, call.of(node), letters, term, kept), kept
    if len(nodes) == 1:
        x, letters = diagonal(b, x, letters)
        summed = [axis for axis, letter in enumerate(letters) if letter not in output]
        x, letters = b.reduce("sum", x, summed), "".join(letter for letter in letters if letter in output)
    return b.permute(x, [letters.index(letter) for letter in output])


def _numbers(call: Call, *names: str) -> list[int]:
    """One number of each argument, which may be listed."""
    values = [call.arguments[name] for name in names]
    return [int(value[0] if isinstance(value, (list, tuple)) else value) for value in values]


def unfold(b: Builder, x: Op, size: int, step: int, before: int, spread: int, length: int, outside: float) -> Op:
    """Windows of the last axis, static: [..., n] -> [..., length, size], ``outside`` where there is no element."""
    axis, old = len(x.shape) - 1, x.shape[-1]
    assert old is not None
    text = "(({0} // {1}) * {2} + ({0} % {1}) * {3} - {4})"
    numbers = [b.number(number, torch.int32) for number in (size, step, spread, before)]
    index = b.map(text, b.iota(length * size), *numbers)
    inside = b.take(x, axis, b.map("tl.minimum(tl.maximum({0}, 0), {1})", index, b.number(old - 1, torch.int32)))
    exists = b.map("(({0} >= 0) & ({0} < {1}))", index, b.number(old, torch.int32), dtype=torch.bool)
    result = b.where(b.regroup(exists, (*(1,) * axis, length * size)), inside, b.number(outside, x.dtype))
    return b.regroup(result, (*x.shape[:-1], length, size))


def _avg_pool(call: Call) -> Op:
    b, x = call.builder, call.op("self")
    size, before = _numbers(call, "kernel_size", "padding")
    step = _numbers(call, "stride")[0] if call.arguments["stride"] else size
    everything = bool(call.arguments["count_include_pad"])
    if x.shape[-1] is None:
        parts = [b.shift(x, place - before, 0.0) for place in range(size)]
        ones = [b.shift(b.number(1.0), place - before, 0.0) for place in range(size)]
        count = b.number(size) if everything else _sum(b, ones)
        return b.map("({0} / {1})", _sum(b, parts), count)
    length = call.shape[-1] or 0
    total = b.reduce("sum", unfold(b, x, size, step, before, 1, length, 0.0), (len(x.shape),))
    one = b.expand(b.regroup(b.number(1.0), (1,)), (x.shape[-1],))
    one = unfold(b, one, size, step, before, 1, length, 0.0)
    if everything:  # the padding counts, what a ceiling adds beyond it does not
        edge = (x.shape[-1] or 0) + 2 * before
        one = b.expand(b.regroup(b.number(1.0), (1,)), (edge,))
        one = unfold(b, one, size, step, 0, 1, length, 0.0)
    return b.map("({0} / {1})", total, b.reduce("sum", one, (1,)))


def _sum(b: Builder, parts: list[Op]) -> Op:
    total = parts[0]
    for one in parts[1:]:
        total = b.map("({0} + {1})", total, one)
    return total


def _max_pool(call: Call) -> Op:
    b, x = call.builder, call.op("x")
    size, step, before, spread = _numbers(call, "kernel_size", "stride", "padding", "dilation")
    if x.shape[-1] is not None:
        windows = unfold(b, x, size, step, before, spread, call.shape[-1] or 0, -INFINITY)
        return b.reduce("max", windows, (len(x.shape),))
    best: Op | None = None
    for place in range(size):
        one = b.shift(x, place * spread - before, -INFINITY)
        best = one if best is None else b.map("f.maximum({0}, {1})", best, one)
    assert best is not None
    return best


def _conv(call: Call) -> Op:
    """x [..., C, L], weight [O, C / groups, K]: a contraction for each place in the window."""
    b, x, weight = call.builder, call.op("input"), call.op("weight")
    groups, outputs, size = int(call.arguments["groups"]), weight.shape[0] or 0, weight.shape[2] or 0
    (step, spread), channels = _numbers(call, "stride", "dilation"), x.shape[-2] or 0
    padding = call.arguments["padding"]
    before = {"valid": 0, "same": spread * (size - 1) // 2}.get(padding, 0) if isinstance(padding, str) else None
    before = _numbers(call, "padding")[0] if before is None else before
    inner: Shape = (groups, channels // groups)
    grouped = b.regroup(x, (*x.shape[:-2], *inner, x.shape[-1]))
    weights = b.regroup(weight, (groups, outputs // groups, channels // groups, size))
    lead = ascii_letters[: len(x.shape) - 2]
    if x.shape[-1] is None:
        parts = [
            b.contract(b.shift(grouped, place * spread - before, 0.0), pick(b, weights, 3, place),
                       lead + "GCL", "GOC", lead + "GOL")
            for place in range(size)
        ]  # fmt: skip
        result = _sum(b, parts)
    else:
        windows = unfold(b, grouped, size, step, before, spread, call.shape[-1] or 0, 0.0)
        result = b.contract(windows, weights, lead + "GCLK", "GOCK", lead + "GOL")
    result = b.regroup(result, call.shape)
    if call.arguments["bias"] is None:
        return result
    return b.map("({0} + {1})", result, b.unsqueeze(call.op("bias"), 1))


def rows() -> dict[str, Row]:
    """The rows, by the names of the op table."""
    product = "products and tl.sum, or tl.dot where operands keep their dtype"
    error = "(log2(n) + 1) u of the sum of magnitudes; tl.dot: n u"
    table = {name: Row(_matmul, product, error) for name in ("matmul", "mm", "bmm", "mv", "dot")}
    table |= {"linear": Row(_linear, product, error), "einsum": Row(_einsum, product, error)}
    table["avg_pool1d"] = Row(_avg_pool, "sums of neighbours", "n u of the sum of magnitudes")
    table["max_pool1d"] = Row(_max_pool, "f.maximum of neighbours", "none")
    table["conv1d"] = Row(_conv, product, error)
    return table
