"""Building flows by name, from the shipped ones and from user files."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsieve.compat.vortex.flow import registry
from kvsieve.compat.vortex.flow.flow import vFlow
from kvsieve.errors import ConfigError
from kvsieve.flow import shown_parameters

SHIPPED = "kvsieve.compat.vortex.flow.algorithms"


class FlowLoadError(ConfigError, ImportError):
    """A file or module with flows that cannot be executed."""


class FlowInitError(ConfigError, TypeError):
    """Arguments that a flow's constructor does not take, or a constructor that fails."""


def build_vflow(
    selected: str,
    init_kwargs: Mapping[str, Any] | None = None,
    user_file: str | Path | None = None,
    module_path: str | None = None,
) -> vFlow:
    """Build a registered flow.

    Args:
        selected: the registered name.
        init_kwargs: arguments of its constructor.
        user_file: a Python file to execute first, which registers flows.
        module_path: a module to import instead of the shipped flows.

    Raises:
        FlowLoadError: the file or module cannot be executed. RegistryError: no such name.
        FlowInitError: the constructor refuses the arguments.
    """
    try:
        importlib.import_module(SHIPPED if module_path is None else module_path)
    except ImportError as error:
        raise FlowLoadError(f"build_vflow: module {module_path!r} does not import: {error}") from error
    if user_file is not None:
        _execute(Path(user_file))
    cls = registry.get(selected)
    arguments = dict(init_kwargs or {})
    signature = inspect.signature(cls)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise FlowInitError(f"vFlow {selected}: {error}; its arguments are {shown_parameters(signature)}") from None
    try:
        return cls(**arguments)
    except Exception as error:
        raise FlowInitError(f"vFlow {selected}: {type(error).__name__}: {error}") from error


def _execute(path: Path) -> None:
    if not path.is_file():
        raise FlowLoadError(f"build_vflow: user_file {str(path)!r}: no such file")
    from kvsieve.compat.vortex.install import install

    install()
    name = f"vortex_user_{path.stem}_{uuid.uuid4().hex}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FlowLoadError(f"build_vflow: user_file {str(path)!r}: expected a Python file with the ending .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise FlowLoadError(f"build_vflow: user_file {path}: {type(error).__name__}: {error}") from error
