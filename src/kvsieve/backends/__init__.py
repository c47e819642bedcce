"""Backends by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from kvsieve.backends.base import Backend
from kvsieve.backends.compiled import CompiledBackend
from kvsieve.backends.eager import EagerBackend
from kvsieve.backends.forwarding import ScoringBy
from kvsieve.errors import ConfigError, UnknownName

__all__ = ["Backend", "backend_names", "get_backend"]


def _triton() -> Backend:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("backend triton needs the package triton, which is not installed: pip install triton")
    from kvsieve.backends.triton import TritonBackend

    return TritonBackend()


def _triton_with_compiled_scoring() -> Backend:
    """For flows that no kernel is generated for."""
    return ScoringBy(_triton(), CompiledBackend(), "triton+compiled")


_BACKENDS: dict[str, Callable[[], Backend]] = {
    "eager": EagerBackend,
    "compiled": CompiledBackend,
    "triton": _triton,
    "triton+compiled": _triton_with_compiled_scoring,
}


def backend_names() -> list[str]:
    """Names of the backends of this version."""
    return list(_BACKENDS)


def get_backend(backend: str | Backend) -> Backend:
    """A backend by name, or the one given.

    Raises:
        UnknownName: no such backend.
        ConfigError: neither a backend nor a name.
    """
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        names = ", ".join(backend_names())
        raise ConfigError(f"backend: expected a Backend instance or a name ({names}), received {backend!r}")
    if backend not in _BACKENDS:
        raise UnknownName("backend", backend, _BACKENDS)
    return _BACKENDS[backend]()
