"""The shipped flows: formulas against plain loops, the envelope bound, arguments, size."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsieve.flows
from kvsieve.budget import Budget
from kvsieve.errors import ConfigError
from kvsieve.flow import Flow, build_flow, list_flows, with_dtype
from kvsieve.graph import Geometry, trace_flow
from kvsieve.verify.data import LayerShape
from kvsieve.verify.rounding import F64
from support import Twin

SHIPPED = {
    "block_sparse_attention": None,
    "gqa_block_sparse_attention": None,
    "gqa_quest_sparse_attention": None,
    "streaming_llm": None,
    "h2o_sparse_attention": None,
    "gqa_h2o_sparse_attention": None,
    "h2o_token_sparse_attention": 1,
    "gqa_h2o_token_sparse_attention": 1,
    "h2o": None,
    "snapkv": None,
    "tova": None,
}
"""Name to required page size."""

Loop = Callable[..., list[float]]
Page = list[list[float]]


def test_registry_holds_the_shipped_flows() -> None:
    flows = {name: cls.page_size for name, cls in list_flows().items() if cls.__module__.startswith("kvsieve.")}
    assert flows == SHIPPED


# Formulas, from the text, in Python floats. q [G][D], pages [W][p][D].


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def mean(rows: Page) -> list[float]:
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def envelope(q: list[float], page: Page) -> float:
    return math.fsum(
        max(x * max(column), x * min(column)) for x, column in zip(q, zip(*page, strict=True), strict=True)
    )


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    powers = [math.exp(value - top) for value in values]
    return [power / math.fsum(powers) for power in powers]


def block(q: Page, pages: list[Page], **_: Any) -> list[float]:
    return [dot(mean(q), mean(page)) for page in pages]


def gqa_block(q: Page, pages: list[Page], scale: float, **_: Any) -> list[float]:
    heads = [softmax([scale * dot(head, mean(page)) for page in pages]) for head in q]
    return [max(column) for column in zip(*heads, strict=True)]


def quest(q: Page, pages: list[Page], **_: Any) -> list[float]:
    return [max(envelope(head, page) for head in q) for page in pages]


def h2o(q: Page, pages: list[Page], w_avg: float, w_peak: float, **_: Any) -> list[float]:
    return [w_avg * dot(mean(q), mean(page)) + w_peak * envelope(mean(q), page) for page in pages]


def gqa_h2o(q: Page, pages: list[Page], w_avg: float, w_peak: float, **_: Any) -> list[float]:
    return [
        w_avg * max(dot(head, mean(page)) for head in q) + w_peak * max(envelope(head, page) for head in q)
        for page in pages
    ]


def h2o_token(q: Page, pages: list[Page], scale: float, decay: float, previous: list[float], **_: Any) -> list[float]:
    now = softmax([scale * dot(mean(q), page[0]) for page in pages])
    return [new + decay * old for new, old in zip(now, previous, strict=True)]


def gqa_h2o_token(
    q: Page, pages: list[Page], scale: float, decay: float, previous: list[float], **_: Any
) -> list[float]:
    heads = [softmax([scale * dot(head, page[0]) for page in pages]) for head in q]
    return [max(column) + decay * old for column, old in zip(zip(*heads, strict=True), previous, strict=True)]


def h2o_mass(q: Page, pages: list[Page], scale: float, decay: float, mass: list[float], **_: Any) -> list[float]:
    heads = [softmax([scale * dot(head, mean(page)) for page in pages]) for head in q]
    return [(1 - decay) * m + math.fsum(column) for m, column in zip(mass, zip(*heads, strict=True), strict=True)]


def tova(q: Page, pages: list[Page], mass: list[float], **_: Any) -> list[float]:
    return mass


def snapkv(q: Page, pages: list[Page], mass: list[float], kernel: int, **_: Any) -> list[float]:
    padded = [0.0] * (kernel // 2) + mass + [0.0] * (kernel // 2)
    return [math.fsum(padded[i : i + kernel]) / kernel for i in range(len(mass))]


FORMULAS: list[tuple[str, dict[str, Any], Loop, dict[str, Any]]] = [
    ("block_sparse_attention", {}, block, {}),
    ("gqa_block_sparse_attention", {}, gqa_block, {"scale": 0.35}),
    ("gqa_block_sparse_attention", {"scale": 0.9}, gqa_block, {"scale": 0.9}),
    ("gqa_quest_sparse_attention", {}, quest, {}),
    ("h2o_sparse_attention", {}, h2o, {"w_avg": 1.0, "w_peak": 1.0}),
    ("h2o_sparse_attention", {"w_avg": 0.25, "w_peak": -2.0}, h2o, {"w_avg": 0.25, "w_peak": -2.0}),
    ("gqa_h2o_sparse_attention", {}, gqa_h2o, {"w_avg": 1.0, "w_peak": 1.0}),
    ("gqa_h2o_sparse_attention", {"w_avg": 3.0, "w_peak": 0.5}, gqa_h2o, {"w_avg": 3.0, "w_peak": 0.5}),
    ("h2o_token_sparse_attention", {}, h2o_token, {"scale": 7**-0.5, "decay": 0.984375}),
    ("h2o_token_sparse_attention", {"scale": 0.9, "decay": 0.5}, h2o_token, {"scale": 0.9, "decay": 0.5}),
    ("gqa_h2o_token_sparse_attention", {}, gqa_h2o_token, {"scale": 7**-0.5, "decay": 0.984375}),
    ("gqa_h2o_token_sparse_attention", {"scale": 2.0, "decay": 0.0}, gqa_h2o_token, {"scale": 2.0, "decay": 0.0}),
    ("gqa_h2o_token_sparse_attention", {"decay": 1}, gqa_h2o_token, {"scale": 7**-0.5, "decay": 1.0}),
    ("h2o", {}, h2o_mass, {"scale": 0.35, "decay": 0.9}),
    ("h2o", {"decay": 0.25}, h2o_mass, {"scale": 0.35, "decay": 0.25}),
    ("tova", {}, tova, {}),
    ("snapkv", {}, snapkv, {"kernel": 5}),
    ("snapkv", {"kernel": 1}, snapkv, {"kernel": 1}),
]


@pytest.mark.parametrize(("name", "arguments", "formula", "constants"), FORMULAS)
@pytest.mark.parametrize(("group", "windows"), [(1, 1), (3, 6), (4, 5)])
def test_formulas(
    name: str, arguments: dict[str, Any], formula: Loop, constants: dict[str, Any], group: int, windows: int
) -> None:
    """Three steps of each formula in float64; head_dim 7, model scale 0.35."""
    p = list_flows()[name].page_size or 3
    flow = with_dtype(build_flow(name, **arguments), F64)
    random = torch.Generator().manual_seed(windows)
    k = torch.randn(windows, p, 7, generator=random, dtype=F64)
    fields = {"k": k}
    if flow.summarize:
        summaries = [flow.summarize(page, page) for page in k]
        fields |= {key: torch.stack([summary[key] for summary in summaries]) for key in summaries[0]}
    if flow.init_state:
        fields["heavy"] = flow.init_state(p, 7)["heavy"].to(F64).expand(windows).clone()
        assert (fields["heavy"] == 0).all()
    previous = [0.0] * windows
    if flow.mass is not None:
        fields["mass"] = torch.rand(windows, p, generator=random, dtype=F64)
        fields["mass_sum"] = fields["mass"].sum(1)
        constants = {**constants, "mass": fields["mass_sum"].tolist()}
    for _ in range(3):
        q = torch.randn(group, 7, generator=random, dtype=F64)
        extra = {"scale": 0.35} if "scale" in inspect.signature(flow.score).parameters else {}  # type: ignore[arg-type]
        result = flow.score(q, fields, **extra)  # type: ignore[misc]
        scores, state = result if isinstance(result, tuple) else (result, {})
        expected = formula(q.tolist(), k.tolist(), previous=previous, **constants)
        assert torch.allclose(scores, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-13)
        if state:
            assert torch.equal(state["heavy"], scores)
            fields["heavy"], previous = state["heavy"], expected


# The envelope

sizes = st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**31))


@given(sizes)
@settings(max_examples=200)
def test_two_sided_envelope_bounds_the_page(drawn: tuple[int, int, int, int]) -> None:
    """``max_h sum_d max(q max, q min) >= max_h max_k q_h . k`` for signed data, up to float64 rounding."""
    p, head_dim, group, seed = drawn
    random = torch.Generator().manual_seed(seed)
    k = torch.randn(p, head_dim, generator=random, dtype=F64)
    q = torch.randn(group, head_dim, generator=random, dtype=F64)
    quest_flow, h2o_flow = build_flow("gqa_quest_sparse_attention"), build_flow("gqa_h2o_sparse_attention", w_avg=0.0)
    peak = float((q @ k.T).max())
    for flow in (quest_flow, h2o_flow):
        fields = {name: value[None] for name, value in flow.summarize(k, k).items()}  # type: ignore[misc]
        bound = float(flow.score(q, fields))  # type: ignore[misc, arg-type]
        assert bound >= peak - 1e-12 * float((q.abs() @ k.abs().T).max())


def test_one_sided_envelope_is_no_bound(generator: torch.Generator) -> None:
    """``q . max`` falls below the page's largest logit on signed data, often."""
    k = torch.randn(200, 16, 32, generator=generator, dtype=F64)
    q = torch.randn(32, generator=generator, dtype=F64)
    one_sided, peak = k.amax(1) @ q, (k @ q).amax(1)
    assert (one_sided < peak).float().mean() > 0.1
    two_sided = torch.maximum(k.amax(1) * q, k.amin(1) * q).sum(-1)
    assert (two_sided >= peak).all()


