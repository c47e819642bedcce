"""Grows straight-line programs of the grammar on examples."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flow_grammar import produce
from kvsieve.flow import DoublePrecision

WIDTHS = 13, 11  # pages of the two examples: what differs between them is the page axis
F64 = torch.float64
LARGEST = 60_000  # elements of a value


@dataclass
class Program:
    """Straight-line code: the inputs, then one value a step. ``outputs`` combine the values into the results."""

    inputs: list[str]
    constants: list[torch.Tensor]
    steps: list[tuple[Callable[..., Any], Sequence[int]]]
    outputs: dict[str, Callable[[Any], torch.Tensor]]

    def run(self, constants: Sequence[torch.Tensor], named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        values: dict[int | str, Any] = {i: named[name] for i, name in enumerate(self.inputs)}
        values |= {-1 - i: constant for i, constant in enumerate(constants)}
        for position, (function, operands) in enumerate(self.steps, len(self.inputs)):
            values[position] = function(*(values[operand] for operand in operands))
        results = {}
        for name, output in self.outputs.items():
            values[name] = results[name] = output(values)
        return results


class NothingFits(Exception):
    """No value of the wanted rank exists yet."""


@dataclass
class Builder:
    """Grows a program; every value is known by two float64 examples of different page counts."""

    random: random.Random
    uses: Counter[tuple[str, str]]
    examples: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    program: Program = field(default_factory=lambda: Program([], [], [], {}))
    consumed: set[int] = field(default_factory=set)
    hidden: set[int] = field(default_factory=set)
    """Inputs that only the builder uses: integers, booleans, large floats."""

    def leaf(self, name: str, first: Any, second: Any) -> None:
        self.examples[len(self.program.inputs)] = first, second
        self.program.inputs.append(name)

    def constant(self, *shape: int) -> int:
        generator = torch.Generator().manual_seed(self.random.randrange(2**31))
        value = torch.randn(shape, generator=generator)
        self.program.constants.append(value)
        index = -len(self.program.constants)
        self.examples[index] = value.to(F64), value.to(F64)
        return index

    def all(self) -> list[int]:
        tensors = [i for i, (x, _) in self.examples.items() if isinstance(x, torch.Tensor) and i >= 0]
        return [i for i in tensors if i not in self.hidden]

    def pick(self, rank: int = 0) -> int:
        """A value of at least this rank, the latest more likely, those not used yet most likely."""
        fits = [i for i in self.all() if len(self.shape(i)) >= rank]
        if not fits:
            raise NothingFits
        fresh = [i for i in fits[-8:] if i not in self.consumed]
        return self.random.choice(fresh if fresh and self.random.random() < 0.7 else fits)

    def number(self) -> int | None:
        numbers = [i for i, (x, _) in self.examples.items() if isinstance(x, float)]
        return self.random.choice(numbers) if numbers else None

    def shape(self, i: int) -> tuple[int, ...]:
        return tuple(self.examples[i][0].shape)

    def page(self, i: int) -> int | None:
        first, second = self.examples[i]
        return next((k for k, (a, c) in enumerate(zip(first.shape, second.shape, strict=True)) if a != c), None)

    def axis(self, i: int, pages: bool = True) -> int | None:
        axes = [k for k in range(len(self.shape(i))) if pages or k != self.page(i)]
        return self.random.choice(axes) if axes else None

    def choice(self, family: str, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
        """The function used least so far, with chance: every one gets its turn."""
        rarest = sorted(functions, key=lambda name: (self.uses[family, name], self.random.random()))
        name = rarest[0] if self.random.random() < 0.6 else self.random.choice(rarest)
        self.uses[family, name] += 1
        return functions[name]

    def grow(self, steps: int) -> None:
        """Add up to ``steps`` productions that fit."""
        for _ in range(60):
            if steps == 0:
                return
            constants = len(self.program.constants)
            uses = self.uses.copy()
            try:
                production = produce(self)
            except NothingFits:
                production = None
            if production is None or not self._append(*production):
                for index in range(constants, len(self.program.constants)):
                    del self.examples[-1 - index]
                del self.program.constants[constants:]
                self.uses.clear()
                self.uses.update(uses)
            else:
                steps -= 1

    def _append(self, function: Callable[..., Any], operands: Sequence[int]) -> bool:
        try:
            with DoublePrecision():
                results = tuple(function(*(self.examples[i][k] for i in operands)) for k in range(2))
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False
        size = _usable(*results)
        if size is None:
            return False
        if not 0.2 <= size <= 3:
            factor = float(f"{1 / size:.2g}")
            inner, results = function, (results[0] * factor, results[1] * factor)

            def function(*arguments: Any) -> torch.Tensor:
                return factor * inner(*arguments)

        self.examples[len(self.program.inputs) + len(self.program.steps)] = results
        self.program.steps.append((function, operands))
        self.consumed |= set(operands)
        return True

    def unused(self) -> list[int]:
        """Values that nothing consumes: the results have to, so that every step matters."""
        first = len(self.program.inputs)
        return [i for i in self.all() if i >= first and i not in self.consumed]


def _usable(first: Any, second: Any) -> float | None:
    """The largest magnitude of a value the program may go on with; None for others."""
    if not isinstance(first, torch.Tensor) or first.dim() > 5 or not 0 < first.numel() < LARGEST:
        return None
    if first.dtype is not F64 or not (first.isfinite().all() and second.isfinite().all()):
        return None
    differ = [(a, c) for a, c in zip(first.shape, second.shape, strict=True) if a != c]
    if differ not in ([], [WIDTHS]):
        return None
    size = max(float(first.abs().max()), float(second.abs().max()))
    return size if 1e-3 <= size <= 1e3 else None
