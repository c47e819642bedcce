"""Builds the CPU kernels for this machine with its own C++ compiler, once, and loads them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvsieve.cache import cache_dir
from kvsieve.errors import ConfigError, KvsieveError

SOURCES = Path(__file__).parent
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-fvisibility=hidden"),
    *("-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi"),
)


@functools.cache
def load_kernels() -> ctypes.CDLL:
    """The kernels of this machine, built at first use into ``$KVSIEVE_CACHE/native``.

    Raises:
        ConfigError: there is no C++ compiler.
        KvsieveError: it cannot compile them.
    """
    tool = compiler()
    path = cache_dir() / "native" / f"kernels-{_fingerprint(tool)}.so"
    if not path.exists():
        _build(tool, path)
    return ctypes.CDLL(str(path))


def compiler() -> str:
    """The C++ compiler that torch.compile uses as well: ``$CXX``, or g++ (clang++ on macOS).

    Raises:
        ConfigError: there is none.
    """
    wanted = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    found = shutil.which(wanted)
    if found is None:
        raise ConfigError(
            f"backend compiled: expected a C++ compiler on PATH, as torch.compile needs one on a CPU, received no "
            f"{wanted!r}; install one (Debian, Ubuntu: apt install g++), name another in CXX, or use backend 'eager'"
        )
    return found


def _build(tool: str, path: Path) -> None:
    """Compile into a file of its own and move it into place: processes that build at once do not meet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target = Path(folder) / path.name
        command = [tool, *FLAGS, str(SOURCES / "kernels.cpp"), "-o", str(target)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            reason = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip())
            raise KvsieveError(
                f"backend compiled: {tool} cannot compile the CPU kernels ({reason}); expected GCC 9 or Clang 10 or "
                "newer with OpenMP; name another compiler in CXX, or use backend 'eager'"
            )
        target.replace(path)


def _fingerprint(tool: str) -> str:
    """Sources, flags, compiler and CPU: a home directory may be shared by different machines."""
    content = b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".h", ".cpp"))
    size = Path(tool).resolve().stat().st_size
    words = "\0".join([*FLAGS, tool, str(size), platform.machine(), _cpu()])
    return hashlib.sha256(content + words.encode()).hexdigest()[:16]


def _cpu() -> str:
    """What distinguishes CPUs for ``-march=native``: model and instruction sets, where the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(next((line for line in lines if line.startswith(name)), "") for name in names)
