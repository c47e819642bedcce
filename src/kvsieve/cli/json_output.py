"""What ``--json`` prints: one object, of one form for all commands (docs/json.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from kvsieve.version import __version__


def json_text(command: str, data: Mapping[str, Any], indent: int | None = None) -> str:
    """The object of a command: its name and kvsieve's version, then what it found."""
    whole = {"kvsieve": __version__, "command": command, **data}
    return json.dumps(finite(whole), ensure_ascii=False, allow_nan=False, indent=indent)


def print_json(command: str, data: Mapping[str, Any]) -> None:
    """Print the object of a command, on one line."""
    print(json_text(command, data))


def finite(value: Any) -> Any:
    """JSON values in which NaN and infinities, which JSON lacks, are text."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
