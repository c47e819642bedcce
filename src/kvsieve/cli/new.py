"""``kvsieve new NAME``: a commented, working flow file and its test, to be edited."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path

import typer

from kvsieve.cli.templates import FLOW_FILE, TEST_FILE
from kvsieve.errors import ConfigError
from kvsieve.flow import list_flows

SHADOWED = frozenset({"kvsieve", "torch", "transformers", "pytest", "numpy", "conftest"}) | sys.stdlib_module_names


def new_command(
    name: str = typer.Argument(..., metavar="NAME", help="name of the flow, such as my_flow"),
    directory: Path = typer.Option(Path("."), help="where the two files go"),
) -> None:
    """Write NAME.py, a working flow to edit, and test_NAME.py, which holds it against the reference."""
    module, class_name = names_of(name)
    files = {
        directory / f"{module}.py": fill(FLOW_FILE, module, class_name),
        directory / f"test_{module}.py": fill(TEST_FILE, module, class_name),
    }
    write_all(directory, files)
    flow, test = files
    print(f"wrote {flow} and {test}")
    print(f"run it:  kvsieve generate --flow {flow}:{class_name} --prompt-file TEXT --budget-tokens 128 --compare")
    print(f"test it: python -m pytest {test}")


def names_of(name: str) -> tuple[str, str]:
    """Module and class name: ``my_flow`` and ``MyFlow`` for either of the two.

    Raises:
        ConfigError: no identifier, a word of Python, the name of a module that the file would hide, or a taken name.
    """
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name) or not name.strip("_"):
        raise ConfigError(f"new {name!r}: expected a Python identifier such as my_flow (letters, digits, underscores)")
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")
    class_name = "".join(part[:1].upper() + part[1:] for part in module.split("_"))
    if keyword.iskeyword(module) or not module.isidentifier() or not class_name.isidentifier():
        raise ConfigError(f"new {name!r}: expected a name that gives a module and a class, received one that does not")
    if keyword.iskeyword(class_name) or class_name == "Flow":
        raise ConfigError(f"new {name!r}: the class would be called {class_name}; choose another name")
    if module in SHADOWED or module.startswith("test_"):
        raise ConfigError(
            f"new {name!r}: a file {module}.py would hide another module or be taken for a test; choose another name"
        )
    if module in list_flows():
        raise ConfigError(f"new {name!r}: a flow of this name is registered already; choose another name")
    return module, class_name


def fill(template: str, module: str, class_name: str) -> str:
    """A template with its two names put in."""
    return template.replace("@module@", module).replace("@class@", class_name)


def write_all(directory: Path, files: dict[Path, str]) -> None:
    """Write all files or none; existing ones are never replaced.

    Raises:
        ConfigError: the directory does not exist, a file exists, or cannot be written.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--directory {directory}: expected an existing directory, received a file; name another")
    if not directory.is_dir():
        raise ConfigError(f"--directory {directory}: expected an existing directory, received none; make it first")
    written: list[Path] = []
    try:
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise ConfigError(
                f"{error.filename} exists: nothing was written; choose another name or directory"
            ) from None
        raise ConfigError(f"cannot write to {directory}: {error.strerror or error}; nothing was written") from error
