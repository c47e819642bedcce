"""Names in a flow's file that are nearly right: a class that is no flow, a method that is never called."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable

from kvsieve.errors import ConfigError, FlowError, Location, UnknownName

METHODS = {
    "summarize": "has no summary fields",
    "init_state": "has no state",
    "score": "attends sink and recent pages only",
}
"""Methods of a flow, and what one without them is."""

LIKENESS = 0.85
"""``scores`` and ``summarise`` are as like ``score`` and ``summarize``; ``summary`` is not."""


def refuse_misspelt(flow: object) -> None:
    """Refuse a flow that lacks a method of the interface and has one of nearly its name, which nobody would call.

    Raises:
        FlowError: names both, with the line.
    """
    cls = type(flow)
    own = {name: value for base in cls.__mro__[-3::-1] for name, value in vars(base).items() if callable(value)}
    for wanted, without in METHODS.items():
        if getattr(flow, wanted) is not None:
            continue
        for name, value in own.items():
            if name not in METHODS and not name.startswith("_") and _alike(name, wanted):
                code = getattr(value, "__code__", None)
                raise FlowError(
                    f"{cls.__name__}.{name}",
                    f"is never called: a flow without {wanted} {without}",
                    f"rename {name} to {wanted}, or to something less like it",
                    Location(code.co_filename, code.co_firstlineno) if code else None,
                )


def _alike(name: str, wanted: str) -> bool:
    if name.casefold().replace("_", "") == wanted.replace("_", ""):
        return True
    return difflib.SequenceMatcher(None, name, wanted).ratio() >= LIKENESS


def no_such_class(module: types.ModuleType, path: str, name: str, flows: Iterable[str]) -> ConfigError:
    """The error for ``path:name`` where ``flows`` are the flow classes of the file."""
    flows = list(flows)
    if name in vars(module) and getattr(vars(module)[name], "__module__", module.__name__) == module.__name__:
        kind = "a class of another kind" if isinstance(getattr(module, name), type) else "no class"
        return ConfigError(f"flow {path}:{name}: expected a subclass of kvsieve.Flow defined there, received {kind}")
    if not flows:
        return ConfigError(
            f"flow file {path}: expected a subclass of kvsieve.Flow, found none; kvsieve new NAME writes one to edit"
        )
    return UnknownName(f"flow class in {path}", name, flows)
