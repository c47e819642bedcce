"""Output files: whole or not at all, in folders that are made if they are missing."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvsieve.errors import ConfigError


@contextlib.contextmanager
def new_file(path: Path, option: str) -> Iterator[Path]:
    """A name to write to; what was written there takes the place of ``path``, if nothing was raised.

    A file that is there is replaced. What is no regular file, such as ``/dev/stdout``, is written to as it is.

    Raises:
        ConfigError: it cannot be written; names the option.
    """
    path = path.expanduser().resolve()
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            yield Path(folder) / path.name
            for made in Path(folder).iterdir():  # matplotlib adds an ending where there is none
                os.replace(made, path.parent / made.name)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror or error}; expected a file to write to") from None


def write_text(path: Path, text: str, option: str) -> None:
    """Write a UTF-8 text file as :func:`new_file` does.

    Raises:
        ConfigError: it cannot be written; names the option.
    """
    with new_file(path, option) as name:
        name.write_text(text, encoding="utf-8")
