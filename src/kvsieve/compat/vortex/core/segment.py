"""One segment as a vortex_torch flow sees it while kvsieve traces or runs it: tensors, fields, context.

``SegmentTensor`` stands in for ``vTensor`` there. It holds any tensor (torch.export's included) and is no subclass of
torch.Tensor, which torch.export could not follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from kvsieve.compat.vortex.core.errors import FormatError, OpError, UnknownField, described
from kvsieve.compat.vortex.core.formats import FORMAT
from kvsieve.compat.vortex.utils import Mode


class SegmentTensor:
    """A tensor ``[L, D0, D1]`` with a format: L is 1 for BATCHED, the number of window pages for RAGGED and PAGED.

    ``name``: the cache field that it is; None for other tensors. Ops of vortex_torch that work in place replace
    ``data``.
    """

    def __init__(self, data: torch.Tensor, _format: FORMAT, name: str | None = None) -> None:
        self.data, self._format, self.name = data, _format, name

    def __repr__(self) -> str:
        return f"SegmentTensor({list(self.data.shape)}, {self._format.name})"

    def assign(self, value: torch.Tensor) -> None:
        """What an op writes here in place."""
        self.data = value

    def fill(self, value: float, filled: torch.Tensor) -> None:
        """A number that an op writes here in place, and the tensor that it makes."""
        self.assign(filled)

    @property
    def rank(self) -> int:
        """Number of axes; 3 for what ops take."""
        return self.data.dim()

    @property
    def inner(self) -> tuple[int, int]:
        """``(D0, D1)``."""
        return int(self.data.shape[1]), int(self.data.shape[2])

    def __len__(self) -> int:
        return int(self.data.shape[0])

    def __bool__(self) -> bool:
        raise self._no_number()

    def __float__(self) -> float:
        raise self._no_number()

    def __index__(self) -> int:
        raise self._no_number()

    def _no_number(self) -> OpError:
        problem = f"expected a flow that does not depend on values, received a branch on (or a number of) {self!r}"
        return OpError("a tensor of the flow", problem, "compute both sides and combine them with ops such as Relu")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self.data, name)
        if isinstance(value, torch.Tensor):
            return SegmentTensor(value, self._format)
        if not callable(value):
            return value
        return lambda *args, **kwargs: _call(getattr(torch.Tensor, name), (self, *args), kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})


def _operator(name: str) -> Callable[..., Any]:
    def method(self: SegmentTensor, *args: Any) -> Any:
        return _call(getattr(torch.Tensor, name), (self, *args), {})

    method.__name__ = name
    return method


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv pow rpow neg abs matmul rmatmul getitem lt le gt ge eq ne and or xor "
    "invert floordiv mod"
)
for _name in _OPERATORS.split(" "):
    setattr(SegmentTensor, f"__{_name}__", _operator(f"__{_name}__"))


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A torch function on segment tensors, which must have one format; the results keep it."""
    found = list(_operands([*args, *kwargs.values()]))
    formats = {x._format for x in found if isinstance(x, SegmentTensor)}
    name = getattr(func, "__name__", str(func))
    if len(formats) > 1 or any(isinstance(x, torch.Tensor) for x in found):
        raise FormatError(
            f"{name}: expected tensors of one format, received {', '.join(sorted(one.name for one in formats))}"
            f"{' and a plain torch.Tensor' if len(formats) < 2 else ''}; use an op of vortex_torch.indexer"
        )
    (kind,) = formats
    return _wrapped(func(*_bare(args), **{key: _bare(value) for key, value in kwargs.items()}), kind)


def _operands(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (SegmentTensor, torch.Tensor)):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _operands(value)


def _bare(value: Any) -> Any:
    if isinstance(value, SegmentTensor):
        return value.data
    return type(value)(map(_bare, value)) if type(value) in (list, tuple) else value


def _wrapped(result: Any, kind: FORMAT) -> Any:
    if isinstance(result, torch.Tensor):
        return SegmentTensor(result, kind)
    return type(result)(_wrapped(x, kind) for x in result) if type(result) in (list, tuple) else result


class SegmentContext:
    """The context of a traced call: what a flow may read of it, and what its ops leave in it.

    ``saved``: new values [W, D0, D1] of the fields that ``Save`` wrote, by name. ``scores``: what ``topK`` received.
    """

    name = "Segment"
    mode = Mode.execute
    _created = True
    num_kv_heads = head_num = batch_size = 1

    def __init__(self, page_size: int, head_dim: int, group_size: int = 1) -> None:
        self.page_size = self.block_size = page_size
        self.head_dim, self.group_size, self.num_qo_heads = head_dim, group_size, group_size
        self.saved: dict[str, torch.Tensor] = {}
        self.scores: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        raise UnknownField(
            f"ctx.{name}",
            "not known while a flow is traced: it would have to be the same for every request and step",
            "make it a constructor argument of the flow",
        )


def segment_tensor(op: object, x: Any) -> SegmentTensor:
    """The operand, or an error that names the op."""
    if not isinstance(x, SegmentTensor) or x.rank != 3:
        raise OpError(
            type(op).__name__,
            f"expected a tensor [L, D0, D1] of the flow, received {described(x)}",
            "pass q, a field of the cache, or the result of an op",
        )
    return x
