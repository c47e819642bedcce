"""A user's mistake is answered in one readable line: the flow's file and the offending line, op, shapes, remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import wrong_pages
import wrong_python
import wrong_results
from kvsieve.budget import Budget
from kvsieve.errors import ConfigError, FlowError, UnknownName
from kvsieve.flow import Flow, build_flow, check_flow, list_flows, load_flow, register
from kvsieve.graph import Geometry, trace_flow
from wrong_flow import CASES, marked_line

GEOMETRY = Geometry(page_size=5, head_dim=8, v_head_dim=6, group=3)
MODULES = wrong_pages, wrong_python, wrong_results


def assert_readable(message: str) -> None:
    """One line, no jargon of the tracer, no doubled full stops."""
    assert "\n" not in message and ".." not in message.replace("...", "")
    for jargon in ("FakeTensor(", "SymInt", "Traceback", "s0", "aten::", "torch._dynamo", "OpOverload"):
        assert jargon not in message, message


@pytest.mark.parametrize("name", CASES)
def test_wrong_flow(name: str, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    cls, says = CASES[name]
    with pytest.raises(FlowError) as caught:
        trace_flow(cls(), GEOMETRY)
    error, message = caught.value, str(caught.value)
    assert error.location is not None
    assert (error.location.file, error.location.line) == marked_line(cls), message
    assert message.startswith(f"{error.location.file}:{error.location.line}: {name}.")
    assert [part for part in says if part not in message] == [], message
    assert "Remedy: " in message
    assert_readable(message)
    assert capfd.readouterr() == ("", "") and not recwarn.list, "the error is all that the user sees"


def test_there_are_many() -> None:
    assert len(CASES) >= 35
    assert {cls.__module__ for cls, _ in CASES.values()} == {module.__name__ for module in MODULES}


# Registering, loading, building


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr("kvsieve.flow._REGISTRY", dict(list_flows()))


class Tunable(Flow):
    """With constructor arguments."""

    def __init__(self, weight: float, peak: float = 1.0) -> None:
        if not 0 <= peak <= 1:
            raise ValueError(f"peak: expected a number in [0, 1], received {peak}")
        self.weight, self.peak = weight, peak


class Paged(Flow):
    """Requires a page size."""

    page_size = 1

    def score(self, q, pages):
        return pages["age"]


class Unscored(Flow):
    """Sink and recent only."""


def user_file(folder: Path, text: str) -> str:
    path = folder / "user_flow.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import torch\n\nclass Mine(Flow:\n    pass\n", (":3", "SyntaxError")),
        ("import torch\nfrom torch import no_such_thing\n", (":2", "ImportError", "no_such_thing")),
        ("import no_such_module\n", (":1", "ModuleNotFoundError")),
        ("def f():\n    return 1 / 0\n\n\nf()\n", (":2", "ZeroDivisionError")),
    ],
)
def test_file_that_does_not_import(tmp_path: Path, text: str, says: tuple[str, ...]) -> None:
    path = user_file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_flow(f"{path}:Mine")
    message = str(caught.value)
    assert f"{path}{says[0]}" in message and all(part in message for part in says)
    assert_readable(message)


MINE = """from kvsieve.flow import Flow, register


@register("wrong_flows_{name}")
class Mine(Flow):
    def score(self, q, pages):
        return pages["k"].reshape(-1)
