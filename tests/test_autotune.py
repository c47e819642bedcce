"""Tilings that are tried: every one computes the same, the fastest is kept, in memory and in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from generated_world import World, forms, make_world
from kvsieve.backends import get_backend
from kvsieve.backends.triton.generate import autotune, generate_score, generate_summarize, tuning
from kvsieve.backends.triton.generate.program import ScoreProgram
from kvsieve.backends.triton.launch import INTERPRETED
from kvsieve.bench import Setting
from kvsieve.bench.gpu import GraphClock, tune_kernels
from kvsieve.bench.stack import Stack
from kvsieve.budget import Budget
from kvsieve.cli import main
from kvsieve.errors import ConfigError
from kvsieve.flow import Flow, build_flow
from kvsieve.graph import Geometry, trace_flow
from test_generate_flows import Scan

DEVICE = "cpu" if INTERPRETED else "cuda"
WIDTHS = (70, 3, 33)


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_path", lambda: tmp_path / "deep" / autotune.FILE)
    monkeypatch.setattr(autotune, "INTERPRETED", False)  # look into the file, as on a GPU
    autotune._stored.cache_clear()


def prepared(flow: Flow, page: int, dtype: torch.dtype = torch.float32) -> tuple[World, ScoreProgram]:
    graphs = trace_flow(flow, Geometry(page, 16, 16, 3))
    world = make_world(graphs, WIDTHS, 2, dtype, device=DEVICE)
    if graphs.summarize is not None:
        generate_summarize(graphs).run(world.pool, world.blocks())
    return world, generate_score(graphs)


def scored(world: World, program: ScoreProgram) -> Callable[[], torch.Tensor]:
    """The scores of all windows, from the same state every time."""
    before = {name: field.clone() for name, field in world.pool.state.items()}

    def run() -> torch.Tensor:
        for name, field in before.items():
            world.pool.state[name].copy_(field)
        scores = program.run(world.q, world.pool, world.window)
        return torch.cat([scores[i, :, :width] for i, width in enumerate(WIDTHS)], 1)

    return run


@pytest.mark.parametrize(
    ("flow", "page", "dtype"),
    [
        (build_flow("gqa_quest_sparse_attention"), 5, torch.float16),
        (build_flow("h2o"), 5, torch.float32),
        (Scan(), 3, torch.float32),
    ],
    ids=["tensor cores", "stages", "scan"],
)
def test_every_tiling_computes_the_same(flow: Flow, page: int, dtype: torch.dtype) -> None:
    world, program = prepared(flow, page, dtype)
    for form in forms(program):
        run = scored(world, form)
        want, seen = run(), set()

        def clock(form: ScoreProgram = form, run: Any = run, want: torch.Tensor = want, seen: Any = seen) -> float:
            assert torch.allclose(run(), want, rtol=1e-5, atol=1e-5)
            (built,) = (one for one in form._built.values() if one.tuned)
            seen.add(next(iter(built.tuned.values())))
            return 1.0

        tuned = form.tune(world.q, world.pool, world.window, clock)
        assert len(seen) == tuned.tried > len(tuned.by_rule) and tuned.best == tuned.by_rule


@pytest.mark.parametrize(("width", "whole"), [(64, True), (65, False)])
def test_the_form_that_runs_is_tuned(width: int, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that hold whole windows, up to the longest that they can: what is reserved is two pages longer."""
    monkeypatch.setattr(tuning, "WHOLE", 66 * 4)
    graphs = trace_flow(build_flow("h2o"), Geometry(5, 16, 16, 3))
    world = make_world(graphs, (width, 3), 2, device=DEVICE)
    generate_summarize(graphs).run(world.pool, world.blocks())
    program = generate_score(graphs)
    assert program.whole is not None and program.whole.longest == 66
    tried = []

    def seconds() -> float:
        (built,) = (one for form in (program, program.whole) for one in form._built.values() if one.tuned)
        tried.append(next(iter(built.tuned.values()))[-1])
        return 1.0

    program.tune(world.q, world.pool, world.window, seconds)
    scores = program.run(world.q, world.pool, world.window)
    assert len({one.warps for one in tried}) > 1, "the last stage is tuned, too"
    tuned = {form: any(one.tuned for one in form._built.values()) for form in (program, program.whole)}
    assert tuned == {program: not whole, program.whole: whole}
    sizes = {rows[-1][0] for rows in json.loads(autotune._path().read_text()).values()}
    assert sizes == {tuning.WHOLE_PAGES} or not whole
    for form in forms(program):
        alike = form.run(world.q, world.pool, world.window)
        for request, pages in enumerate((width, 3)):
            assert torch.allclose(scores[request, :, :pages], alike[request, :, :pages], rtol=1e-5, atol=1e-6)


