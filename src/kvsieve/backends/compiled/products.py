"""Products that read pages: written as multiply and sum, so that the compiler fuses them with the gather.

A library call for a matrix product wants its operands in memory: the pages gathered and widened to float32, several
times the bytes that a step should read. Decode products are thin on one side (the group's query heads), so multiply
and sum loses nothing.
"""

from __future__ import annotations

import torch
from torch import fx

THIN = 32
"""The widest thin side; above it, a matrix product's own blocking is worth more than the bytes."""


def use_thin_products(graph: fx.Graph) -> None:
    """Replace matrix products and contractions of a lowered graph by forms that look at shapes when compiled."""
    for node in graph.nodes:
        if node.target is torch.matmul:
            node.target = matmul
        elif node.target is torch.einsum and len(node.args) == 3:
            node.target = einsum


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a [..., M, K] @ b [..., K, N]``."""
    if min(a.dim(), b.dim()) < 3 or not _is_thin(a.shape[-2], b.shape[-1]):
        return torch.matmul(a, b)
    columns = b.transpose(-1, -2)
    if _is_thin(b.shape[-1]):  # the thin side goes inside: each row of the other is read once
        return (a.unsqueeze(-2) * columns.unsqueeze(-3)).sum(-1)
    return (columns.unsqueeze(-2) * a.unsqueeze(-3)).sum(-1).transpose(-1, -2)


def einsum(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A contraction of two operands whose letters are all spelled out."""
    terms, output = equation.split("->")
    first, second = terms.split(",")
    sizes = {**dict(zip(first, a.shape, strict=True)), **dict(zip(second, b.shape, strict=True))}
    summed = [letter for letter in sizes if letter not in output]
    own = [[x for x in term if x in output and x not in other] for term, other in ((first, second), (second, first))]
    thin = any(all(_is_thin(sizes[letter]) for letter in letters) for letters in own)
    if not thin or output[:1] not in first or output[:1] not in second or len(set(first)) < len(first):
        return torch.einsum(equation, a, b)
    if len(set(second)) < len(second):
        return torch.einsum(equation, a, b)
    order = output + "".join(summed)
    product = _spread(a, first, order) * _spread(b, second, order)
    return product.sum(tuple(range(len(output), len(order)))) if summed else product


def _spread(x: torch.Tensor, letters: str, order: str) -> torch.Tensor:
    """The operand with its axes in ``order`` and singletons where it lacks a letter."""
    x = x.permute([letters.index(letter) for letter in order if letter in letters])
    for axis, letter in enumerate(order):
        if letter not in letters:
            x = x.unsqueeze(axis)
    return x


def _is_thin(*sizes: int) -> bool:
    """Whether one of the sizes is known to the compiler and small."""
    return any(isinstance(size, int) and size <= THIN for size in sizes)
