"""Comparisons of one stage with float64: a difference beyond the bound is a Fault that says where and by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvsieve.reference import rank
from kvsieve.verify.rounding import F64, unit_roundoff

STAGES = ("storage", "summary", "score", "state", "mass", "selection", "lse", "output", "life cycle")


class Fault(AssertionError):
    """Something is wrong beyond rounding.

    Attributes:
        stage: one of ``STAGES``.
        place: layer, request and KV head, as text.
    """

    def __init__(self, stage: str, place: str, message: str) -> None:
        assert stage in STAGES, stage
        self.stage, self.place, self.message = stage, place, message
        super().__init__(f"{stage} of {place}: {message}")

    def __reduce__(self) -> tuple[type[Fault], tuple[str, str, str]]:
        """Faults travel between processes."""
        return Fault, (self.stage, self.place, self.message)


@dataclass
class Numbers:
    """What was seen so far: comparisons per stage, worst error over its bound, selections against the reference.

    ``agreed`` of ``selections`` equal the reference's; ``boundary`` is the narrowest top-k boundary, in float32 ulp;
    ``drift`` is the largest distance of stored state from the reference's own trajectory, relative to the largest
    value of the field in the segment's window.
    """

    checked: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    selections: int = 0
    agreed: int = 0
    boundary: float = float("inf")
    drift: float = 0.0

    def note(self, stage: str, ratio: float) -> None:
        self.checked[stage] = self.checked.get(stage, 0) + 1
        self.worst[stage] = max(self.worst.get(stage, 0.0), ratio)

    def merge(self, other: Numbers) -> None:
        """Add what another run saw."""
        for stage, count in other.checked.items():
            self.checked[stage] = self.checked.get(stage, 0) + count
            self.worst[stage] = max(self.worst.get(stage, 0.0), other.worst[stage])
        self.selections += other.selections
        self.agreed += other.agreed
        self.boundary = min(self.boundary, other.boundary)
        self.drift = max(self.drift, other.drift)


def compare(
    numbers: Numbers, stage: str, place: str, received: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor
) -> None:
    """Received values lie within the bound of the exact ones; NaN and infinities must agree.

    Raises:
        Fault: with the worst element, its value, what it should be, and the bound.
    """
    if received.shape != exact.shape:
        raise Fault(stage, place, f"shape {list(received.shape)}, expected {list(exact.shape)}")
    received, exact = received.detach().to("cpu", F64), exact.to(F64)
    same = (received == exact) | (received.isnan() & exact.isnan())
    error = torch.where(same, 0.0, (received - exact).abs())
    ratio = torch.where(same, 0.0, error / bound.clamp(min=torch.finfo(F64).tiny))
    ratio = torch.nan_to_num(ratio, nan=float("inf"))
    worst = float(ratio.max()) if ratio.numel() else 0.0
    if worst > 1:
        index = int(ratio.flatten().argmax())
        at = [int(i) for i in torch.unravel_index(torch.tensor(index), ratio.shape)] if ratio.dim() else []
        raise Fault(
            stage,
            place,
            f"element {at} is {float(received.flatten()[index]):.9g}, expected {float(exact.flatten()[index]):.9g} "
            f"within {float(bound.expand_as(ratio).flatten()[index]):.3g}: {worst:.3g} times the bound; "
            f"{int((ratio > 1).sum())} of {ratio.numel()} elements are wrong",
        )
    numbers.note(stage, worst)


def storage_bound(bound: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bound widened by one rounding into the format in which the value is stored."""
    if not dtype.is_floating_point:
        return bound
    return bound + unit_roundoff(dtype) * (torch.nan_to_num(exact.abs()) + bound) + torch.finfo(dtype).smallest_normal


def expect(condition: bool, stage: str, place: str, message: str) -> None:
    """Raise a Fault unless a condition holds."""
    if not condition:
        raise Fault(stage, place, message)


def boundary_ulp(scores: torch.Tensor, topk: int) -> float:
    """Distance of the last chosen score from the first one left out, in float32 ulp; inf if none is left out."""
    if not 0 < topk < len(scores):
        return float("inf")
    order = rank(scores)
    inside, outside = float(scores[order[topk - 1]]), float(scores[order[topk]])
    scale = max(abs(inside), abs(outside))
    if inside != inside or outside != outside or scale == float("inf"):
        return float("inf") if inside != outside else 0.0
    ulp = float(torch.finfo(torch.float32).eps) * 2.0 ** (
        torch.frexp(torch.tensor(scale, dtype=F64)).exponent.item() - 1
    )
    return abs(inside - outside) / ulp if ulp else 0.0


def gather_fields(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Per-page fields of a window as one tensor a name, float64 where floating."""
    names = rows[0] if rows else ()
    stacked = {name: torch.stack([row[name] for row in rows]) for name in names}
    return {name: value.to(F64) if value.is_floating_point() else value for name, value in stacked.items()}


def unchanged(stage: str, place: str, name: str, stored: torch.Tensor, wanted: torch.Tensor) -> None:
    """A stored field is what it was, bit for bit."""
    if not torch.equal(_bits(stored), _bits(wanted)):
        was = f"{name} is {_show(stored)}, was {_show(wanted)}"
        raise Fault(stage, place, f"{was}: nothing should have changed it")


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).contiguous().view(torch.uint8)


def _show(value: torch.Tensor) -> str:
    flat = value.flatten()[:4].tolist()
    return str(flat[0] if value.dim() == 0 else flat)
