"""A flow's method called again: what it computes may hang on nothing but its arguments and the flow."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor

from kvsieve.errors import KvsieveError
from kvsieve.flow import DoublePrecision
from kvsieve.watch import FlowMethod, one_line

REMEDY = "draw random numbers and make constants once, in __init__, and return what a later step needs as state"

PAGES = 3
"""Pages of these calls: few, since what a flow computes of a page may be large."""


def refuse_history(
    method: FlowMethod,
    call: Callable[[Mapping[str, torch.Tensor]], list[torch.Tensor]],
    examples: Mapping[str, torch.Tensor],
    page_inputs: frozenset[str],
) -> None:
    """Raise FlowError if a second call on the same values does not repeat the first, bit for bit, in float32 and in
    float64, which tells two moments apart that float32 does not.

    A trace records one call: Python's random numbers, the time, a global that counts or remembers would be frozen in
    it, and neither the runtime nor the reference would do what was written.
    """
    values = _random_like({name: x[:PAGES] if name in page_inputs else x for name, x in examples.items()})
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            first, second = call(values), call(values)
        except Exception as error:
            raise _failure(method, error) from error
        exact = _in_float64(call, values)
    if any(isinstance(x, FakeTensor) for x in (*first, *second)):
        raise method.fail("computes with tensors of an earlier call, kept in a global or a class", REMEDY)
    for one, other in ((first, second), exact):
        if len(one) != len(other) or not all(map(_same, one, other)):
            raise method.fail("gives other values when it is called again with the same ones", REMEDY)


def _in_float64(
    call: Callable[[Mapping[str, torch.Tensor]], list[torch.Tensor]], values: Mapping[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two calls in float64; nothing where they fail, which is no fault here."""
    wide = {name: x.double() if x.is_floating_point() else x for name, x in values.items()}
    try:
        with DoublePrecision():
            return call(wide), call(wide)
    except Exception:  # whatever the flow raises
        return [], []


def _failure(method: FlowMethod, error: Exception) -> KvsieveError:
    words = one_line(re.sub(r"\bs\d+\b", "W", f"{type(error).__name__}: {error}"))
    problem, remedy = (
        "could be traced, but fails when it is called again, as if it kept something of the first call",
        REMEDY,
    )
    if isinstance(error, IndexError):  # a trace has sizes and no numbers
        problem, remedy = "could be traced, but fails on numbers", "mend this statement: an index is beyond its axis"
    return method.fail(f"{problem}: {words}", remedy, method.location_of_error(error))


def _random_like(examples: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values without zeros, which would hide a factor; where pages lie stays as it is."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.rand(x.shape, generator=generator) + 0.5
        if x.is_floating_point() and name not in ("position", "age")
        else x
        for name, x in examples.items()
    }


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    equal = a == b
    return bool((equal | (a.isnan() & b.isnan()) if a.is_floating_point() else equal).all())
