"""What a decayed accumulator is, found by running a flow: new state = increment of this step + decay * old state."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvsieve.errors import ConfigError
from kvsieve.flow import DoublePrecision, Flow, PageFields, extra_parameters, initial_state, instantiate, with_dtype
from kvsieve.verify.rounding import F64

PAGES = 7
"""Window pages of the trial that looks for the recurrence."""


@dataclass(frozen=True)
class Accumulator:
    """A flow's recurrence: ``field`` becomes ``increment + decay * field``."""

    flow: Flow
    field: str
    decay: float


class ExactScore:
    """A flow's ``score`` over a fixed window, in float64 and for one segment: k, v [W, p, D] -> increments [W, ...].

    Args:
        flow: a flow with one state field.
        length: tokens of the segment. first: position of the window's first token.
    """

    def __init__(self, flow: Flow, k: torch.Tensor, v: torch.Tensor, length: int, first: int) -> None:
        self.flow = with_dtype(flow, F64)
        pages, size, width = k.shape
        position = first + size * torch.arange(pages, dtype=F64)
        self.fields = {"k": k.to(F64), "v": v.to(F64), "position": position, "age": length - size - position}
        self.extra = {name: {"layer": 0, "scale": width**-0.5}[name] for name in extra_parameters(self.flow)}
        with DoublePrecision():
            self.initial = {key: value.double() for key, value in initial_state(self.flow, size, width).items()}
            if self.flow.summarize is not None:
                rows = [self.flow.summarize(*page) for page in zip(self.fields["k"], self.fields["v"], strict=True)]
                self.fields |= {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def new_state(self, q: torch.Tensor, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """State after a step with q [G, D], from state fields [W, ...]."""
        assert self.flow.score is not None
        with DoublePrecision():
            result = self.flow.score(q.to(F64), PageFields({**self.fields, **state}), **self.extra)
        return result[1] if isinstance(result, tuple) else {}

    def increment(self, field: str, q: torch.Tensor) -> torch.Tensor:
        """What a step with q adds to ``field``: its new value if the old one were 0."""
        zero = torch.zeros(len(self.fields["k"]), *self.initial[field].shape, dtype=F64)
        return self.new_state(q, {field: zero})[field]


def find_accumulator(flow: Flow, page_size: int, head_dim: int, group: int) -> Accumulator | None:
    """The flow's decayed accumulator; None if it keeps no state.

    Raises:
        ConfigError: it keeps state of another kind.
    """
    if flow.init_state is None or flow.score is None:
        return None
    random = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, PAGES, page_size, head_dim, generator=random, dtype=torch.float32)
    trial = ExactScore(flow, k, v, (PAGES + 2) * page_size, page_size)
    if len(trial.initial) != 1:
        raise _other_state(flow, f"the fields {', '.join(trial.initial)}")
    if not all(value.is_floating_point() for value in initial_state(flow, page_size, head_dim).values()):
        raise _other_state(flow, "state that is no floating-point number")
    (field, initial), q = *trial.initial.items(), torch.randn(2, group, head_dim, generator=random, dtype=torch.float32)
    old = torch.rand(2, PAGES, *initial.shape, generator=random, dtype=F64) + 0.5
    slopes = []
    for query in q:
        added = trial.increment(field, query)
        slopes += [(trial.new_state(query, {field: one})[field] - added) / one for one in old]
    slope = torch.stack(slopes)
    decay = float(slope.mean())
    if not bool((slope - decay).abs().max() < 1e-9) or not 0 <= decay <= 1:
        raise _other_state(flow, f"{field}, which is no increment plus a constant times its old value")
    return Accumulator(flow, field, _nearest_attribute(flow, decay))


def with_decay(flow: Flow, decay: float) -> Flow:
    """The same flow, built anew with another ``decay``.

    Raises:
        ConfigError: its constructor has no argument ``decay``, or keeps another argument under another name.
    """
    arguments = {}
    for name, parameter in inspect.signature(type(flow)).parameters.items():
        if name in vars(flow):
            arguments[name] = getattr(flow, name)
        elif parameter.default is parameter.empty and name != "decay":
            raise ConfigError(f"--decay: flow {flow!r} does not keep its argument {name} as self.{name}; keep it there")
    if "decay" not in inspect.signature(type(flow)).parameters:
        raise ConfigError(f"--decay: expected a flow whose constructor takes decay, received {flow!r}")
    return instantiate(type(flow), {**arguments, "decay": decay})


def with_state_dtype(flow: Flow, dtype: torch.dtype) -> Flow:
    """The same flow with floating state stored in ``dtype``; arithmetic stays float32, with one rounding a store."""
    original = type(flow)

    def init_state(self: Flow, page_size: int, head_dim: int) -> Mapping[str, torch.Tensor]:
        state = original.init_state(self, page_size, head_dim)  # type: ignore[misc]
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}

    twin = copy.copy(flow)
    members = {"init_state": init_state, "__module__": original.__module__, "__qualname__": original.__qualname__}
    twin.__class__ = type(original.__name__, (original,), members)
    return twin


def _nearest_attribute(flow: Flow, decay: float) -> float:
    """The flow's own ``decay`` if that is what was measured: a quotient carries rounding."""
    own = getattr(flow, "decay", decay)
    return float(own) if isinstance(own, (int, float)) and abs(own - decay) < 1e-9 else decay


def _other_state(flow: Flow, what: str) -> ConfigError:
    return ConfigError(
        f"flow {flow!r} keeps {what}: expected one state field whose new value is this step's increment plus decay "
        "times its old value; leave the accumulator options out to verify it as any other flow"
    )
