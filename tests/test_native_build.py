"""The C++ kernels of the compiled backend where they cannot be built, and where they are built already."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvsieve.backends.compiled import build
from kvsieve.budget import Budget
from kvsieve.errors import ConfigError, KvsieveError
from kvsieve.runtime import Runtime
from test_compiled import run_steps

# Without a compiler


@pytest.fixture
def fresh_build(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[None]:
    monkeypatch.setenv("KVSIEVE_CACHE", str(tmp_path))
    build.load_kernels.cache_clear()
    yield
    build.load_kernels.cache_clear()


def test_missing_compiler_is_one_clear_error(fresh_build: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    runtime = Runtime("gqa_quest_sparse_attention", Budget(1, 1, 1), page_size=4, backend="compiled")
    with pytest.raises(ConfigError, match=r"expected a C\+\+ compiler.*received no 'g\+\+'.*apt install.*'eager'"):
        run_steps(runtime, [15], 1)


def test_compiler_that_fails_is_one_clear_error(fresh_build: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(KvsieveError, match="false cannot compile the CPU kernels"):
        build.load_kernels()


def test_kernels_are_built_once(fresh_build: None, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    build.load_kernels()
    (kernels,) = (tmp_path / "native").iterdir()
    build.load_kernels.cache_clear()
    monkeypatch.setattr(build, "_build", lambda *arguments: pytest.fail("built again"))
    build.load_kernels()
    assert kernels.suffix == ".so"
