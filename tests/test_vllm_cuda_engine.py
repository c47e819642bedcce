"""An engine of vLLM on a CPU that runs the backend for CUDA: its runner and scheduler, and stand-ins for its kernels.

Every decode step of a layer is held against the float64 reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_world import Answer, answers, engine, free_blocks, same_but_near_ties, serving, tokens, write_model

# isort: split
# What needs vLLM comes behind the module that skips without it.
from vllm.model_executor.layers.attention import Attention
from vllm.plugins import load_general_plugins
from vllm.v1.attention import selector
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from kvsieve.integrations.vllm import BACKEND
from kvsieve.integrations.vllm.cuda import SieveFlashImpl
from kvsieve.integrations.vllm.engine import Engine
from kvsieve.integrations.vllm.planner import StepPlanner
from kvsieve.verify.engine_steps import StepOracle
from vllm_stand_ins import plain_attention, plain_storing

QUEST: dict[str, Any] = {
    "flow": "gqa_quest_sparse_attention",
    "page_size": 16,
    "budget": {"topk": 1, "sink": 1, "recent": 1},
    "skip_layers": [1],
    "backend": "eager",
}
H2O: dict[str, Any] = {**QUEST, "flow": "h2o", "skip_layers": []}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(FlashAttentionImpl, "forward", plain_attention)
    monkeypatch.setattr(FlashAttentionImpl, "do_kv_cache_update", plain_storing)
    load_general_plugins()
    chosen = selector._cached_get_attn_backend  # vLLM remembers what it chose for an engine of this process
    register_backend(AttentionBackendEnum.CPU_ATTN, "vllm_stand_ins.StandInBackend")
    chosen.cache_clear()
    yield
    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    chosen.cache_clear()


EAGER: dict[str, Any] = {**QUEST, "budget": {"topk": 2, "sink": 1, "recent": 2, "ratio": 0.25}}
RAGGED = [tokens(*where) for where in ((0, 5), (100, 500), (7, 127), (50, 333), (500, 33), (3, 1))]


@pytest.mark.parametrize("graphs", [False, True])
def test_an_engine_that_runs_it(model: Path, standing_in: None, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts beside decoding requests, prefix hits, blocks that are reused: every step of layer 0 is the
    reference's. Also with plans as graphs need them, though here nothing is captured."""
    planned, captured = [], StepPlanner.captured
    monkeypatch.setattr(StepPlanner, "captured", lambda *all: (planned.append(all), captured(*all))[1])
    if graphs:
        monkeypatch.setattr("kvsieve.integrations.vllm.cuda.captures_decode_steps", lambda config: True)
        monkeypatch.setattr(Engine, "capturable", True)
    options = {
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 96,
        "num_gpu_blocks_override": 32,
        "max_model_len": 640,
    }
    with serving(model, EAGER, **options) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert all(isinstance(one.impl, SieveFlashImpl) for one in layers if isinstance(one, Attention))
        flow = engine()
        oracle = flow.recorder = StepOracle([0])
        first = answers(llm, RAGGED, 40)
        again = answers(llm, RAGGED[1:3], 20)
        flow.recorder = None
    assert oracle.steps >= 39 * 6 and oracle.numbers.selections > 100 and flow.counters.sparse_steps
    assert bool(planned) == graphs
    for one, other in zip(again, first[1:3], strict=True):
        same_but_near_ties(one, Answer(other.tokens[:20], other.best[:20]))


@pytest.mark.parametrize("settings", [QUEST, H2O], ids=["quest", "mass"])
def test_preemption(model: Path, standing_in: None, settings: dict[str, Any]) -> None:
    """A cache too small for all: what is preempted is computed anew, as a prompt, and its state starts afresh."""
    prompts = [tokens(40 * i, 86 + 3 * i) for i in range(5)]
    options = {"num_gpu_blocks_override": 17, "max_model_len": 160, "max_num_batched_tokens": 160}
    with serving(model, settings, **options) as llm:
        oracle = engine().recorder = StepOracle([0])
        before = free_blocks(llm)
        answers(llm, prompts, new=40)
        assert free_blocks(llm) == before
    assert oracle.requests > len(prompts), "no request was preempted"
    assert oracle.numbers.checked.get("mass", 0) > 100 or settings is QUEST


def test_an_engine_under_budget_answers_as_without(model: Path, standing_in: None) -> None:
    with serving(model) as llm:
        stock = answers(llm, RAGGED)
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert all(type(one.impl) is FlashAttentionImpl for one in layers if isinstance(one, Attention))
    with serving(model, {**EAGER, "budget": {"topk": 1000}}) as llm:
        mine = answers(llm, RAGGED)
        assert engine().counters.dense_rows and not engine().counters.sparse_rows
    assert mine == stock
