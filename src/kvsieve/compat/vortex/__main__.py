"""``python -m kvsieve.compat.vortex SCRIPT [ARGS]``: run a script that imports vortex_torch."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from kvsieve.compat.vortex import install
from kvsieve.errors import KvsieveError

USAGE = "usage: python -m kvsieve.compat.vortex SCRIPT [ARGS]\n\nRuns SCRIPT with `import vortex_torch` resolving here."


def main(arguments: list[str]) -> int:
    """Run a script as ``__main__`` with its own arguments and directory; its exit code is kept.

    Returns 2 if there is no such script; what the script raises, SystemExit included, is raised on.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    script = Path(arguments[0])
    if not script.is_file():
        print(
            f"kvsieve.compat.vortex: {arguments[0]}: no such script; expected a Python file, then its arguments",
            file=sys.stderr,
        )
        return 2
    try:
        install()
    except KvsieveError as error:
        print(f"kvsieve.compat.vortex: {error}", file=sys.stderr)
        return 2
    sys.argv = list(arguments)
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