def test_the_fastest_is_kept_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    world, program = prepared(build_flow("block_sparse_attention"), 5)
    run = scored(world, program)
    want = run()

    def seconds() -> float | None:
        (built,) = (one for one in program._built.values() if one.tuned)
        ((tile,),) = built.tuned.values()
        return None if tile.pages < built.tilings[0].pages else 1 / (tile.pages * tile.warps)

    tuned = program.tune(world.q, world.pool, world.window, seconds)
    pages, warps = tuned.by_rule[0][:2]
    most = min(2 * warps, autotune.MOST_WARPS)
    assert tuned.best[0][:2] == (2 * pages, most) and tuned.seconds == tuned.by_rule_seconds * warps / (2 * most)
    assert torch.allclose(run(), want, rtol=1e-5, atol=1e-5)
    # another process finds it in the file, for about as many pages only
    autotune._stored.cache_clear()
    _, fresh = prepared(build_flow("block_sparse_attention"), 5)
    built = fresh.built(fresh._variant(world.q, world.pool))
    total = len(WIDTHS) * world.window.width
    where = world.pool.device
    kept = autotune.kept_tilings(built, 2, where, total)
    assert kept is not None and kept[0].pages == 2 * pages
    assert autotune.kept_tilings(built, 2, where, 16 * total) is None
    _, other = prepared(build_flow("block_sparse_attention"), 5)
    assert autotune.kept_tilings(other.built(other._variant(world.q, world.pool)), 1, where, total) is None


@pytest.mark.parametrize("text", ["", "[]", '{"a": 3}', '{"a": [[1, "x"]]}'])
def test_a_file_that_holds_something_else_is_ignored_and_replaced(text: str) -> None:
    path = autotune._path()
    path.parent.mkdir()
    path.write_text(text)
    world, program = prepared(build_flow("block_sparse_attention"), 5)
    program.tune(world.q, world.pool, world.window, lambda: 1.0)
    assert [len(rows) for rows in json.loads(path.read_text()).values()] == [1]
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("rows", [[[8, 4, 2]], [[0, 4, 2, 1]], [[9, 4, 2, 1]], [[8, 4, 2, 1]] * 2, []])
def test_what_is_no_tiling_of_the_kernels_is_ignored(rows: list[list[int]]) -> None:
    world, program = prepared(build_flow("block_sparse_attention"), 5)
    program.tune(world.q, world.pool, world.window, lambda: 1.0)
    path = autotune._path()
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), rows)))
    autotune._stored.cache_clear()
    world, fresh = prepared(build_flow("block_sparse_attention"), 5)
    assert torch.equal(scored(world, fresh)(), scored(world, program)())
    (built,) = (one for one in fresh._built.values() if one.tuned)
    assert list(built.tuned.values()) == [None]


def test_what_others_kept_meanwhile_stays() -> None:
    world, program = prepared(build_flow("block_sparse_attention"), 5)
    program.tune(world.q, world.pool, world.window, lambda: 1.0)
    path = autotune._path()
    path.write_text(json.dumps({**json.loads(path.read_text()), "theirs": [[8, 4, 2, 1]]}))
    program.tune(world.q, world.pool, world.window, lambda: 1.0)
    assert len(json.loads(path.read_text())) == 2


def test_a_trial_that_breaks_off_leaves_the_best_so_far() -> None:
    world, program = prepared(build_flow("block_sparse_attention"), 5)
    times = iter([1.0, 2.0])
    with pytest.raises(StopIteration):
        program.tune(world.q, world.pool, world.window, lambda: next(times))
    (built,) = (one for one in program._built.values() if one.tuned)
    assert list(built.tuned.values()) == [tuple(built.tilings)] and not autotune._path().exists()


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(autotune, "_path", lambda: tmp_path / "file" / autotune.FILE)
    world, program = prepared(build_flow("block_sparse_attention"), 5)
    with pytest.raises(ConfigError, match=r"expected a cache that can be written.*set KVSIEVE_CACHE"):
        program.tune(world.q, world.pool, world.window, lambda: 1.0)


def test_bench_times_the_phases_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tilings that do not fit are passed over, other errors are not; a phase that a step lacks is left out."""
    setting = Setting(backend="triton", device=DEVICE, query_heads=2, kv_heads=1, head_dim=16, page_size=4,
                      budget=Budget(2, 1, 1), dtype=torch.float32, layers=1)  # fmt: skip
    calls: list[float] = []

    def chain(clock: GraphClock, run: Callable[[int], object]) -> tuple[float, float]:
        run(0)
        calls.append(1 / (1 + len(calls)))
        if len(calls) == 2:
            raise RuntimeError("out of resource: shared memory")
        return calls[-1], calls[-1]

    monkeypatch.setattr(GraphClock, "chain", chain)
    stack = Stack(build_flow("block_sparse_attention"), setting, 40)
    assert [one.phase for one in tune_kernels(stack)] == ["summarize", "score"] and len(calls) > 10
    short = Stack(build_flow("block_sparse_attention"), setting, 7)
    assert "summarize" not in short.phases() and tune_kernels(short) == ()
    monkeypatch.setattr(GraphClock, "chain", lambda clock, run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tune_kernels(stack)


def test_what_no_gpu_can_hold_is_not_kept() -> None:
    world, program = prepared(build_flow("block_sparse_attention"), 5)
    tuned = program.tune(world.q, world.pool, world.window, lambda: None)
    assert tuned.best == tuned.by_rule and not autotune._path().exists()


def test_backends_without_tilings_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="expected backend triton, whose kernels have tilings, received eager"):
        get_backend("eager").tune(None, *[torch.zeros(1)] * 2, None, torch.zeros(1), lambda phase: 1.0)  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--tune"])
    assert stop.value.code == 2 and "--tune: expected a GPU (--device cuda), received cpu" in capsys.readouterr().err
