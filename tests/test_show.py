"""``kvsieve show``: what a flow becomes, and the bytes that it moves."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from kvsieve.flow import build_flow
from kvsieve.graph import Geometry, trace_flow
from kvsieve.lower import lower
from test_cli import run

TOO_LARGE = """
from kvsieve.flow import Flow

class Outer(Flow):
    def score(self, q, pages):
        k = pages["k"]
        return (k[:, :, None, :, None] * k[:, None, :, None, :]).tanh().amax((1, 2, 3, 4))
"""


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run("show", *arguments) == 0
    return capsys.readouterr().out


def test_overview_counts_bytes_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "gqa_quest_sparse_attention", "--head-dim", "80", "--dtype", "fp32")
    assert "score moves 640 bytes per window page and KV head: k_max read 320, k_min read 320" in text
    text = shown(capsys, "h2o_token_sparse_attention")
    assert "page 1, head_dim 128" in text and "264 bytes" in text
    assert "k read 256, heavy read 4, heavy written 4" in text and "state fields: heavy [] float32" in text
    assert "no score" in shown(capsys, "streaming_llm")


def test_graph_has_a_line_and_a_shape_for_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "h2o", "--graph", "--group", "3")
    assert "matmul = matmul(mul, numpy_t)  # [3, W]" in text and "mean = mean(k, [0])  # [128]" in text
    assert text == shown(capsys, "h2o", "--group", "3"), "the graph is what is shown unless something else is asked for"


def test_lowered_graph_is_the_code_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "gqa_block_sparse_attention", "--lowered")
    assert "= None" not in text
    (code,) = [part for part in text.split("\n\n") if part.startswith("# score")]
    graphs = trace_flow(build_flow("gqa_block_sparse_attention"), Geometry(16, 128, 128, 4))
    assert graphs.score is not None
    names: dict = {"torch": torch, "inf": float("inf"), "device": torch.device}
    exec(compile(ast.parse(code), "shown", "exec"), names)
    valid = torch.arange(5) < torch.tensor([[5], [2]])
    inputs = torch.randn(2, 4, 128), torch.randn(2, 5, 128)
    assert torch.equal(names["forward"](None, valid, *inputs)[0], lower(graphs.score).module(valid, *inputs)[0])


def test_kernel_is_source(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    text = shown(capsys, "h2o", "--kernel")
    short, long = text[text.index("# Windows of up to 4096 pages") :].split("# Longer windows")
    for source, named in (
        (short, ["h2o_score_whole_windows_0", "h2o_score_whole_windows_1"]),
        (long, ["h2o_score_0", "h2o_score_1", "h2o_score_0_all"]),
    ):
        assert [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)] == named


def test_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("show", "h2o", "--graph", "--kernel") == 2
    assert "expected one of --graph, --lowered and --kernel" in capsys.readouterr().err
    assert run("show", "h2o_token_sparse_attention", "--page-size", "4") == 2
    assert "requires page_size 1" in capsys.readouterr().err
    pytest.importorskip("triton")
    (tmp_path / "outer.py").write_text(TOO_LARGE)
    assert run("show", f"{tmp_path / 'outer.py'}:Outer", "--kernel") == 2
    assert "no kernel is generated: Outer score holds 4194304 values" in capsys.readouterr().err


NAMESAKES = """
from kvsieve.flow import Flow

class Namesakes(Flow):
    def summarize(self, k, v):
        return {"mean": k.mean(0), "amax": k.amax(0), "mean_1": v.mean(0)}

    def init_state(self, page_size, head_dim):
        import torch
        return {"mul": torch.zeros(())}

    def score(self, q, pages):
        best = q.abs().sum(0).topk(2)
        return (pages["mean"] * q.mean(0)).amax(-1) + pages["amax"].mean(-1) + pages["mul"] + best.values.sum()
"""


def test_no_name_stands_for_two_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fields may be called as torch calls the values of a graph; an op of several values has a line of its own."""
    (tmp_path / "flow.py").write_text(NAMESAKES)
    text = shown(capsys, f"{tmp_path}/flow.py:Namesakes", "--graph")
    (score,) = [part for part in text.split("\n\n") if part.startswith("score(")]
    fields = score.partition(")")[0].removeprefix("score(").split(", ")
    made = [line.partition(" = ")[0].strip() for line in score.splitlines() if " = " in line]
    assert sorted({*fields, *made}) == sorted([*fields, *made]) and len(made) >= 5 and "topk" in made
    known = set(fields)
    for line in score.splitlines():
        if " = " in line:
            name, _, call = line.partition(" = ")
            operands = call.partition("(")[2].partition("  #")[0].strip("()[] ")
            assert all(word in known for word in re.findall(r"[a-z_]\w*", operands)), line
            known.add(name.strip())
    assert "score does not read: mean_1" in text and "so it never changes: mul" in text
