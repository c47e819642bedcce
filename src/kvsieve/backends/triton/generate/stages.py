"""Cuts a program where pages meet: each stage is one kernel over chunks of pages.

A stage computes what it can without results over the whole window; of each fold it stores what each chunk of pages
found, and the next stages combine these in the order of the chunks. A value that a later stage needs again is stored
per page if that moves fewer bytes than loading its fields and computing it anew. Long products of the queries alone,
and which elements they choose, are computed ahead of all stages, once for each segment, and not by every program.

Where programs hold whole windows two stages do: the first stores per page what the folds are of, in the second they are
reductions of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvsieve.backends.triton.generate.ir import Op, walk

LEAVES = ("field", "query", "constant", "number", "position", "age", "count", "iota")
NEAR = (*LEAVES, "map", "regroup", "permute", "expand", "reduce")
"""What a neighbouring page's value may be made of, if it is made anew there."""
NEAR_ELEMENTS = 8
STORED_BYTES, FIELD_BYTES = 4, 2
HOISTED = -1
"""The stage of what is hoisted out of the others: computed of queries alone, ahead of them."""
HOISTED_PRODUCTS, HOISTED_ELEMENTS = 4096, 4096
"""Products of a contraction of queries from which on it is; elements up to which what is made of it is stored."""


@dataclass(frozen=True)
class Partial:
    """What each chunk of pages finds of a fold: one component, or for ``softmax`` the maximum and the sum."""

    kind: str
    operand: Op

    @property
    def components(self) -> tuple[str, ...]:
        """Names of what a chunk stores."""
        return ("max", "sum") if self.kind == "softmax" else (self.kind,)


@dataclass
class Stage:
    """What one kernel stores: outputs by name, values per page for later stages, and partials per chunk."""

    outputs: dict[str, Op] = field(default_factory=dict)
    stored: list[Op] = field(default_factory=list)
    partials: list[Partial] = field(default_factory=list)


class StagePlan:
    """The stages of a program with ``outputs``; ``written`` are state fields that it writes in place; ``whole``:
    programs of the last stage hold whole windows."""

    def __init__(self, outputs: Mapping[str, Op], written: Collection[str], whole: bool = False) -> None:
        self.written, self.whole = frozenset(written), whole
        self._levels: dict[int, int] = {}
        for op in walk(list(outputs.values())):
            self._levels[id(op)] = self._level(op)
        last = max(self.level(op) for op in outputs.values())
        self.stages = [Stage() for _ in range(last + 1)]
        self.stored_at: dict[int, int] = {}
        self.scans = any(op.kind == "running" for op in walk(list(outputs.values())))
        """Whether stages go on from the chunks before their own: all stages then have chunks of one size."""
        self.near = not self.scans and not any(self._is_far(op) for op in walk(list(outputs.values())))
        """Whether pages meet in folds alone, or in what is made anew for neighbours."""
        self.hoisted: list[Op] = []
        """Values of queries alone that are stored ahead of all stages."""
        self._hoistable = self._made_ahead(list(outputs.values()))
        self._seen: set[tuple[int, int]] = set()
        for name, op in outputs.items():
            # What is written in place is written last: earlier stages of other programs may still read it.
            at = last if name in self.written else self.level(op)
            self.stages[at].outputs[name] = op
            self._need(op, at)

    def level(self, op: Op) -> int:
        """The first stage in which an op can be computed."""
        return self._levels[id(op)]

    def is_near(self, op: Op) -> bool:
        """Whether ``op`` may be computed anew for a neighbouring page."""
        return op.elements <= NEAR_ELEMENTS and all(
            one.kind in NEAR and not (one.kind == "field" and one.data in self.written) for one in walk([op])
        )

    def loads(self, op: Op, stage: int) -> bool:
        """Whether a stage finds the value stored."""
        return self.stored_at.get(id(op), stage) < stage

    def _level(self, op: Op) -> int:
        level = max((self._levels[id(operand)] for operand in op.operands), default=0)
        if op.kind in ("fold", "running") or self._is_far(op):
            level = max(level, 1) if self.whole else level + 1
        return level

    def _is_far(self, op: Op) -> bool:
        """Whether ``op`` takes neighbouring pages' values that an earlier stage must store, one for each page."""
        return op.kind == "shift" and op.operands[0].paged and not self.is_near(op.operands[0])

    def _need(self, op: Op, stage: int) -> None:
        if (id(op), stage) in self._seen:
            return
        self._seen.add((id(op), stage))
        if id(op) in self._hoistable:
            self.stored_at[id(op)] = HOISTED
            if op not in self.hoisted:
                self.hoisted.append(op)
            return
        level = self.level(op)
        if op.kind == "fold" and not self.whole:
            self._add_partial(Partial(op.data[0], op.operands[0]), level - 1)
            return
        if op.kind == "running":
            self._add_partial(running_partial(op), level - 1)
        if self._is_far(op):
            self._store(op.operands[0])
        elif level < stage and self._is_cheaper_stored(op):
            self._store(op)
        else:
            for operand in op.operands:
                self._need(operand, stage)

    def _made_ahead(self, outputs: Sequence[Op]) -> set[int]:
        """What is made of long products of queries, of gathers that move their values, or into an index, and is the
        same for all pages."""
        of_queries: set[int] = set()
        ahead: set[int] = set()
        indices = {id(op.operands[1]) for op in walk(outputs) if op.kind == "gather"}
        for op in walk(outputs):
            if op.paged or self.level(op):
                continue
            operands = {id(one) for one in op.operands}
            if op.kind == "query" or operands & of_queries:
                of_queries.add(id(op))
                moves = op.kind == "gather" and not op.picks
                long = op.kind == "contract" and _products(op) >= HOISTED_PRODUCTS
                if moves or long or id(op) in indices or operands & ahead:
                    ahead.add(id(op))
        return {id(op) for op in walk(outputs) if id(op) in ahead and op.elements <= HOISTED_ELEMENTS}

    def _store(self, op: Op) -> None:
        level = self.level(op)
        if id(op) not in self.stored_at:
            self.stored_at[id(op)] = level
            self.stages[level].stored.append(op)
        self._need(op, level)

    def _add_partial(self, partial: Partial, level: int) -> None:
        if partial not in self.stages[level].partials:
            self.stages[level].partials.append(partial)
        self._need(partial.operand, level)

    @staticmethod
    def _is_cheaper_stored(op: Op) -> bool:
        if not op.paged or op.kind in LEAVES:
            return False
        return STORED_BYTES * op.elements < FIELD_BYTES * _loaded(op, set())


def _loaded(op: Op, seen: set[int]) -> int:
    """Elements per page of the fields that are loaded to compute ``op``, each once."""
    if id(op) in seen:
        return 0
    seen.add(id(op))
    if op.kind == "field" or (op.picks and op.operands[0].kind == "field"):
        return op.elements
    return sum(_loaded(one, seen) for one in op.operands)


def _products(op: Op) -> int:
    """Products that a contraction adds up."""
    (first, second, _), sizes = op.data, dict[str, int]()
    for letters, x in zip((first, second), op.operands, strict=True):
        sizes |= {letter: size or 1 for letter, size in zip(letters, x.shape, strict=True)}
    return math.prod(sizes.values())


def running_partial(op: Op) -> Partial:
    """What the chunks before a ``running`` op's own contribute."""
    return Partial("softmax" if op.data == "log_sum" else op.data, op.operands[0])
