"""Storage dtypes, widths, attention options and per-layer settings, all beside the reference.

The reference gets the rounded 16-bit q, K and V, so what is measured is the arithmetic alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from kvsieve.budget import Budget
from kvsieve.errors import ConfigError
from kvsieve.flow import Flow, list_flows
from kvsieve.verify.data import LayerShape
from kvsieve.verify.rounding import F64, unit_roundoff
from support import Twin

pytestmark = pytest.mark.usefixtures("shared_traces")

FLOWS = list(list_flows())
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)


def build(name: str, shapes: list[LayerShape], **arguments: Any) -> Twin:
    cls = list_flows()[name]
    budget = Budget(0, 1, 2) if cls.score is None else Budget(2, 1, 2)
    return Twin(name, budget, cls.page_size or 4, shapes, **arguments)


def life(twin: Twin, steps: int = 4) -> None:
    """Prefill whole and in chunks, then steps under and over the budget; everything is compared."""
    p = twin.page_size
    requests = twin.admit(4)
    twin.extend(requests, [9 * p, 2, 4 * p, p])
    twin.extend(requests, [p + 1, 1, 0, 5 * p])
    for _ in range(steps):
        twin.step(requests)
    twin.check_storage()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", FLOWS)
def test_sixteen_bits(name: str, dtype: torch.dtype) -> None:
    twin = build(name, [LayerShape(2, 3, 64, 64), LayerShape(1, 4, 80, 48)], dtype=dtype)
    life(twin)
    assert twin.tally.excused <= 0.1 * twin.tally.selections
    result = twin.step(list(twin.runtime.tables))[0]
    assert result.out.dtype is dtype and result.lse is not None and result.lse.dtype is torch.float32
    assert twin.pool(0).k.dtype is dtype and all(x.dtype is dtype for x in twin.pool(0).summaries.values())
    assert all(x.dtype is torch.float32 for x in twin.pool(0).state.values())


@pytest.mark.parametrize("dtype", HALVES)
def test_sixteen_bit_error_is_near_its_bound(dtype: torch.dtype) -> None:
    """The bound is sharp: honest steps reach half an ulp, and a fault of four ulps in one value is caught."""
    twin = build("block_sparse_attention", [LayerShape(1, 2, 64, 64)], dtype=dtype)
    (request,) = twin.admit()
    twin.extend([request], [50], compare=False)
    twin.step([request])
    assert twin.tally.worst > 0.1 * unit_roundoff(dtype)
    segment = twin.segments[0, request, 0]
    q = twin.draw(0, 1)[0][0]
    out, _ = segment.attend(q, list(range(51)))
    faulty = out.clone()
    faulty[0, 0] += 8 * unit_roundoff(dtype) * out.abs().max()
    with pytest.raises(AssertionError):
        twin._check_out(segment, q, faulty.to(dtype), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(16, 40), (40, 16), (1, 7), (5, 3), (192, 128)])
def test_k_and_v_widths_differ(head_dim: int, v_head_dim: int, dtype: torch.dtype) -> None:
    life(build("gqa_quest_sparse_attention", [LayerShape(2, 3, head_dim, v_head_dim)], dtype=dtype))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"sinks": torch.linspace(-3.0, 4.0, 6)},
        {"softcap": 30.0, "sinks": torch.linspace(4.0, -3.0, 6)},
        {"scale": 0.5},
        {"scale": 1.0, "softcap": 5.0, "sinks": torch.zeros(6)},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("name", ["gqa_block_sparse_attention", "h2o_token_sparse_attention", "streaming_llm"])
def test_softcap_sinks_and_scale(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Honoured in whole prefill, chunks and steps; scores see neither soft-cap nor sinks."""
    life(build(name, [LayerShape(2, 3, 32, 24), LayerShape(3, 2, 16, 16)], dtype=dtype, **options))


def test_options_are_honoured_at_all() -> None:
    """Each option changes the output: the comparison above is not one of two omissions."""
    outs = []
    for options in ({}, {"softcap": 2.0}, {"sinks": torch.ones(6)}, {"scale": 0.5}):
        twin = build("streaming_llm", [LayerShape(2, 3, 32, 24)], **options)  # type: ignore[arg-type]
        (request,) = twin.admit()
        prefill = twin.extend([request], [20])[0]
        chunk = twin.extend([request], [3])[0]
        outs.append([prefill, chunk, twin.step([request])[0].out])
    for other in outs[1:]:
        assert not any(torch.allclose(a, b, atol=1e-3) for a, b in zip(outs[0], other, strict=True))


# Parameters of score, storage dtypes


class Parametrised(Flow):
    """Ranks by the mean logit, upside down in odd layers."""

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor], layer: int, scale: float) -> torch.Tensor:
        sign = 1.0 - 2.0 * (layer % 2)
        return sign * scale * (pages["k"] @ q.mean(0)).mean(-1) + layer


@pytest.mark.parametrize("scale", [None, 0.3, 2.0])
def test_layer_and_scale_reach_score(scale: float | None) -> None:
    twin = Twin(Parametrised(), Budget(2, 1, 1), 3, [LayerShape(2, 2, 8, 8)] * 3, scale=scale)
    requests = twin.admit(2)
    draw = twin.draw(0, 40)
    twin.extend(requests, [30, 10], draws=[draw] * 3)
    for _ in range(3):
        draw = twin.draw(0, 2)
        results = twin.step(requests, draws=[draw] * 3)
        first, second, third = (x.scores for x in results)
        assert first is not None and second is not None and third is not None
        width = (30 + 3) // 3 - 2
        assert torch.allclose(second[0, :, :width] - 1, -first[0, :, :width], atol=1e-5)
        assert torch.allclose(third[0, :, :width] - 2, first[0, :, :width], atol=1e-5)


