"""A vFlow as a kvsieve flow: traced, lowered, verified and run like one that was written for kvsieve.

Fields that ``forward_cache`` computes become summaries; fields that ``Save`` writes become state of the request, which
starts from what ``Fill`` writes (0 without one). So state never outlives its request and is never shared.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from kvsieve.compat.vortex.core.analysis import analyse
from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.core.fields import cache_of_page, cache_of_window, stored_name
from kvsieve.compat.vortex.core.formats import FORMAT
from kvsieve.compat.vortex.core.segment import SegmentContext, SegmentTensor
from kvsieve.compat.vortex.flow import registry
from kvsieve.compat.vortex.flow.flow import vFlow
from kvsieve.dtypes import default_dtype
from kvsieve.errors import ConfigError, UnknownName
from kvsieve.flow import Flow

PREFIX = "vortex:"
"""``vortex:NAME`` is the flow that is registered under NAME here, whatever kvsieve itself calls NAME."""
_MEMBERS = frozenset(dir(Flow))
"""Attributes that mean something to kvsieve; constructor arguments of these names are not shown as attributes."""
_CLASS = "_kvsieve_class"


@contextlib.contextmanager
def ordinary_torch() -> Iterator[None]:
    """No mode of torch's, float32 as default: flows are built as if no trace and no reference were under way."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), default_dtype(torch.float32):
        yield


class Instances:
    """A flow's objects, one per (page size, head_dim): ``create_cache`` may leave marks on the object."""

    def __init__(self, cls: type[vFlow], arguments: Mapping[str, Any]) -> None:
        self.cls, self.arguments = cls, dict(arguments)
        self._made: dict[tuple[int, int], tuple[vFlow, dict[str, tuple[int, int]]]] = {}

    def construct(self) -> vFlow:
        """A new object.

        Raises:
            ConfigError: the constructor fails, otherwise than with ValueError or TypeError, which are raised on.
        """
        try:
            with ordinary_torch():
                return self.cls(**self.arguments)
        except (ValueError, TypeError):
            raise
        except Exception as error:  # a failed assertion, as a rule
            raise ConfigError(f"vFlow {self.cls.__name__}: {type(error).__name__}: {error}") from error

    def get(self, page_size: int, head_dim: int) -> tuple[vFlow, dict[str, tuple[int, int]]]:
        """The object for a geometry and the shapes of its own fields."""
        key = page_size, head_dim
        if key not in self._made:
            flow = self.construct()
            with ordinary_torch():
                fields = flow.get_cache_meta_info(page_size, head_dim)
            self._made[key] = flow, {name: shape for name, shape in fields.items() if name not in ("k", "v")}
        return self._made[key]


class VortexFlow(Flow):
    """Base class of converted flows; :func:`flow_class` makes one per vFlow class, with its constructor arguments.

    ``page_size`` may be given on top: the page size to use where the flow does not accept every one.
    """

    vflow: ClassVar[type[vFlow]]

    def __init__(self, **arguments: Any) -> None:
        bound = inspect.signature(type(self)).bind(**arguments)
        bound.apply_defaults()
        values = {**bound.kwargs, **dict(zip(bound.signature.parameters, bound.args, strict=False))}
        page_size = values.pop("page_size", None) if not _takes_page_size(self.vflow) else None
        self._instances = Instances(self.vflow, arguments if _takes_page_size(self.vflow) else values)
        self._instances.construct()  # its errors are about arguments, those of the analysis about the flow
        self._analysis = analyse(self._instances.get, self.vflow.__name__, page_size)
        vars(self).update({key: value for key, value in values.items() if key not in _MEMBERS})
        vars(self)["page_size"] = self._analysis.page_size
        vars(self)["equal_widths"] = self._analysis.equal_widths
        for method, fields in (("summarize", self._analysis.summaries), ("init_state", self._analysis.states)):
            if not fields:
                vars(self)[method] = None

    def __repr__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in self._instances.arguments.items())
        return f"{type(self).__name__}({arguments})"

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """``forward_cache`` on one full page."""
        flow, shapes = self._instances.get(*k.shape)
        cache = cache_of_page(k, v, shapes)
        ctx = SegmentContext(k.shape[0], k.shape[1])
        flow.forward_cache(cache, torch.zeros(1, dtype=torch.int64), ctx)
        return {stored_name(name): cache[name].data[0] for name in self._analysis.summaries}

    def init_state(self, page_size: int, head_dim: int) -> Mapping[str, torch.Tensor]:
        """What ``Fill`` writes to the fields that ``Save`` writes."""
        _, shapes = self._instances.get(page_size, head_dim)
        states = self._analysis.states.items()
        return {stored_name(name): torch.full(shapes[name], value, dtype=torch.float32) for name, value in states}

    def score(
        self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """``forward_indexer`` on one segment's window."""
        page_size, head_dim = pages["k"].shape[1:]
        flow, shapes = self._instances.get(page_size, head_dim)
        ctx = SegmentContext(page_size, head_dim, q.shape[0])
        query, out = SegmentTensor(q[None], FORMAT.BATCHED), SegmentTensor(q[:1, :1, None], FORMAT.RAGGED)
        flow.forward_indexer(query, out, cache_of_window(pages, shapes), ctx)
        assert ctx.scores is not None  # the analysis saw a topK
        scores = ctx.scores[:, 0, 0]
        if set(ctx.saved) != set(self._analysis.states):
            raise OpError(
                f"{self.vflow.__name__}.forward_indexer",
                f"expected the same saved fields at every geometry, received {sorted(ctx.saved)} here and "
                f"{sorted(self._analysis.states)} elsewhere",
                "save the same fields whatever the sizes are",
            )
        saved = {stored_name(name): value for name, value in ctx.saved.items()}
        return (scores, saved) if saved else scores


def flow_class(cls: type[vFlow]) -> type[VortexFlow]:
    """The kvsieve flow of a vFlow class: same constructor arguments, source file and documentation."""
    if _CLASS not in vars(cls):
        registered_name = vars(cls).get("registered_name", "")
        parameters = list(inspect.signature(cls).parameters.values())
        if not _takes_page_size(cls):
            keyword = inspect.Parameter(
                "page_size", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="int | None"
            )
            variadic = [one for one in parameters if one.kind is one.VAR_KEYWORD]
            parameters = [*(one for one in parameters if one not in variadic), keyword, *variadic]
        members = {
            "vflow": cls,
            "name": f"{PREFIX}{registered_name}" if registered_name else "",
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__signature__": inspect.Signature(parameters),
        }
        setattr(cls, _CLASS, type(cls.__name__, (VortexFlow,), members))
    made: type[VortexFlow] = vars(cls)[_CLASS]
    return made


def registered(name: str) -> type[VortexFlow]:
    """The kvsieve flow of a registered vFlow; the prefix ``vortex:`` may be left out.

    Raises:
        UnknownName: no such name.
    """
    name = name.removeprefix(PREFIX)
    if not registry.has(name):
        raise UnknownName("flow", f"{PREFIX}{name}", registered_names())
    return flow_class(registry.get(name))


def registered_names() -> list[str]:
    """All names that :func:`registered` knows, with the prefix."""
    return [f"{PREFIX}{name}" for name in registry.list_keys()]


def _takes_page_size(cls: type[vFlow]) -> bool:
    return "page_size" in inspect.signature(cls).parameters


__all__ = ["VortexFlow", "flow_class", "registered", "registered_names"]
