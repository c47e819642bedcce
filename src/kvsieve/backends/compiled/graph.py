"""A lowered program with the page gather before it and the stores behind it, as one function for torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from kvsieve.backends.compiled.products import use_thin_products
from kvsieve.dtypes import default_dtype
from kvsieve.lower import Program
from kvsieve.mass import FIELDS as MASS_FIELDS


@dataclass
class CompiledProgram:
    """A program that gathers its own inputs.

    ``inputs`` names the tensors that a call passes, in order: ``valid [N, W]``; ``blocks`` and ``rows``, indices into
    storage of the leading axes of ``valid``; storage ``[H * size, *shape]``; and what is batched already. Storage
    named in ``stored`` is written in place, ``returned`` is the name of the output that comes back, if there is one.
    """

    inputs: tuple[str, ...]
    function: Callable[..., tuple[torch.Tensor, ...]]
    varying: Mapping[str, int]
    _seen: set[tuple[bool, ...]] = field(default_factory=set)

    def __call__(self, find: Callable[[str], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run on the tensors that ``find`` gives for the names of :attr:`inputs`."""
        arguments = [find(name) for name in self.inputs]
        self._mark(arguments)
        with default_dtype(torch.float32):  # guarded on, and what a quotient of integers is
            return self.function(*arguments)

    def _mark(self, arguments: Sequence[torch.Tensor]) -> None:
        """Before a compilation, say which sizes vary. Sizes of 1 are compiled apart, and there are few of them."""
        sizes = [
            (x, axis) for name, x in zip(self.inputs, arguments, strict=True) for axis in range(self.varying[name])
        ]
        ones = tuple(x.shape[axis] == 1 for x, axis in sizes)
        if ones in self._seen:
            return
        self._seen.add(ones)
        for x, axis in sizes:
            if x.shape[axis] != 1:
                torch._dynamo.mark_dynamic(x, axis)


def compile_program(
    program: Program,
    by_block: Collection[str],
    by_row: Collection[str],
    stored: Mapping[str, str],
    device: torch.device,
    index_axes: int,
) -> CompiledProgram:
    """Compile a program at its first call.

    Args:
        program: lowered; its other inputs come batched.
        by_block: inputs that are gathered from storage by ``blocks``.
        by_row: likewise by ``rows``.
        stored: outputs that go back to storage, and the index (``blocks`` or ``rows``) of where.
        device: of the program's constants.
        index_axes: axes of ``blocks`` and ``rows``: 2 for [N, W], 1 for [N].
    """
    graph = fx.Graph()
    gathers = {**dict.fromkeys(by_block, "blocks"), **dict.fromkeys(by_row, "rows")}
    used = {gathers[name] for name in program.inputs if name in gathers} | set(stored.values())
    scaled = [name for name in program.inputs if name in MASS_FIELDS]  # stored in units that the host knows
    names = [
        "valid",
        *sorted(used),
        *(["mass_scale"] if scaled else []),
        *program.inputs,
        *(name for name in stored if name not in program.inputs),
    ]
    inputs = {name: graph.placeholder(name) for name in names}
    values = {"valid": inputs["valid"]}
    for name in program.inputs:
        source = inputs[name]
        if name in gathers:
            source = graph.call_function(_gather, (source, inputs[gathers[name]]))
        values[name] = graph.call_function(_widen, (source,))
        if name in scaled:
            values[name] = graph.call_function(_in_true_units, (values[name], inputs["mass_scale"]))
    places = [node for node in program.module.graph.nodes if node.op == "placeholder"]
    results = graph.graph_copy(
        program.module.graph,
        {node: values[name] for node, name in zip(places, ("valid", *program.inputs), strict=True)},
    )
    returned = []
    for name, value in zip(program.outputs, results, strict=True):  # type: ignore[arg-type]
        if name in stored:
            graph.call_function(_store, (inputs[name], inputs[stored[name]], value))
        else:
            returned.append(graph.call_function(torch.Tensor.float, (value,)))
    graph.output(tuple(returned))
    use_thin_products(graph)
    graph.lint()
    module = fx.GraphModule(program.module, graph).to(device)
    batched = set(program.inputs) - set(gathers)
    varying = {name: 1 if name not in batched or name == "q" else index_axes for name in names}
    varying |= dict.fromkeys(("valid", *used), index_axes)
    return CompiledProgram(tuple(names), torch.compile(module), varying)


def _gather(storage: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return storage[index]


def _in_true_units(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Mass [N, W] or [N, W, p] from its stored form; scale [N, 1]."""
    return stored * (scale if stored.dim() == 2 else scale[..., None])


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.is_floating_point() else x


def _store(storage: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
    storage[index] = value.to(storage.dtype)
