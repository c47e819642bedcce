"""The command line without a model: values, errors, generated files."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvsieve
from kvsieve.budget import Budget
from kvsieve.cli import main
from kvsieve.cli.files import check_output
from kvsieve.cli.generation import Parting, find_parting
from kvsieve.cli.options import (
    choose_budget,
    choose_retention,
    note_budget,
    parse_flow_arguments,
    parse_layers,
    read_text,
)
from kvsieve.errors import ConfigError
from kvsieve.flow import build_flow, choose_page_size, list_flows, load_flow
from kvsieve.retention import Evict, Keep

QUEST, TOKEN = "gqa_quest_sparse_attention", "h2o_token_sparse_attention"
EVICT = ("generate", "--prompt", "x", "--retention", "evict", "--flow")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return int(exit_.value.code or 0)


def flows_json(capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    assert run("flows", "--json") == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["flows"]}


def test_flows_json_counts_bytes_by_hand(capsys):
    rows = flows_json(capsys)
    assert sorted(rows) == sorted(list_flows())
    dense = 32_768 * 2 * 128 * 2
    window = 2048 - 1 - 2
    quest = rows[QUEST]
    assert quest["summary"] == {"k_max": "[128]", "k_min": "[128]"}
    assert quest["state"] == {} and quest["page_size"] is None
    assert quest["relative_bytes"] == pytest.approx((1024 * 512 + window * 2 * 128 * 2) / dense)
    assert rows["streaming_llm"]["relative_bytes"] == pytest.approx(1024 / 32_768)
    token = rows[TOKEN]
    assert token["page_size"] == 1 and len(token["state"]) == 1
    window = 32_768 - 4 - 32
    assert token["relative_bytes"] == pytest.approx((1024 * 512 + window * (128 * 2 + 2 * 4)) / dense)
    assert {row["backends"]["eager"] for row in rows.values()} == {"generated"}


def test_flows_markdown_and_terminal_say_what_json_says(capsys):
    rows = flows_json(capsys)
    assert run("flows", "--markdown") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(rows)
    assert run("flows") == 0
    shown = capsys.readouterr().out
    for line in lines[2:]:
        name, page, summary, state, cost, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        row = rows[name]
        assert page == str(row["page_size"] or "any")
        assert summary == (", ".join(f"{key} {value}" for key, value in row["summary"].items()) or "-")
        assert cost == f"{row['relative_bytes']:.1%}"
        assert any({name, page, cost} <= set(line.split()) for line in shown.splitlines())
        assert state in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["flos"], "flows"),
        (["flows", "--jsn"], "--json"),
        (["flows", "--jsn"], "kvsieve flows --help"),
        (["verify", QUEST, "--device", "gpu9"], "--device gpu9"),
        (["verify", "--fuzz", "2", "--device", "gpu9"], "--device gpu9"),
        (["flows", "--json", "--markdown"], "received both"),
        (["generate"], "--flow"),
        (["generate", "--flow", "gqa_quest", "--prompt", "x"], QUEST),
        (["generate", "--flow", QUEST], "received neither"),
        (["generate", "--flow", QUEST, "--prompt", ""], "empty"),
        (["generate", "--flow", QUEST, "--prompt", "x", "--prompt-file", "y"], "received both"),
        (["generate", "--flow", QUEST, "--prompt-file", "/no/such/file"], "No such file"),
        (["generate", "--flow", QUEST, "--prompt", "x", "--flow-arg", "a"], "key=value"),
        (["generate", "--flow", QUEST, "--prompt", "x", "--flow-arg", "a=1"], "'a'"),
        (["generate", "--flow", TOKEN, "--prompt", "x", "--flow-arg", "decay=nan"], "decay"),
        (["generate", "--flow", TOKEN, "--prompt", "x", "--page-size", "4"], "requires page_size 1"),
        (["generate", "--flow", "streaming_llm", "--prompt", "x", "--topk", "3"], "topk=0"),
        (["generate", "--flow", QUEST, "--prompt", "x", "--budget-tokens", "8"], "raise the budget"),
        (["generate", "--flow", QUEST, "--prompt", "x", "--budget-tokens", "8"], "or count pages with --topk"),
        (
            ["generate", "--flow", QUEST, "--prompt", "x", "--budget-tokens", "0"],
            "--budget-tokens: expected an integer",
        ),
        (
            ["generate", "--flow", QUEST, "--prompt", "x", "--topk", "3", "--recent", "0"],
            "--recent: expected an integer",
        ),
        (
            ["generate", "--flow", QUEST, "--prompt", "x", "--topk", "-3"],
            "--topk: expected an integer >= 0, received -3",
        ),
        (["generate", "--flow", QUEST, "--prompt", "x", "--page-size", "0"], "--page-size"),
        (
            ["serve", "m", "--flow", QUEST, "--topk", "3", "--budget-tokens", "99"],
            "received --budget-tokens and --topk",
        ),
        (["serve", "m", "--flow", QUEST, "--budget-tokens", "8", "--print"], "or count pages with --topk"),
        (["serve", "/no/model", "--flow", QUEST, "--topk", "3"], "received /no/model: no directory"),
        (["serve", "m", "--flow", QUEST, "--topk", "3", "--backend", "no"], "kvsieve.backend"),
        (["serve", "m", "--flow", "h2o", "--topk", "3", "--print"], "add --no-enable-prefix-caching"),
        (["serve", "m", "--flow", QUEST, "--sink", "8", "--print"], "needs --topk or --ratio, received only --sink"),
        (["explain", QUEST, "--text", "/dev/null", "--budget", "1.0"], "expected 100% for all of the context"),
        (["generate", "--flow", QUEST, "--prompt", "x", "--budget-tokens", "99", "--topk", "1"], "drop one"),
        (["generate", "--flow", QUEST, "--prompt", "x", "--ratio", "1.5"], "[0, 1]"),
        (["generate", "--flow", QUEST, "--prompt", "x", "--max-new-tokens", "0"], "max-new-tokens"),
        (["generate", "--flow", QUEST, "--prompt", "x", "--dtype", "bf61"], "did you mean bf16"),
        (["generate", "--flow", QUEST, "--prompt", "x", "--device", "gpu9"], "--device gpu9"),
        (["generate", "--flow", QUEST, "--prompt", "x", "--skip-layers", "1-b"], "'1-b'"),
        (["generate", "--flow", QUEST, "--prompt", "x", "--model", "./none"], "no such directory"),
        (["generate", "--flow", "none.py:A", "--prompt", "x"], "no such file"),
        (["generate", "--flow", "h2o", "--prompt", "x", "--retention", "evikt"], "did you mean evict"),
        (["generate", "--flow", "h2o", "--prompt", "x", "--retention", "evict"], "expected --capacity TOKENS"),
        (["generate", "--flow", "h2o", "--prompt", "x", "--capacity", "64"], "expected --retention evict beside it"),
        ([*EVICT, "h2o", "--capacity", "64", "--budget-tokens", "64"], "received --budget-tokens too"),
        ([*EVICT, "h2o", "--capacity", "64", "--topk", "3", "--ratio", "0.5"], "received --ratio, --topk too"),
        ([*EVICT, "h2o", "--capacity", "35"], "at least sink + recent = 36 tokens, received 35"),
        ([*EVICT, "h2o", "--capacity", "64", "--recent", "0"], "Evict(recent=): expected an integer >= 1"),
        ([*EVICT, QUEST, "--capacity", "64"], "use retention Keep() with a budget"),
        ([*EVICT, "streaming_llm", "--capacity", "64", "--recent", "4"], "set recent=60"),
        ([*EVICT, "h2o", "--capacity", "64", "--skip-layers", "0"], "expected no dense layers"),
        ([*EVICT, "h2o", "--capacity", "64", "--flow-arg", "decay=2"], "decay"),
        (["show", QUEST, "--page-size", "0"], ", received '0' (kvsieve show --help"),
        (["show", QUEST, "--page-size=x"], ", received 'x' (kvsieve show --help"),
        (["new", "class"], "identifier"),
        (["new", "2x"], "identifier"),
        (["new", "a-b"], "identifier"),
        (["new", "torch"], "hide another module"),
        (["new", "json"], "hide another module"),
        (["new", QUEST], "registered already"),
        (["new", "mine", "--directory", "/no/such/directory"], "existing directory"),
        (["new", "mine", "--directory", "/dev/null"], "received a file"),
        (["verify", TOKEN, "--steps", "1"], "error: --steps: expected an integer >= 2, received 1"),
        (["verify", TOKEN, "--seq-len", "-4"], "error: --seq-len: expected"),
        (["verify", QUEST, "--events", "5"], "--events: expected --fuzz N beside it"),
        (["verify", QUEST, "--fuzz", "2", "--grid"], "--grid: expected a flow's checks, received --fuzz"),
        (["verify", QUEST, "--steps", "9", "--grid"], "received the accumulator harness, which has no grid"),
        (["verify", QUEST, "--fuzz", "2", "--head-dim", "9"], "--head-dim is of the accumulator harness"),
        (["generate", "--flow", "nope", "--prompt", "x"], "unknown flow 'nope': known: "),
        (["eval", QUEST, "--text", "/dev/null", "--report", "."], "--report"),
        (["eval", QUEST, "--text", "/dev/null", "--report", "/dev/null/x.html"], "/dev/null is none"),
        (["eval", QUEST, "streaming_llm", "--evict"], "--evict: expected a flow that evicts by attention mass"),
        (["explain", QUEST, "--report", "."], "received a directory"),
        (["explain", QUEST, "--plot", "."], "received a directory"),
        (["explain", QUEST, "--plot", "/dev/null/x.png"], "/dev/null is none"),
        (["explain", QUEST, "--sample", "3"], "expected --task"),
        (["explain", QUEST, "--seed", "0"], "expected --task"),
        (["explain", QUEST, "--layer", "3"], "expected --plot"),
        (["explain", QUEST, "--head", "0"], "expected --plot"),
        (["study", "decay", "--plot", "."], "received a directory"),
        (["study", "weights", "--plot", "/dev/null/x.png"], "/dev/null is none"),
        (["bench", "--context", "40", "--json", "."], "received a directory"),
        (["bench", "--context", "40", "--plot", "."], "received a directory"),
        (["bench", "--seeding", "--json", "."], "received a directory"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert expected in captured.err
    assert list(tmp_path.iterdir()) == []


def test_unexpected_errors_and_interrupts_show_no_traceback(capsys, monkeypatch):
    monkeypatch.setattr("kvsieve.cli.flows.flow_rows", lambda: 1 // 0)
    assert run("flows") == 2
    assert capsys.readouterr().err.startswith("error: ZeroDivisionError: ")

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("kvsieve.cli.flows.flow_rows", interrupt)
    assert run("flows") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_has_enough_is_no_error():
    command = [sys.executable, "-m", "kvsieve", "flows"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.wait() == 0 and process.stderr.read() == ""


def test_python_dash_m_is_the_command():
    command = [sys.executable, "-m", "kvsieve", "new", "def"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: new 'def'") and result.stderr.count("\n") == 1


def test_flow_arguments_take_the_type_they_read_as():
    pairs = ["a=1", "b=0.5", "c=true", "d=False", "e=none", "f=x=y", "g=1e-3", "h="]
    assert parse_flow_arguments(pairs) == {
        "a": 1, "b": 0.5, "c": True, "d": False, "e": None, "f": "x=y", "g": 1e-3, "h": ""
    }  # fmt: skip
    assert type(parse_flow_arguments(["a=1"])["a"]) is int
    with pytest.raises(ConfigError, match="several"):
        parse_flow_arguments(["a=1", "a=2"])


def test_layers_are_numbers_and_ranges():
    assert parse_layers("") == []
    assert parse_layers("7, 0,4-6,5") == [0, 4, 5, 6, 7]


def test_budget_defaults_and_pages():
    quest, streaming = build_flow(QUEST), build_flow("streaming_llm")
    assert choose_budget(quest, 16) == Budget(topk=29, sink=1, recent=2)
    assert choose_budget(streaming, 16) == Budget(topk=0, sink=1, recent=31)
    assert choose_budget(quest, 16, 100) == Budget(topk=4, sink=1, recent=2)
    assert choose_budget(quest, 16, ratio=0.25) == Budget(topk=0, ratio=0.25)
    assert choose_budget(quest, 16, topk=3, sink=0, recent=5) == Budget(3, 0, 5)
    assert (choose_page_size(quest, None), choose_page_size(quest, 5)) == (16, 5)
    assert choose_page_size(build_flow(TOKEN), None) == 1


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(97 + token) for token in tokens)


def test_an_eviction_has_a_capacity_and_its_flows_defaults():
    nothing = {"budget-tokens": None, "topk": None, "ratio": None}
    h2o, streaming = build_flow("h2o"), build_flow("streaming_llm")
    assert choose_retention(h2o, "keep", None, 3, 4, {**nothing, "topk": 2}) == Keep()
    assert choose_retention(h2o, "evict", 64, None, None, nothing) == Evict(64, sink=4, recent=32)
    assert choose_retention(h2o, "evict", 64, 0, 9, nothing) == Evict(64, sink=0, recent=9)
    assert choose_retention(streaming, "evict", 64, None, None, nothing) == Evict(64, sink=4, recent=60)
    assert choose_retention(streaming, "evict", 64, 1, None, nothing) == Evict(64, sink=1, recent=63)


def test_parting_is_the_first_difference_or_the_shorter_end():
    assert find_parting(Letters(), [0, 1, 2], [0, 1, 2]) is None
    assert find_parting(Letters(), [0, 1, 2], [0, 3, 2]) == Parting(1, "bc", "dc")
    assert find_parting(Letters(), [0, 1], [0, 1, 2]) == Parting(2, "", "c")


def test_new_writes_a_flow_that_ranks_by_its_formula(tmp_path, capsys):
    assert run("new", "MyFlow", "--directory", str(tmp_path)) == 0
    assert "my_flow.py:MyFlow" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my_flow.py", "test_my_flow.py"]
    flow = load_flow(f"{tmp_path}/my_flow.py:MyFlow", peak=0.25)
    k, q = torch.randn(5, 8), torch.randn(3, 8)
    mean = flow.summarize(k, k)["k_mean"]
    assert torch.equal(mean, k.mean(0))
    seen = [float(q[head] @ mean) for head in range(3)]
    score = flow.score(q, {"k_mean": mean[None]})
    torch.testing.assert_close(score, torch.tensor([0.75 * sum(seen) / 3 + 0.25 * max(seen)]))
    with pytest.raises(ConfigError, match="peak"):
        load_flow(f"{tmp_path}/my_flow.py:MyFlow", peak=2)


def test_new_test_passes_and_fails_when_the_backend_is_wrong(tmp_path):
    assert run("new", "other_flow", "--directory", str(tmp_path)) == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_other_flow.py"]
    good = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert good.returncode == 0 and "1 passed" in good.stdout, good.stdout
    (tmp_path / "conftest.py").write_text(
        "import kvsieve.backends.eager as eager\n"
        "kind = next(c for c in vars(eager).values() if getattr(c, 'name', '') == 'eager')\n"
        "right = kind.score\n"
        "kind.score = lambda *arguments: -right(*arguments)\n"
    )
    bad = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert bad.returncode == 1 and "1 failed" in bad.stdout, bad.stdout


@pytest.mark.parametrize("existing", ["mine.py", "test_mine.py"])
def test_new_never_overwrites_and_leaves_nothing_half_written(existing, tmp_path, capsys):
    (tmp_path / existing).write_text("precious")
    assert run("new", "mine", "--directory", str(tmp_path)) == 2
    assert existing in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert Path(tmp_path / existing).read_text() == "precious"


def test_plots_of_a_kind_that_is_not_drawn_are_refused_before_the_work(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvsieve.cli.study.study_decay", lambda *arguments, **named: 1 / 0)
    assert run("study", "decay", "--plot", "x.txt") == 2
    assert "expected a file such as plot.png, received one of kind '.txt'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_missing_folders_of_a_report_are_no_fault_and_nothing_is_made_early(tmp_path):
    check_output(tmp_path / "new" / "folder" / "x.html", "--report")
    assert not list(tmp_path.iterdir())


def test_verify_refuses_a_backend_without_its_device(capsys, monkeypatch):
    """No verdict on the flow: nothing of it was run."""
    pytest.importorskip("triton")
    monkeypatch.setattr("kvsieve.backends.triton.backend.INTERPRETED", False)
    assert run("verify", "block_sparse_attention", "--backend", "triton") == 2
    streams = capsys.readouterr()
    assert not streams.out and "backend triton: expected tensors on a CUDA device, received cpu" in streams.err


def test_a_folder_that_takes_no_files_is_refused_at_once(tmp_path, monkeypatch):
    """Permissions allow it, the file system does not."""

    def refuse(dir):
        raise FileNotFoundError(2, "No such file or directory", str(dir))

    check_output(tmp_path / "x.json", "--json")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("kvsieve.cli.files.tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=r"--json .*x.json: expected a file to write to, received one without"):
        check_output(tmp_path / "x.json", "--json")


@pytest.mark.parametrize(("text", "value"), [("[0, 200]", [0, 200]), ("[0.5]", [0.5]), ("[x", "[x"), ("[]", [])])
def test_flow_arguments_may_be_lists(text, value):
    assert parse_flow_arguments([f"channels={text}"]) == {"channels": value}


def test_version_names_the_installed_one(capsys):
    project = Path(__file__).parents[1].joinpath("pyproject.toml").read_text()
    assert f'\nversion = "{kvsieve.__version__}"\n' in project
    assert run("--version") == 0
    assert capsys.readouterr().out == f"kvsieve {kvsieve.__version__} (torch {torch.__version__}, " + (
        f"Python {platform.python_version()})\n"
    )


def test_a_budget_that_leaves_nothing_to_choose_is_told(capsys):
    note_budget(build_flow("streaming_llm"), Budget(0, 1, 31))
    note_budget(build_flow(QUEST), Budget(0, 1, 2))
    assert capsys.readouterr().err.splitlines() == [
        "note: flow streaming_llm chooses no pages, for it has no score: it attends sink and recent pages only",
        f"note: flow {QUEST} chooses no pages, for the budget is all sink and recent pages",
    ]
    note_budget(build_flow(QUEST), Budget(0, 1, 2), asked=True)
    note_budget(build_flow(QUEST), Budget(1, 1, 2))
    note_budget(build_flow(QUEST), Budget(0, 1, 2, ratio=0.1))
    assert capsys.readouterr() == ("", "")


def test_the_default_text_is_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = Path(__file__).parents[1] / "examples" / "jargon.txt"
    assert read_text(None) == own.read_text(encoding="utf-8")
    (tmp_path / "mine.txt").write_text("mine")
    assert read_text("mine.txt") == "mine"
    monkeypatch.setattr("kvsieve.cli.options.OWN_TEXTS", (tmp_path / "none",))
    with pytest.raises(ConfigError, match="--text: expected a file with a text, received none"):
        read_text(None)