"""


def test_error_of_a_loaded_file_names_the_file_and_line(tmp_path: Path) -> None:
    path = user_file(tmp_path, MINE.format(name="loaded"))
    with pytest.raises(FlowError) as caught:
        trace_flow(load_flow(f"{path}:Mine"), GEOMETRY)
    assert str(caught.value).startswith(f"{path}:7: Mine.score: op reshape folds the page axis of [W, 5, 8]")


def _load_missing_class(folder: Path) -> object:
    return load_flow(user_file(folder, MINE.format(name="missing")) + ":Mein")


def _two_classes_under_one_name(folder: Path) -> object:
    class First(Flow): ...

    class Second(Flow): ...

    register("wrong_flows_twice")(First)
    return register("wrong_flows_twice")(Second)


REFUSED: dict[str, tuple[Callable[[Path], object], type[ConfigError], tuple[str, ...]]] = {
    "missing class": (_load_missing_class, UnknownName, ("'Mein'", "did you mean Mine?")),
    "missing file": (lambda _: load_flow("no/such.py:Mine"), ConfigError, ("no/such.py", "no such file")),
    "directory": (lambda _: load_flow("tests:Mine"), ConfigError, ("flow file 'tests'", "a directory", "file.py:")),
    "no class named": (lambda _: load_flow("some.py"), ConfigError, ("some.py", "expected file.py:ClassName")),
    "unknown name": (lambda _: build_flow("gqa_qest"), UnknownName, ("did you mean gqa_quest_sparse_attention",)),
    "one name twice": (_two_classes_under_one_name, ConfigError, ("First", "Second", "choose another name")),
    "not a flow": (lambda _: register("wrong_flows_dict")(dict), ConfigError, ("expected a subclass of Flow",)),
    "an instance": (lambda _: register("wrong_flows_it")(Unscored()), ConfigError, ("expected a subclass of Flow",)),
    "unknown argument": (
        lambda _: build_flow("wrong_flows_tunable", weight=1.0, pick=2),
        ConfigError,
        ("pick", "its arguments are (weight: float, peak: float = 1.0)"),
    ),
    "missing argument": (lambda _: build_flow("wrong_flows_tunable"), ConfigError, ("missing", "'weight'")),
    "NaN": (
        lambda _: build_flow("wrong_flows_tunable", weight=math.nan),
        ConfigError,
        ("weight: expected a number, received NaN",),
    ),
    "refused value": (
        lambda _: build_flow("wrong_flows_tunable", weight=1.0, peak=2.0),
        ConfigError,
        ("peak: expected a number in [0, 1], received 2.0",),
    ),
    "page size": (
        lambda _: check_flow(Paged(), 16, Budget(topk=2)),
        ConfigError,
        ("Paged requires page_size 1, received 16",),
    ),
    "no page size": (lambda _: check_flow(Paged(), 0, Budget(topk=2)), ConfigError, ("expected an integer >= 1",)),
    "topk without score": (
        lambda _: check_flow(Unscored(), 16, Budget(topk=2)),
        ConfigError,
        ("Unscored has no score", "expected topk=0", "give these pages to recent"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    register("wrong_flows_tunable")(Tunable)
    action, kind, says = REFUSED[case]
    with pytest.raises(kind) as caught:
        action(tmp_path)
    message = str(caught.value)
    assert [part for part in says if part not in message] == [], message
    assert_readable(message)


def test_what_is_refused_is_not_registered() -> None:
    with pytest.raises(ConfigError):
        register("wrong_flows_dict")(dict)
    with pytest.raises(UnknownName):
        build_flow("wrong_flows_dict")


def test_a_flow_is_left_as_it_was() -> None:
    cls, _ = CASES["CountsCalls"]
    flow = cls()
    with pytest.raises(FlowError):
        trace_flow(flow, GEOMETRY)
    assert vars(flow) == {"calls": 0}
    assert torch.get_default_dtype() is torch.float32


# Names that are nearly right


class Scores(wrong_python.Means):
    def scores(self, q, pages):
        return pages["mean"] @ q.mean(0)


class Summarise(Flow):
    def summarise(self, k, v):
        return {"mean": k.mean(0)}

    def score(self, q, pages):
        return pages["age"]


class Helpers(Flow):
    """Helpers whose names only resemble."""

    def summary(self, k):
        return k.mean(0)

    def scored(self, pages):
        return pages["age"]

    def score(self, q, pages):
        return self.scored(pages)


@pytest.mark.parametrize(
    ("cls", "name", "wanted"), [(Scores, "scores", "score"), (Summarise, "summarise", "summarize")]
)
def test_a_method_that_nobody_would_call_is_refused(cls: type[Flow], name: str, wanted: str) -> None:
    with pytest.raises(FlowError) as caught:
        check_flow(cls(), 5, Budget(0))
    message = str(caught.value)
    line = getattr(cls, name).__code__.co_firstlineno
    assert message.startswith(
        f"{Path(__file__)}:{line}: {cls.__name__}.{name}: is never called: a flow without {wanted} "
    )
    assert f"rename {name} to {wanted}" in message
    assert_readable(message)


def test_helpers_with_names_of_their_own_are_none() -> None:
    check_flow(Helpers(), 5, Budget(3))
    check_flow(build_flow("streaming_llm"), 5, Budget(0))


WRONG_MASS = """from kvsieve import Flow, AttentionMass
class A(Flow):
    mass = AttentionMass(decay=2)
"""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (WRONG_MASS, "flow.py:3: AttentionMass(decay=): expected"),
        ("class A:\n    pass\n", "expected a subclass of kvsieve.Flow defined there, received a class of another kind"),
        ("A = 3\n", "received no class"),
        ("", "found none; kvsieve new NAME writes one"),
        ("x = 1\nx.y\n", "flow.py:2 does not import: AttributeError"),
    ],
)
def test_a_file_without_the_flow_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flow.py").write_text(source)
    for path in (Path("flow.py"), tmp_path / "flow.py"):
        with pytest.raises(ConfigError, match=re.escape(says)) as caught:
            load_flow(f"{path}:A")
        assert_readable(str(caught.value))
