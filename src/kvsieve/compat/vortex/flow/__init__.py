"""Flows: base class, registry, loader, and the shipped ones."""

from kvsieve.compat.vortex.flow import algorithms, registry
from kvsieve.compat.vortex.flow.flow import vFlow
from kvsieve.compat.vortex.flow.loader import FlowInitError, FlowLoadError, build_vflow
from kvsieve.compat.vortex.flow.registry import RegistryError, register

__all__ = [
    "FlowInitError",
    "FlowLoadError",
    "RegistryError",
    "algorithms",
    "build_vflow",
    "register",
    "registry",
    "vFlow",
]
