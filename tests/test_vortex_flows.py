"""Flows in op form, a user's and the shipped ones, through kvsieve's own oracle."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch

import kvsieve.compat.vortex.cache as cache_side
import kvsieve.compat.vortex.indexer as indexer
from kvsieve.budget import Budget
from kvsieve.cli.app import run
from kvsieve.compat.vortex.abs import vOp
from kvsieve.compat.vortex.bridge import registered_names
from kvsieve.flow import load_flow
from kvsieve.verify.data import BulkData, LayerShape
from kvsieve.verify.run import Order, verify_all, verify_flow
from kvsieve.verify.subject import Subject
from kvsieve.verify.suite import drive

FILE = Path(__file__).parent / "vortex_flows.py"
TREE = ast.parse(FILE.read_text())
USERS = [f"{FILE}:{node.name}" for node in TREE.body if isinstance(node, ast.ClassDef) and node.name != "Base"]
SHIPPED = [name for name in registered_names() if not name.startswith("vortex:t_")]


def test_there_are_enough() -> None:
    assert len(USERS) >= 12 and len(SHIPPED) == 7


@pytest.mark.parametrize("module", [indexer, cache_side], ids=["indexer", "cache"])
def test_the_users_flows_use_every_op(module) -> None:
    """Every op that a side exports is called in the file."""
    called = {
        (node.func.value.id, node.func.attr)
        for node in ast.walk(TREE)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    }
    ops = {name for name, value in vars(module).items() if inspect.isclass(value) and issubclass(value, vOp)}
    letter = "I" if module is indexer else "C"
    assert ops - {name for owner, name in called if owner == letter} == set()


@pytest.mark.parametrize("spec", [*USERS, *SHIPPED], ids=lambda spec: spec.rpartition(":")[2])
def test_agrees_with_float64(spec: str) -> None:
    """Ragged requests around the budget, odd sizes, state and selection compared at every step."""
    subject = Subject(load_flow(spec))
    p = subject.page_size
    drive(subject, [LayerShape(3, 7, 20, 12)], BulkData(3), [8 * p + 1, 2, 6 * p - 1], 2, judged=0.3, prefill=False)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*USERS, *SHIPPED], ids=lambda spec: spec.rpartition(":")[2])
def test_passes_the_whole_suite(spec: str) -> None:
    result = verify_flow(spec)
    assert result.passed, result.text()


@pytest.mark.slow
def test_sixteen_bits_and_workers() -> None:
    """Names and files travel to worker processes, which install the layer themselves."""
    orders = [Order(spec, dtype="bf16") for spec in (f"{FILE}:RunningAverage", "vortex:gqa_h2o_sparse_attention")]
    for result in verify_all(orders, False, 2):
        assert result.passed, result.text()


def test_the_command_line_knows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "vortex:h2o_token_sparse_attention", "--state-dtype", "bfloat16", "--decay", "1.0"]) == 1
    assert run(["verify", f"{FILE}:Nothing"]) == 2
    assert "Nothing" in capsys.readouterr().err


def test_a_bridged_flow_reads_what_it_says() -> None:
    """Costs come from the traced graph: the token-level flow reads K and its state, the page-level one three rows."""
    from kvsieve.graph import Geometry, trace_flow

    tokens = trace_flow(load_flow("vortex:h2o_token_sparse_attention"), Geometry(1, 80, 80, 3))
    assert set(tokens.score_reads) == {"k", "hh_score"} and tokens.state_writes == ("hh_score",)
    assert tokens.score_bytes_per_page(torch.bfloat16) == 80 * 2 + 2 * 4
    pages = trace_flow(load_flow("vortex:gqa_h2o_sparse_attention"), Geometry(5, 80, 80, 7))
    assert set(pages.score_reads) == {"centroids", "max", "min"}
    assert pages.score_bytes_per_page(torch.bfloat16) == 3 * 80 * 2


def test_inside_transformers() -> None:
    """A name, a file and the native form generate the same tokens."""
    from kvsieve.integrations.transformers import SparseCache
    from tiny_models import build

    model = build("llama")
    prompt = torch.randint(2, 97, (1, 60), generator=torch.Generator().manual_seed(0))

    def generated(flow: str) -> list[int]:
        cache = SparseCache(model.config, flow=flow, budget=Budget(2, 1, 1), page_size=5)
        tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=6, do_sample=False)
        assert cache.stats.field_bytes, "the flow was asked"
        return tokens[0, 60:].tolist()

    assert generated("vortex:gqa_quest_sparse_attention") == generated("gqa_quest_sparse_attention")
    assert len(generated(f"{FILE}:MaskedQuest")) == 6
