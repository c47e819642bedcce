"""Output files that a command is asked for, refused before any work is done for them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvsieve.errors import ConfigError
from kvsieve.verify.plots import check_plotting


def check_output(path: Path | None, option: str) -> None:
    """Refuse a file that could not be written; writes nothing. Missing folders are no fault: they are made later.

    Raises:
        ConfigError: a directory, a file in what is no directory, or one that may not be written.
    """
    if path is None:
        return
    path = path.expanduser().absolute()
    if path.is_dir():
        raise ConfigError(f"{option} {path}: expected a file to write to, received a directory; name a file in it")
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: expected a file in a directory, but {folder} is none; name another")
    if not (os.access(path, os.W_OK) if path.exists() else _takes_files(folder)):
        raise ConfigError(f"{option} {path}: expected a file to write to, received one without permission for it")


def _takes_files(folder: Path) -> bool:
    """Whether a file can be made in a directory: permissions alone do not say so of every file system."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def check_plot(path: Path | None) -> None:
    """Refuse a plot that could not be drawn or written.

    Raises:
        ConfigError: matplotlib is missing, it draws no file of this kind, or the file could not be written.
    """
    if path is None:
        return
    check_output(path, "--plot")
    check_plotting()
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise ConfigError(f"--plot {path}: expected a file such as plot.png, received one of kind {path.suffix!r}")