def test_a_mean_query_bounds_no_head(generator: torch.Generator) -> None:
    """Why Quest takes the bound per head: heads that disagree cancel in the mean, and the page looks worthless."""
    head, k = torch.randn(32, generator=generator), torch.randn(16, 32, generator=generator)
    q = torch.stack([head, -0.9 * head])
    mean_q = q.mean(0)
    assert torch.maximum(mean_q * k.amax(0), mean_q * k.amin(0)).sum() < (q @ k.T).max()


# Arguments

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("h2o_sparse_attention", {"w_avg": NAN}),
        ("h2o_sparse_attention", {"w_peak": INF}),
        ("gqa_h2o_sparse_attention", {"w_avg": -INF}),
        ("gqa_h2o_sparse_attention", {"w_peak": "1"}),
        ("gqa_h2o_sparse_attention", {"w_sum": 1.0}),
        ("gqa_block_sparse_attention", {"scale": 0}),
        ("gqa_block_sparse_attention", {"scale": -1.0}),
        ("gqa_block_sparse_attention", {"scale": NAN}),
        ("gqa_block_sparse_attention", {"scale": INF}),
        *(
            (name, arguments)
            for name in ("h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention")
            for arguments in (
                {"decay": -0.01},
                {"decay": 1.01},
                {"decay": NAN},
                {"decay": "x"},
                {"scale": 0.0},
                {"scale": -2.0},
                {"scale": NAN},
                {"scale": INF},
                {"dekay": 0.5},
            )
        ),
        ("block_sparse_attention", {"scale": 1.0}),
        ("streaming_llm", {"decay": 0.5}),
        ("h2o", {"decay": -0.1}),
        ("h2o", {"decay": 0.005}),
        ("h2o", {"decay": 1.5}),
        ("h2o", {"decay": "x"}),
        ("h2o", {"seed": "some"}),
        ("h2o", {"seed": "window:0"}),
        ("tova", {"decay": 0.5}),
        ("snapkv", {"kernel": 4}),
        ("snapkv", {"kernel": 0}),
        ("snapkv", {"window": 0}),
    ],
)
def test_wrong_arguments_are_refused(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"flow {name}.*{next(iter(arguments))}"):
        build_flow(name, **arguments)


