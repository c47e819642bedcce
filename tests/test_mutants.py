"""The checks find deliberate faults; what is refused, not finite, or right is not counted as found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvsieve.backends import attention
from kvsieve.cli.app import run
from kvsieve.verify.mutants import MUTANTS, Mutant
from kvsieve.verify.mutants import hunt as hunting
from kvsieve.verify.mutants.base import LIFE_CYCLE
from kvsieve.verify.mutants.hunt import Hunt, Stage, hunt, hunt_all, stages
from kvsieve.verify.mutants.report import as_json, passed, text

QUICK = (
    "state is summed over the batch",
    "softmax over the pages sees the padding",
    "one page set serves all KV heads",
    "the newest token is not visible",
    "steps drop soft-cap",
    "a shared partial page is written in place",
    "a fork shares the state rows of its source",
    "a request is resumed into the wrong blocks",
    "prompt queries see later tokens",
    "rebasing leaves the last page out",
    "a preempted request forgets the queries that do not count yet",
    "a window keeps no queries for a crop",
)


@pytest.mark.parametrize("name", QUICK)
def test_a_mutant_is_killed(name: str) -> None:
    found = hunt(MUTANTS[name])
    assert found.killed and found.counted, found
    assert found.stage and found.message


def test_the_table_covers_the_published_bugs() -> None:
    rows = {mutant.row for mutant in MUTANTS.values()} - {None}
    # 35: speed.
    assert rows == set(range(1, 36)) - {35}
    assert len(MUTANTS) >= 45 and all(name == mutant.name for name, mutant in MUTANTS.items())


def test_patches_leave_nothing_behind() -> None:
    for mutant in MUTANTS.values():
        if isinstance(mutant.owner, str):
            continue
        before = getattr(mutant.owner, mutant.attribute)
        with mutant.applied():
            assert getattr(mutant.owner, mutant.attribute) is not before
        assert getattr(mutant.owner, mutant.attribute) is before


def few(mutant: Mutant) -> Iterator[Stage]:
    """The cheapest check and one that compares scores."""
    wanted = ("under budget / gqa_quest", "unselected NaN / gqa_quest")
    return (stage for stage in stages(replace(mutant, part="step")) if stage.name.startswith(wanted))


def _attend_tokens(change: Any) -> Mutant:
    def factory(original: Any) -> Any:
        return lambda *arguments: change(*original(*arguments))

    return Mutant("made up", None, attention, "attend_tokens", factory)


def _refused(*results: Any) -> Any:
    raise IndexError("out of range")


def test_what_is_right_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunting, "stages", few)
    found = hunt(_attend_tokens(lambda *results: results))
    assert not found.killed and found.counted


def test_an_exception_of_the_program_itself_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunting, "stages", few)
    found = hunt(_attend_tokens(_refused))
    assert not found.counted and found.raised == "IndexError: out of range"


def test_an_output_that_is_not_finite_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunting, "stages", few)
    found = hunt(_attend_tokens(lambda out, lse, mass: (out * float("nan"), lse, mass)))
    assert found.killed and not found.finite and not found.counted


def test_garbage_that_happens_to_be_nan_is_counted_where_it_is_finite_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hunting, "stages", few)
    found = hunt(MUTANTS["the partial page is read to its end"])
    assert found.killed and found.counted


def hunts(survivors: int) -> list[Hunt]:
    names = [name for name, mutant in MUTANTS.items() if not mutant.survives][:20]
    dead = [Hunt(name, 0.1, "a check", "output", "wrong") for name in names[survivors:]]
    return [Hunt(name, 0.1) for name in names[:survivors]] + dead


def test_the_verdict() -> None:
    explained = next((name for name, mutant in MUTANTS.items() if mutant.survives), None)
    assert passed(hunts(0)) and text(hunts(0)).endswith("\nkilled 20 of 20")
    assert not passed(hunts(1))  # 95 %, but nobody says why
    assert "a check is missing" in text(hunts(1))
    assert explained is not None
    assert passed([*hunts(0), Hunt(explained, 0.1)])
    refused = Hunt(MUTANTS[explained].name, 0.1, raised="IndexError: x")
    assert text([*hunts(0), refused]).endswith("killed 20 of 20") and "refused by the stack" in text([refused])
    assert as_json(hunts(1))["killed"] == 19


@pytest.mark.slow
def test_all_mutants() -> None:
    found = hunt_all(jobs=2)
    assert passed(found), text(found)
    for one in found:
        if MUTANTS[one.mutant].part == LIFE_CYCLE and one.counted and not MUTANTS[one.mutant].survives:
            assert one.seconds < 60, text([one])


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kvsieve.cli.mutants.hunt_all", lambda names, jobs, progress: hunts(0))
    assert run(["verify", "--mutants", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counted"] == 20
    monkeypatch.setattr("kvsieve.cli.mutants.hunt_all", lambda names, jobs, progress: hunts(1))
    assert run(["verify", "--mutants"]) == 1
    assert capsys.readouterr().out.rstrip().endswith("killed 19 of 20")
