"""The shape of the house: who may import whom, and how long a file may be."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import kvsieve.flow

ROOT = Path(kvsieve.flow.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# From the bottom up: a module imports from its own row and the rows above it in this list, never from those below.
LAYERS = (
    {"errors", "dtypes", "cache", "version", "workers", "outputs"},
    {"budget", "mass", "retention", "flow_file", "flow_names", "budget_text"},
    {"flow"},
    {"flows"},
    {"reference"},
    {"ops", "tracing", "segment", "graph", "lower", "maxpool", "watch", "repeat"},
    {"paging"},
    {"window", "plan", "stepplan"},
    {"backends"},
    {"layers"},
    {"call"},
    {"runtime", "runtime_arguments"},
    {"stepgraph"},
    {"models", "smollm2", "verify", "evaluate", "bench", "integrations", "compat"},
    {"cli"},
)
SPECIFICATION = {"kvsieve.flow", "kvsieve.budget", "kvsieve.retention", "kvsieve.errors"}


def module_name(path: Path) -> str:
    return ".".join(("kvsieve", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Modules that a file imports, as written; relative imports are not used in this project."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            found.add(node.module)
            if node.module == "kvsieve":
                found.update(f"kvsieve.{alias.name}" for alias in node.names)
    return found


def layer_of(module: str) -> int | None:
    """Row of a kvsieve module; None for the package itself and for what is not kvsieve."""
    parts = module.split(".")
    if parts[0] != "kvsieve" or len(parts) < 2:
        return None
    for row, names in enumerate(LAYERS):
        if parts[1] in names:
            return row
    return None


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_dependencies_point_downward(path: Path) -> None:
    own = module_name(path)
    if own in ("kvsieve", "kvsieve.__main__"):
        return  # the public names, and the program
    row = layer_of(own)
    assert row is not None, f"{own} has no place in the layering: give it one in this test"
    for module in imports(path):
        other = layer_of(module)
        # list_flows imports the shipped flows when it is asked for them.
        if other is not None and (own, module) != ("kvsieve.flow", "kvsieve.flows"):
            assert other <= row, f"{own} imports {module}"
        assert module != "kvsieve", f"{own} imports the package's public names"


def test_the_specification_stands_alone() -> None:
    """The reference knows torch, flows and budgets: no pools, no batches, no backends."""
    strange = {module for module in imports(ROOT / "reference.py") if module not in SPECIFICATION}
    assert not {module for module in strange if module.split(".")[0] not in sys.stdlib_module_names | {"torch"}}


def test_backends_do_not_know_each_other() -> None:
    """A backend builds on the interface and on shared numerics, never on another backend."""
    shared = {"kvsieve.backends.base", "kvsieve.backends.select", "kvsieve.backends.attention"}
    for path in (ROOT / "backends").rglob("*.py"):
        if path.name != "__init__.py":
            used = {module for module in imports(path) if module.startswith("kvsieve.backends")}
            package = (
                ".".join(module_name(path).split(".")[:3]) if path.parent.name != "backends" else "kvsieve.backends"
            )
            own = {module for module in used if package != "kvsieve.backends" and module.startswith(f"{package}.")}
            assert used <= shared | own | {package}, path


def test_integrations_are_optional() -> None:
    """Nothing below the integrations needs transformers, and one backend alone needs triton; the core runs without."""
    for path in FILES:
        if "integrations" not in path.parts:
            heavy = {module.split(".")[0] for module in imports(path, top_level_only=True)}
            allowed = {"triton"} if path.is_relative_to(ROOT / "backends" / "triton") else set()
            assert not heavy & {"transformers", "vllm", "triton"} - allowed, path


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_most_files_are_very_short() -> None:
    lengths = sorted(len(path.read_text().splitlines()) for path in FILES)
    assert lengths[len(lengths) // 2] <= 120