@pytest.mark.parametrize("name", ["h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention"])
def test_constructors_check_by_themselves(name: str) -> None:
    """A flow that is built directly, without the registry, refuses the same numbers."""
    for arguments in ({"decay": NAN}, {"decay": 2.0}, {"scale": NAN}):
        with pytest.raises(ValueError, match="expected"):
            list_flows()[name](**arguments)
    for other in ("h2o_sparse_attention", "gqa_h2o_sparse_attention"):
        with pytest.raises(ValueError, match="expected"):
            list_flows()[other](w_avg=NAN)


def test_defaults() -> None:
    for name in ("h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention"):
        flow: Any = build_flow(name)
        assert flow.decay == 0.984375 and flow.scale is None and flow.page_size == 1
    for name in ("h2o_sparse_attention", "gqa_h2o_sparse_attention"):
        flow = build_flow(name)
        assert flow.w_avg == flow.w_peak == 1.0
    assert build_flow("gqa_block_sparse_attention").scale is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("head_dim", [16, 80])
def test_default_scale_follows_the_head_dim(head_dim: int) -> None:
    """One flow object, two geometries: the default scale is each one's ``head_dim ** -0.5``."""
    name = "gqa_h2o_token_sparse_attention"
    implied, given_scale = (
        Twin(build_flow(name, **arguments), Budget(2, 1, 1), 1, [LayerShape(1, 2, head_dim, 8)])
        for arguments in ({}, {"scale": head_dim**-0.5})
    )
    for twin in (implied, given_scale):
        twin.extend(twin.admit(), [10], compare=False)
    for _ in range(2):
        a, b = (twin.step([0])[0] for twin in (implied, given_scale))  # type: ignore[list-item]
        assert a.scores is not None and b.scores is not None and torch.equal(a.scores, b.scores)


