"""How wrong flows are written down: a class, what its error must say, and the offending line marked in its source."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from kvsieve.flow import Flow

CASES: dict[str, tuple[type[Flow], tuple[str, ...]]] = {}


class Means(Flow):
    """What most of them share: one summary field."""

    def summarize(self, k, v):
        return {"mean": k.mean(0)}


def wrong(*says: str) -> Callable[[type[Flow]], type[Flow]]:
    """Class decorator: tracing the flow fails with an error that says all this."""

    def add(cls: type[Flow]) -> type[Flow]:
        CASES[cls.__name__] = cls, says
        return cls

    return add


def marked_line(cls: type) -> tuple[str, int]:
    """File and line of the statement marked ``# wrong``."""
    lines, first = inspect.getsourcelines(cls)
    (offset,) = (offset for offset, line in enumerate(lines) if line.rstrip().endswith("# wrong"))
    return inspect.getsourcefile(cls) or "", first + offset
