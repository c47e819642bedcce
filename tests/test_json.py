"""``--json``: one object on one line, of one form, with the keys that docs/json.md gives; and the files beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import kvsieve
from kvsieve.cli.json_output import json_text
from kvsieve.errors import ConfigError
from kvsieve.flow import build_flow
from kvsieve.graph import Geometry, trace_flow
from kvsieve.outputs import new_file, write_text
from test_cli import run

DOCS = Path(__file__).parents[1] / "docs" / "json.md"
QUEST = "gqa_quest_sparse_attention"
SMALL = ["--heads", "6/2", "--head-dim", "20", "--page-size", "5", "--budget", "2+1+1", "--dtype", "fp32"]
SMALL += ["--repeats", "3", "--backend", "eager", "--context", "40", "--flow", "block_sparse_attention"]


def documented(row: str) -> set[str]:
    """Keys that the table of the docs names for a command, up to the first colon."""
    (line,) = [line for line in DOCS.read_text().splitlines() if line.startswith(f"| {row} |")]
    cell = re.sub(r"\([^)]*\)|: .*", "", line.split("|")[2]).partition(";")[0]
    return set(re.findall(r"`(\w+)`", cell))


@pytest.mark.parametrize(
    ("row", "arguments"),
    [
        ("`flows`", ["flows", "--json"]),
        ("`show`", ["show", QUEST, "--json"]),
        ("`doctor`", ["doctor", "--json"]),
        ("`verify` with `--fuzz`", ["verify", "streaming_llm", "--fuzz", "1", "--jobs", "1", "--json"]),
        ("`bench`", ["bench", *SMALL, "--json", "-"]),
    ],
)
def test_one_object_with_the_documented_keys(
    row: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) in (0, 1)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    data = json.loads(out)
    assert list(data)[:2] == ["kvsieve", "command"]
    assert (data["kvsieve"], data["command"]) == (kvsieve.__version__, arguments[0])
    keys = documented(row) - {"kvsieve", "command", "lowered", "kernel"}
    assert keys and keys <= set(data)
    if row == "`bench`":
        assert data["setting"]["layers"] == 4


def test_what_json_lacks_is_text() -> None:
    data = json.loads(json_text("x", {"a": [float("nan"), {"b": float("-inf")}], "c": (1, None, 0.5)}))
    assert data["a"] == ["nan", {"b": "-inf"}] and data["c"] == [1, None, 0.5]


def test_show_says_in_json_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*arguments: str) -> str:
        assert run("show", "h2o_token_sparse_attention", *arguments) == 0
        return capsys.readouterr().out

    graphs = trace_flow(build_flow("h2o_token_sparse_attention"), Geometry(1, 128, 128, 4))
    for form in ("graph", "lowered"):
        data: dict[str, Any] = json.loads(shown("--json", f"--{form}"))
        assert list(data[form]) == [name for name in ("summarize", "score") if getattr(graphs, name) is not None]
        assert all(f"\n\n{text}" in shown(f"--{form}") for text in data[form].values())
        assert data["state"] == {"heavy": "[] float32"} and data["page_size"] == 1
        assert data["score_bytes_per_page"] == {"k read": 256, "heavy read": 4, "heavy written": 4}


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "x.txt"
    write_text(path, "one", "--report")
    with pytest.raises(KeyboardInterrupt), new_file(path, "--report") as name:
        name.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "one" and list(path.parent.iterdir()) == [path]
    write_text(path, "two", "--report")
    link = tmp_path / "link"
    link.symlink_to(path)
    write_text(link, "three", "--report")
    assert link.is_symlink() and path.read_text() == "three"
    write_text(Path("/dev/null"), "nothing", "--report")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(ConfigError, match=r"--report .*; expected a file to write to"):
        write_text(path / "y", "four", "--report")
