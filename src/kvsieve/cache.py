"""Where kvsieve keeps what it fetched or built."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$KVSIEVE_CACHE``, or ``~/.cache/kvsieve``."""
    configured = os.environ.get("KVSIEVE_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "kvsieve"