class Fields(Flow):
    """Summaries of several dtypes and ranks: one kept in float32, one whole number, one bool, V read too."""

    summary_dtypes: ClassVar = {"exact": torch.float32, "double": torch.float64}

    def summarize(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        positive = (k[:, 0] > 0).sum()
        return {
            "exact": k.mean(0),
            "double": v.mean(0),
            "rounded": k.mean(0),
            "grid": k[:2, :2],
            "count": positive,
            "flag": (k > 0).any(0),
        }

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits = (q @ (pages["exact"] + pages["rounded"]).T).sum(0)
        flags = torch.where(pages["flag"], 0.25, 0.0).sum(-1)
        return logits + pages["count"] + flags + pages["grid"].sum((1, 2)) + pages["double"].sum(-1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_summaries_of_all_dtypes(dtype: torch.dtype) -> None:
    twin = Twin(Fields(), Budget(2, 1, 1), 4, [LayerShape(2, 2, 8, 6)], dtype=dtype)
    life(twin)
    stored = {name: field.dtype for name, field in twin.pool(0).summaries.items()}
    assert stored == {
        "exact": torch.float32,
        "double": torch.float64,
        "rounded": dtype,
        "grid": dtype,
        "count": torch.int64,
        "flag": torch.bool,
    }
    assert twin.pool(0).summaries["grid"].shape[2:] == (2, 2)


class SmallState(Flow):
    """A running mean kept in float16, as the flow says."""

    def init_state(self, page_size: int, head_dim: int) -> Mapping[str, torch.Tensor]:
        return {"mean": torch.full((head_dim,), 0.5, dtype=torch.float16)}

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> Any:
        mean = 0.5 * pages["mean"] + 0.5 * pages["k"].mean(1)
        return mean @ q[0], {"mean": mean.float()}


def test_state_keeps_the_dtype_of_its_initial_value() -> None:
    runtime = Twin(SmallState(), Budget(2, 1, 1), 4, [LayerShape(1, 2, 8, 8)]).runtime
    request = runtime.admit()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(40, heads, 8, generator=generator) for heads in (2, 1, 1))
    runtime.extend([request], [39]).attend(0, q[:39], k[:39], v[:39])
    runtime.step([request]).attend(0, q[39:], k[39:], v[39:])
    state, rows = runtime.layers[0].pool.state["mean"], runtime.tables[request].rows
    assert state.dtype is torch.float16
    means = k[:, 0].unflatten(0, (10, 4)).mean(1).to(F64)
    expected = torch.full((10, 8), 0.5, dtype=F64)
    expected[1:9] = 0.25 + 0.5 * means[1:9]
    assert torch.allclose(state[0, rows].to(F64), expected, atol=float(2 * unit_roundoff(torch.float16)))


# Budgets and layers


def test_budgets_per_layer() -> None:
    budgets = {0: Budget(1, 0, 1), 1: Budget(3, 2, 1), 2: Budget(0, 1, 2, ratio=0.5), 3: Budget(0, 1, 1)}
    twin = Twin("gqa_h2o_sparse_attention", budgets, 3, [LayerShape(2, 2, 8, 8)] * 4)
    requests = twin.admit(3)
    twin.extend(requests, [40, 8, 20])
    for _ in range(5):
        results = twin.step(requests)
    counts = [result.selection.count.tolist() for result in results if result.selection]
    assert counts == [[2, 2, 2], [6, 5, 6], [7, 3, 4], [2, 2, 2]]
    twin.check_storage()


def test_a_layer_without_a_budget_is_refused() -> None:
    twin = Twin("gqa_quest_sparse_attention", {0: Budget(1)}, 4, [LayerShape(1, 1, 8, 8)])
    request = twin.runtime.admit()
    call = twin.runtime.extend([request], [2])
    call.attend(0, *twin.draw(0, 2))
    with pytest.raises(ConfigError, match=r"layer 1, received layers \[0\]"):
        call.attend(1, *twin.draw(0, 2))


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("name", ["gqa_quest_sparse_attention", "gqa_h2o_token_sparse_attention"])
def test_ratio_budgets(name: str, ratio: float) -> None:
    """Every length from 1 to 64 pages: the share kept is the exact floor, in a ragged batch of different shares."""
    p = list_flows()[name].page_size or 2
    twin = Twin(name, Budget(1, 1, 1, ratio=ratio), p, [LayerShape(1, 2, 8, 8)])
    requests = twin.admit(3)
    twin.extend(requests, [1, 20 * p, 33 * p], compare=False)
    for _ in range(31 * p):
        twin.step(requests)
    twin.check_storage()


@pytest.mark.parametrize("name", FLOWS)
def test_dense_layers(name: str) -> None:
    twin = build(
        name, [LayerShape(2, 3, 16, 16), LayerShape(2, 3, 16, 16), LayerShape(1, 2, 8, 12)], dense_layers=[0, 2]
    )
    life(twin)
    for layer in (0, 2):
        assert not twin.pool(layer).summaries and not twin.pool(layer).state
    result = twin.step(list(twin.runtime.tables))[0]
    pages = [-(-twin.runtime.length(request) // twin.page_size) for request in twin.runtime.tables]
    assert result.selection is not None and result.selection.count.tolist() == pages and result.scores is None
