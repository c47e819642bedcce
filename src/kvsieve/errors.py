"""Errors a user can cause. Each message says what was expected, what was received and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class KvsieveError(Exception):
    """Base class: the CLI prints these as one line and exits with code 2."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors travel between processes, whatever their constructors take."""
        return _rebuilt, (type(self), self.args, vars(self))


def _rebuilt(kind: type[KvsieveError], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> KvsieveError:
    error = kind.__new__(kind, *arguments)
    vars(error).update(attributes)
    return error


@dataclass(frozen=True)
class Location:
    """A line of a flow's source file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class FlowError(KvsieveError, ValueError):
    """A flow that cannot be run as written.

    Attributes:
        where: the flow's method, such as ``Quest.score``.
        location: file and line of the offending statement, where known.
        problem: what is wrong, with op and shapes.
        remedy: what to write instead.
    """

    def __init__(self, where: str, problem: str, remedy: str, location: Location | None = None) -> None:
        self.where, self.problem, self.remedy, self.location = where, problem, remedy, location
        prefix = f"{location}: " if location else ""
        super().__init__(f"{prefix}{where}: {problem}. Remedy: {remedy}.")


class ConfigError(KvsieveError, ValueError):
    """An argument, option or configuration that cannot be honoured."""


def check_integer(what: str, value: object, least: int) -> None:
    """Refuse what is no integer of at least ``least``.

    Raises:
        ConfigError: says ``what`` it was given for.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{what}: expected an integer >= {least}, received {value!r}")


class UnknownName(ConfigError):
    """A name that is not registered; lists the near ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        near = [one for one in known if name and (name in one or one in name)]
        if not near:
            alike = {one: _likeness(name, one) for one in known}
            near = sorted((one for one in known if alike[one] >= 0.6), key=lambda one: -alike[one])
        hint = f"did you mean {', '.join(near[:3])}?" if near else f"known: {', '.join(known) or 'none'}"
        super().__init__(f"unknown {kind} {name!r}: {hint}")


def _likeness(name: str, known: str) -> float:
    """How alike two names are, 0 to 1; one that breaks off is compared with the start of the other."""
    starts = {known, known[: len(name) + 1]}
    return max(difflib.SequenceMatcher(None, start, name).ratio() for start in starts)


class OutOfPages(KvsieveError, RuntimeError):
    """The pool has too few free blocks for a call. Nothing was changed: finish a request, or use a larger pool."""

    def __init__(self, needed: int, free: int) -> None:
        self.needed, self.free = needed, free
        super().__init__(
            f"out of pages: the call needs {needed} free blocks, the pool has {free}; "
            "nothing was changed. Finish a request or create the pool with more blocks"
        )


class NotCroppable(KvsieveError, RuntimeError):
    """Tokens whose effect on a flow's state cannot be undone. Nothing was changed."""
