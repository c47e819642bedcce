"""The flows of examples/paper_flows.py: correct, generated, as their papers say, and shown in docs/papers.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsieve.cli.show import overview
from kvsieve.flow import Flow, PageFields, build_flow, load_flow
from kvsieve.graph import Geometry, trace_flow
from kvsieve.verify import verify_flow
from kvsieve.verify.suite import CHECKS

ROOT = Path(__file__).parent.parent
FILE = ROOT / "examples" / "paper_flows.py"
TEXT = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
PAGES = {"Loki": 16, "DoubleSparsity": 16, "LServe": 64}
QUICK = [check for check in CHECKS if check.name in ("ties", "unselected NaN")]
FP32, BF16 = torch.float32, torch.bfloat16
SETTINGS = [  # page size, head_dim, group, KV heads
    pytest.param(name, *rest, marks=[pytest.mark.slow] * slow)
    for name in PAGES
    for *rest, slow in (
        (5, 20, 3, 3, FP32, False),
        (4, 32, 4, 4, BF16, False),
        (33, 80, 7, 2, FP32, True),
        (1, 80, 7, 2, BF16, True),
        (64, 16, 3, 2, FP32, name != "LServe"),
        (64, 16, 3, 2, BF16, True),
    )
]


def class_of(name: str) -> tuple[str, ast.ClassDef]:
    """A class of the file: as it stands there, and its tree."""
    text = FILE.read_text(encoding="utf-8")
    (node,) = (one for one in ast.parse(text).body if isinstance(one, ast.ClassDef) and one.name == name)
    return ast.get_source_segment(text, node) or "", node


def paper(name: str, **arguments: Any) -> Flow:
    return load_flow(f"{FILE}:{name}", **arguments)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_shows_the_file(name: str) -> None:
    assert class_of(name)[0] in [one.rstrip() for one in SHOWN], f"paste class {name} into docs/papers.md"


@pytest.mark.parametrize("name", PAGES)
def test_a_flow_has_under_15_lines(name: str) -> None:
    methods = [one for one in class_of(name)[1].body if not isinstance(one, ast.Expr)]
    assert len(methods) >= 2 and 1 + sum((one.end_lineno or 0) - one.lineno + 1 for one in methods) < 15


@pytest.mark.parametrize(("name", "page"), PAGES.items())
def test_the_page_shows_the_bytes(name: str, page: int) -> None:
    assert overview(trace_flow(paper(name), Geometry(page, 128, 128, 4)), BF16) in TEXT


@pytest.mark.parametrize("name", PAGES)
def test_correct(name: str) -> None:
    report = verify_flow(paper(name), QUICK)
    assert report.passed, report.text()


@pytest.mark.parametrize(("name", "page", "width", "group", "heads", "dtype"), SETTINGS)
def test_generated(name: str, page: int, width: int, group: int, heads: int, dtype: torch.dtype) -> None:
    run_generated(paper(name), Geometry(page, width, width, group), heads, dtype)


def run_generated(flow: Flow, geometry: Geometry, heads: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from generated_world import close, make_world, run_beside_float64
    from test_generate_flows import BOUNDS, DEVICE

    world = make_world(trace_flow(flow, geometry), (1, 9, 0, 20), heads, dtype, device=DEVICE)
    run_beside_float64(world, close(BOUNDS[dtype]))


def test_given_channels_are_generated() -> None:
    run_generated(paper("DoubleSparsity", channels=[7, 0, 19]), Geometry(5, 20, 20, 3), 3, FP32)


def scores_of(flow: Flow, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scores of pages ``k [W, p, D]`` by the flow's own code."""
    assert flow.summarize is not None and flow.score is not None
    pages = [flow.summarize(page, page) for page in k]
    scores = flow.score(q, PageFields({name: torch.stack([page[name] for page in pages]) for name in pages[0]}))
    assert isinstance(scores, torch.Tensor)
    return scores


def test_calibrated_flows_find_the_largest_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys vary along a few axes, and in a few channels: the page's calibration finds them."""
    monkeypatch.chdir(ROOT)
    (calibration,) = [one for one in SHOWN if "load_flow" in one]
    torch.manual_seed(0)
    q, axes = torch.randn(3, 32), torch.linalg.qr(torch.randn(32, 6)).Q
    weights = torch.where(torch.arange(32) % 4 == 1, 1.0, 1e-5)
    for name, spread in (("loki", axes @ axes.T), ("double_sparsity", weights.diag())):
        k = torch.randn(30, 5, 32) @ spread
        names = {"q": torch.randn(150, 32), "k": k.flatten(0, 1)}
        exec(calibration, names)
        received, expected = scores_of(names[name], q, k), (k @ q.T).amax((1, 2))  # type: ignore[arg-type]
        torch.testing.assert_close(received, expected, atol=1e-3, rtol=0)


def test_logical_pages_tighten_the_bound() -> None:
    """Above the largest logit of the page, below the bound of one envelope; the same where 4 does not divide a page."""
    torch.manual_seed(0)
    quest = build_flow("gqa_quest_sparse_attention")
    for page in (12, 5):
        q, k = torch.randn(3, 20), torch.randn(30, page, 20)
        scores, logits, bound = scores_of(paper("LServe"), q, k), (k @ q.T).amax((1, 2)), scores_of(quest, q, k)
        assert (scores >= logits).all() and (scores <= bound).all()
        assert torch.equal(scores, bound) == (page == 5)


def test_a_share_is_checked() -> None:
    with pytest.raises(ValueError, match=r"share: expected a number in \(0, 1\], received 0"):
        paper("Loki", share=0)
