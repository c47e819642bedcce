"""Generated source as an imported module: Triton reads kernels from files."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

from kvsieve.cache import cache_dir

FOLDER = "triton"


def load_source(name: str, source: str) -> ModuleType:
    """The module of ``source``; its file is named after its content and written once."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    module_name = f"kvsieve_generated_{name}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    path = _write(f"{name}_{digest}.py", source)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[module_name] = module
    return module


def _write(file_name: str, source: str) -> Path:
    for folder in (lambda: cache_dir() / FOLDER, _own_folder):
        try:
            path = folder() / file_name
            if not path.is_file() or path.read_text() != source:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, source)
        except OSError:
            continue
        return path
    raise OSError(f"generated kernels: expected {cache_dir()} or the temporary folder to be writable, received neither")


@cache
def _own_folder() -> Path:
    """A temporary folder that nobody else could have filled: what lies in it is run."""
    return Path(tempfile.mkdtemp(prefix="kvsieve-"))


def replace_file(path: Path, text: str) -> None:
    """Whole or not at all, whoever else writes the same."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
