"""Flows by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvsieve.compat.vortex.flow.flow import vFlow
from kvsieve.errors import ConfigError, UnknownName
from kvsieve.flow import source_file


class RegistryError(ConfigError, RuntimeError):
    """A name that is unknown or taken, or a class that is no flow."""


FlowT = TypeVar("FlowT", bound=type[vFlow])
_REGISTRY: dict[str, type[vFlow]] = {}


def register(name: str) -> Callable[[FlowT], FlowT]:
    """Class decorator: the flow can be built by ``name``.

    Raises:
        RegistryError: no name; not a subclass of vFlow; or the name belongs to another class. The same class of the
            same file, executed again, replaces itself.
    """

    if not isinstance(name, str):
        raise RegistryError(f'register: expected a name, received {name!r}; write @register("NAME") above the class')

    def add(cls: FlowT) -> FlowT:
        if not (isinstance(cls, type) and issubclass(cls, vFlow)):
            raise RegistryError(f"register({name!r}): expected a subclass of vFlow, received {cls!r}")
        known = _REGISTRY.get(name)
        if known is not None and (source_file(known), known.__qualname__) != (source_file(cls), cls.__qualname__):
            raise RegistryError(
                f"register({name!r}): the name belongs to {known.__qualname__} of {source_file(known)}; choose another"
            )
        _REGISTRY[name] = cls
        cls.registered_name = name
        return cls

    return add


def get(name: str) -> type[vFlow]:
    """The class registered under a name.

    Raises:
        RegistryError: there is none; the near names are listed.
    """
    if name not in _REGISTRY:
        raise RegistryError(str(UnknownName("vFlow", name, _REGISTRY)))
    return _REGISTRY[name]


def has(name: str) -> bool:
    """Whether a name is registered."""
    return name in _REGISTRY


def list_keys() -> list[str]:
    """Registered names, sorted."""
    return sorted(_REGISTRY)
