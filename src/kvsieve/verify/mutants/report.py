"""What was found of the mutants, for a person or a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsieve.verify.mutants import MUTANTS
from kvsieve.verify.mutants.hunt import Hunt

SHARE = 0.95


def passed(hunts: Sequence[Hunt]) -> bool:
    """At least 95 % of the counted mutants are killed, and it is said of every survivor why."""
    counted = [hunt for hunt in hunts if hunt.counted]
    killed = sum(hunt.killed for hunt in counted)
    return killed >= SHARE * len(counted) and all(hunt.killed or MUTANTS[hunt.mutant].survives for hunt in counted)


def as_json(hunts: Sequence[Hunt]) -> dict[str, Any]:
    """A machine-readable report."""
    counted = [hunt for hunt in hunts if hunt.counted]
    return {
        "passed": passed(hunts),
        "killed": sum(hunt.killed for hunt in counted),
        "counted": len(counted),
        "mutants": [_row(hunt) for hunt in hunts],
    }


def _row(hunt: Hunt) -> dict[str, Any]:
    mutant = MUTANTS[hunt.mutant]
    return {
        "name": mutant.name,
        "bug": mutant.row,
        "part": mutant.part,
        "counted": hunt.counted,
        "killed_by": hunt.killed_by or None,
        "stage": hunt.stage or None,
        "message": hunt.message or None,
        "finite": hunt.finite,
        "raised": hunt.raised or None,
        "seconds": round(hunt.seconds, 2),
        "survives": mutant.survives or None,
    }


def text(hunts: Sequence[Hunt]) -> str:
    """A row per mutant, what was not counted, who survived and why; the last line is ``killed N of M``."""
    counted = [hunt for hunt in hunts if hunt.counted]
    width = max(len(hunt.mutant) for hunt in hunts)
    lines = [f"{'mutant':{width}}  bug  {'killed by':46}  {'stage':10}  seconds"]
    for hunt in counted:
        bug = MUTANTS[hunt.mutant].row or "own"
        killer = hunt.killed_by or "SURVIVED"
        lines.append(f"{hunt.mutant:{width}}  {bug:>3}  {killer:46}  {hunt.stage:10}  {hunt.seconds:7.1f}")
    for hunt in hunts:
        if hunt.raised:
            lines.append(f"not counted, refused by the stack: {hunt.mutant}: {hunt.raised}")
        elif not hunt.finite:
            lines.append(f"not counted, shows as NaN only: {hunt.mutant} ({hunt.killed_by})")
    for hunt in counted:
        if not hunt.killed:
            reason = MUTANTS[hunt.mutant].survives or "NOT EXPLAINED: a check is missing"
            lines.append(f"survived: {hunt.mutant}: {reason}")
    lines.append(f"killed {sum(hunt.killed for hunt in counted)} of {len(counted)}")
    return "\n".join(lines)
