"""What a mutant is: a deliberate fault, put into the running program by one patch and taken out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import torch

from kvsieve.window import Window

STEP, LIFE_CYCLE, TRANSFORMERS, MASS, EVICTION = "step", "life cycle", "transformers", "mass", "eviction"

Factory = Callable[[Any], Any]
"""Takes what stands in the program and returns the faulty replacement, with a memory of its own where it needs one."""


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: what is wrong, in a few words.
        row: the published bug it stands for, None for one of our own.
        owner, attribute: where it is put; the owner is a class or module, or its dotted name if it is optional.
        factory: makes the replacement.
        part: which checks are asked to find it.
        survives: why no check can tell it from the right program, if none can.
    """

    name: str
    row: int | None
    owner: Any
    attribute: str
    factory: Factory
    part: str = STEP
    survives: str = ""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The program with the fault in it."""
        owner = resolve_name(self.owner) if isinstance(self.owner, str) else self.owner
        replacement = self.factory(getattr(owner, self.attribute))
        if isinstance(vars(owner).get(self.attribute), staticmethod):
            replacement = staticmethod(replacement)
        with mock.patch.object(owner, self.attribute, replacement):
            yield


class Table:
    """Mutants in the order in which they are written down; :meth:`fault` adds one."""

    def __init__(self, part: str = STEP) -> None:
        self.part = part
        self.mutants: list[Mutant] = []

    def fault(
        self, name: str, row: int | None, owner: Any, attribute: str, survives: str = ""
    ) -> Callable[[Factory], Factory]:
        """Registers the decorated factory as a mutant of ``owner.attribute``."""

        def add(factory: Factory) -> Factory:
            self.mutants.append(Mutant(name, row, owner, attribute, factory, self.part, survives))
            return factory

        return add


def with_columns(window: Window, **columns: torch.Tensor) -> Window:
    """The window with other tensors [Bs, W] than those that follow from its table and lengths."""
    other = replace(window)
    vars(other).update(columns)
    return other
