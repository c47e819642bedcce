"""What the README shows is what happens: its table, its flow and its Transformers example."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsieve import Budget, Runtime, load_flow
from kvsieve.cli.flow_table import flow_rows
from kvsieve.cli.flows import markdown
from kvsieve.flow import build_flow

README_FILE = Path(__file__).parent.parent / "README.md"
README = README_FILE.read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_table_of_flows_is_current() -> None:
    shown = README.split("<!-- flows -->")[1].split("<!-- /flows -->")[0].strip()
    shipped = [row for row in flow_rows() if type(build_flow(row.name)).__module__.startswith("kvsieve.")]
    assert shown == markdown(shipped), "paste the output of: kvsieve flows --markdown"


def test_the_users_flow_selects_as_quest_does(tmp_path: Path) -> None:
    file = tmp_path / "my_flow.py"
    file.write_text(CODE[0], encoding="utf-8")
    assert len(CODE[0].strip().splitlines()) <= 11
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(90, 6, 24, generator=generator), torch.randn(90, 2, 24, generator=generator)
    chosen = []
    for flow in (load_flow(f"{file}:Envelope"), build_flow("gqa_quest_sparse_attention")):
        runtime = Runtime(flow, Budget(3), page_size=5)
        request = runtime.admit()
        runtime.extend([request], [89]).attend(0, q[:89], k[:89], k[:89])
        result = runtime.step([request]).attend(0, q[89:], k[89:], k[89:])
        assert result.selection is not None
        chosen.append(result.selection.pages)
    assert torch.equal(*chosen) and chosen[0].shape[-1] == 6


def test_the_transformers_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from kvsieve.models import resolve_model

    names: dict[str, Any] = {}
    code = CODE[1].replace('path = "..."', f"path = {resolve_model('smollm2')[0]!r}")
    exec(code.replace('"examples/jargon.txt"', repr(str(README_FILE.parent / "examples" / "jargon.txt"))), names)
    assert names["cache"].stats.steps == 49
    assert 0 < names["cache"].stats.kv_bytes < 0.3 * names["cache"].stats.dense_bytes
    assert names["output"].shape[1] == names["inputs"]["input_ids"].shape[1] + 50
    assert "Jargon" in capsys.readouterr().out