# What they read, and their size

READS = {
    "block_sparse_attention": 1,
    "gqa_block_sparse_attention": 1,
    "gqa_quest_sparse_attention": 2,
    "streaming_llm": 0,
    "h2o_sparse_attention": 3,
    "gqa_h2o_sparse_attention": 3,
}
"""head_dim values read per window page."""


@pytest.mark.parametrize("name", SHIPPED)
def test_bytes_read_are_those_of_the_docstring(name: str) -> None:
    cls = list_flows()[name]
    graphs = trace_flow(cls(), Geometry(cls.page_size or 16, 64, 48, 4))
    expected = {"h2o": 64 * 2 + 4, "snapkv": 4, "tova": 4}.get(name, READS.get(name, 0) * 64 * 2)
    if "token" in name:
        expected = 64 * 2 + 2 * 4
    assert graphs.score_bytes_per_page(torch.bfloat16) == expected


def code_lines(node: ast.ClassDef) -> int:
    """Lines of code of a class without docstrings, comments and blank lines."""
    skipped: set[int] = set()
    for part in ast.walk(node):
        if isinstance(part, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(part) is not None:
            first = part.body[0]
            skipped.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    used = {
        line
        for part in ast.walk(node)
        if isinstance(part, (ast.stmt, ast.expr))
        for line in (part.lineno, part.end_lineno or part.lineno)
    }
    return len(used - skipped)


@pytest.mark.parametrize("path", sorted(Path(kvsieve.flows.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_a_flow_is_at_most_fifteen_lines(path: Path) -> None:
    """Its class, and what of it a shared base defines, each; docstrings, imports and comments not counted."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            assert code_lines(node) <= 15, f"{path.name}: {node.name}"


@pytest.mark.parametrize("name", SHIPPED)
def test_docstrings_say_what_is_needed(name: str) -> None:
    """Formula (or its absence), source, what a step reads."""
    cls: type[Flow] = list_flows()[name]
    text = inspect.getdoc(cls) or ""
    assert "Reads" in text or "reads" in text
    assert "arXiv" in text or "vortex_torch" in text
    assert "``" in text
