"""A Python file that holds flows, imported by its path."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import traceback
import types
from pathlib import Path

from kvsieve.errors import ConfigError

LAYERS = {"vortex_torch": "kvsieve.compat.vortex"}
"""Packages that a layer stands in for, and the layer's module, whose ``install()`` makes them importable."""


def import_file(path: Path) -> types.ModuleType:
    """Run a file as a module of its own.

    Raises:
        ConfigError: no such file, or it does not import; names the line.
    """
    if not path.is_file():
        kind = "a directory" if path.is_dir() else "no such file"
        raise ConfigError(f"flow file {str(path)!r}: {kind}; expected path/to/file.py:ClassName")
    name = f"kvsieve_flow_{path.stem}_{abs(hash(path.resolve()))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"flow file {str(path)!r}: expected a Python file with the ending .py")
    module = importlib.util.module_from_spec(spec)
    _install_layers(path)
    sys.modules[name] = module  # torch.export and inspect look the module up by name
    try:
        spec.loader.exec_module(module)
    except ConfigError as error:
        del sys.modules[name]
        line = _line_in(error, path)
        raise ConfigError(f"{path}:{line}: {error}" if line else str(error)) from error
    except Exception as error:
        del sys.modules[name]
        line = _line_in(error, path)
        raise ConfigError(
            f"flow file {path}{f':{line}' if line else ''} does not import: {type(error).__name__}: {error}"
        ) from error
    return module


def _install_layers(path: Path) -> None:
    """Provide the packages that a file imports and a layer stands in for."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # running the file says it better
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for package in {name.split(".")[0] for name in names} & set(LAYERS):
            importlib.import_module(LAYERS[package]).install()


def _line_in(error: BaseException, path: Path) -> int | None:
    """The line of the file that an error comes from; None: none of its lines."""
    if isinstance(error, SyntaxError):
        return error.lineno
    frames, file = reversed(traceback.extract_tb(error.__traceback__)), path.absolute()
    return next((frame.lineno for frame in frames if Path(frame.filename).absolute() == file), None)
