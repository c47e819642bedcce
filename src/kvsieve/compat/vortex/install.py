"""``import vortex_torch...`` resolves to this layer, in this process."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types
from importlib.machinery import ModuleSpec

from kvsieve.errors import ConfigError

LAYER = "kvsieve.compat.vortex"
PACKAGES = ("abs", "utils", "indexer", "cache", "flow")
"""What ``vortex_torch`` consists of; each is a module of the same name here."""
EXTENSION = "vortex_torch_C"
_MARK = "__kvsieve_layer__"


def install() -> None:
    """Make ``vortex_torch``, its sub-modules and ``vortex_torch_C`` importable; a second call changes nothing.

    Modules are shared, not copied: ``vortex_torch.indexer`` is this layer's ``indexer``. Nothing is written to disk.

    Raises:
        ConfigError: another vortex_torch is already imported.
    """
    present = sys.modules.get("vortex_torch")
    if present is not None and hasattr(present, _MARK):
        return
    foreign = [name for name in ("vortex_torch", EXTENSION) if name in sys.modules]
    if foreign:
        where = getattr(sys.modules[foreign[0]], "__file__", None)
        raise ConfigError(
            f"{foreign[0]}: expected a process that has not imported it, received one that has"
            f"{f' ({where})' if where else ''}; call kvsieve.compat.vortex.install() before the first import of "
            "vortex_torch, or run the script with python -m kvsieve.compat.vortex SCRIPT"
        )
    modules = {f"vortex_torch.{name}": importlib.import_module(f"{LAYER}.{name}") for name in _module_names()}
    modules["vortex_torch"] = _root({name: modules[f"vortex_torch.{name}"] for name in PACKAGES})
    modules[EXTENSION] = importlib.import_module(f"{LAYER}.extension")
    sys.modules.update(modules)


def _root(packages: dict[str, types.ModuleType]) -> types.ModuleType:
    """The package ``vortex_torch`` itself, which exists in memory only."""
    root = types.ModuleType("vortex_torch", "vortex_torch, as run by kvsieve.compat.vortex.")
    root.__spec__ = ModuleSpec("vortex_torch", None, is_package=True)
    root.__path__ = []
    vars(root).update(packages)
    setattr(root, _MARK, True)
    return root


def _module_names() -> list[str]:
    names = []
    for name in PACKAGES:
        module = importlib.import_module(f"{LAYER}.{name}")
        names.append(name)
        if hasattr(module, "__path__"):
            found = pkgutil.walk_packages(module.__path__, f"{LAYER}.{name}.")
            names += [one.name.removeprefix(f"{LAYER}.") for one in found]
    return names
