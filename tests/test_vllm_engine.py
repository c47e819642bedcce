"""The plug-in in a running vLLM on a CPU: stock answers under budget, the reference's steps above it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_world import (
    ARCHITECTURES,
    Answer,
    answer,
    answers,
    engine,
    free_blocks,
    same_but_near_ties,
    sampling,
    serving,
    tokens,
    write_model,
)

# isort: split
# What needs vLLM comes behind the module that skips without it.
from kvsieve.errors import KvsieveError
from kvsieve.integrations.vllm.layer import SieveImpl
from kvsieve.verify.engine_steps import StepOracle
from kvsieve.verify.unselected import UnselectedNaN

QUEST: dict[str, Any] = {
    "flow": "gqa_quest_sparse_attention",
    "page_size": 8,
    "budget": {"topk": 2, "sink": 1, "recent": 2, "ratio": 0.25},
}
AMPLE: dict[str, Any] = {**QUEST, "budget": {"topk": 1000}}
TOKENS: dict[str, Any] = {
    "flow": "gqa_h2o_token_sparse_attention",
    "budget": {"topk": 20, "sink": 4, "recent": 9},
}
H2O: dict[str, Any] = {**QUEST, "flow": "h2o"}
RAGGED = [
    tokens(*where) for where in ((0, 5), (100, 500), (7, 127), (50, 333), (500, 33), (900, 320), (40, 64), (3, 1))
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(name, folder) for name in ARCHITECTURES}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_stock_answers_under_budget(models: dict[str, Path], architecture: str) -> None:
    with serving(models[architecture]) as llm:
        stock = answers(llm, RAGGED)
    with serving(models[architecture], AMPLE) as llm:
        mine = answers(llm, RAGGED)
        counted = engine().counters.as_dict()
    equal = sum(same_but_near_ties(one, other) for one, other in zip(stock, mine, strict=True))
    assert equal >= 0.8 * sum(len(one.tokens) for one in stock)
    assert not counted["sparse_rows"]
    assert counted["dense_rows"] == (0 if architecture == "mistral_sliding" else 8 * 23)


def test_stock_answers_of_chunks_and_cached_prefixes(models: dict[str, Path]) -> None:
    """Prompts in chunks beside requests that decode; then once more, on cached prefixes."""
    options = {"enable_prefix_caching": True, "max_num_batched_tokens": 100, "max_num_seqs": 4}
    with serving(models["llama"], **options) as llm:
        stock = [answers(llm, RAGGED) for _ in range(2)]
    with serving(models["llama"], AMPLE, **options) as llm:
        mine = [answers(llm, RAGGED) for _ in range(2)]
    pairs = [pair for both in zip(stock, mine, strict=True) for pair in zip(*both, strict=True)]
    equal = sum(same_but_near_ties(one, other) for one, other in pairs)
    assert equal >= 0.8 * sum(len(one.tokens) for one, _ in pairs)


def test_nothing_changes_without_settings_and_in_skipped_layers(models: dict[str, Path]) -> None:
    with serving(models["llama"]) as llm:
        stock = answers(llm, RAGGED)
        assert not any(isinstance(layer.impl, SieveImpl) for layer in _attention(llm))
    with serving(models["llama"], {**QUEST, "skip_layers": [0, 1, 2]}) as llm:
        assert answers(llm, RAGGED) == stock
        assert not engine().counters.sparse_rows
    with serving(models["llama"], {**QUEST, "skip_layers": [0]}) as llm:
        assert answers(llm, RAGGED) != stock
        assert engine().counters.sparse_rows


@pytest.mark.parametrize("architecture", ["llama", "llama_g7_d80", "gemma2"])
@pytest.mark.parametrize("settings", [QUEST, TOKENS], ids=["quest", "token state"])
def test_steps_are_the_references(models: dict[str, Path], architecture: str, settings: dict[str, Any]) -> None:
    """Concurrent ragged requests, prompts in chunks, prefix hits, more requests than places."""
    options = {"enable_prefix_caching": True, "max_num_batched_tokens": 200, "max_num_seqs": 4}
    with serving(models[architecture], settings, **options) as llm:
        layers = [impl.index for impl in (layer.impl for layer in _attention(llm)) if hasattr(impl, "index")]
        oracle = engine().recorder = StepOracle(layers)
        prompts = [*RAGGED, [*RAGGED[1][:320], *tokens(2000, 30)], [*RAGGED[1][:416], *tokens(2100, 5)]]
        before = free_blocks(llm)
        answers(llm, prompts, new=9)
        assert free_blocks(llm) == before
    assert oracle.steps == 8 * len(prompts) * len(layers)
    assert oracle.numbers.checked["score"] > 100
    assert oracle.numbers.agreed >= 0.97 * oracle.numbers.selections
    if settings is TOKENS:
        assert oracle.numbers.checked["state"] > 1000


@pytest.mark.parametrize("flow", ["h2o", "tova", "snapkv"])
def test_mass_is_the_references(models: dict[str, Path], flow: str) -> None:
    """Seeded by prompts in chunks, fed by every step, under another order of requests and on reused blocks."""
    options = {"max_num_batched_tokens": 200, "max_num_seqs": 4}
    with serving(models["llama"], {**QUEST, "flow": flow}, **options) as llm:
        oracle = engine().recorder = StepOracle([0, 2])
        answers(llm, RAGGED, new=9)
    assert oracle.requests == 2 * len(RAGGED) and oracle.steps == 2 * 8 * len(RAGGED)
    assert oracle.numbers.checked["mass"] == 2 * 2 * oracle.steps
    assert oracle.numbers.checked["score"] > 100


@pytest.mark.parametrize("settings", [QUEST, TOKENS, H2O], ids=["quest", "token state", "mass"])
def test_preemption(models: dict[str, Path], settings: dict[str, Any]) -> None:
    """A cache too small for all: what is preempted is computed anew, as a prompt, and its state starts afresh."""
    prompts = [tokens(40 * i, 86 + 3 * i) for i in range(5)]
    with serving(models["llama"], settings, num_gpu_blocks_override=17, max_model_len=160) as llm:
        oracle = engine().recorder = StepOracle([1])
        before = free_blocks(llm)
        answers(llm, prompts, new=40)
        assert free_blocks(llm) == before
    assert oracle.requests > len(prompts), "no request was preempted"


@pytest.mark.parametrize("settings", [QUEST, TOKENS], ids=["quest", "token state"])
def test_together_as_alone_and_aborts(models: dict[str, Path], settings: dict[str, Any]) -> None:
    with serving(models["llama"], settings) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in RAGGED]
        together = answers(llm, RAGGED)
        left = _abort_in_flight(llm, RAGGED, aborted=(1, 4))
    for place, one in enumerate(alone):
        same_but_near_ties(one, together[place])
        if place in left:
            same_but_near_ties(one, left[place])
    assert sum(one.tokens == other.tokens for one, other in zip(alone, together, strict=True)) >= 6


def test_unselected_pages_are_not_read(models: dict[str, Path]) -> None:
    with serving(models["llama"], QUEST) as llm:
        expected = answers(llm, RAGGED)
    with serving(models["llama"], QUEST) as llm:
        spoiled = engine().backend = UnselectedNaN(engine().backend)
        assert answers(llm, RAGGED) == expected
    assert spoiled.overwritten > 1000


def test_audit_and_counters(models: dict[str, Path]) -> None:
    with serving(models["llama"], {**QUEST, "audit_every": 3}) as llm:
        answers(llm, RAGGED)
        counted = engine().counters
    assert counted.sparse_rows + counted.dense_rows == 8 * 23
    assert counted.prefill_tokens == sum(map(len, RAGGED))
    assert counted.sparse_steps // 3 == counted.audits > 0
    assert 0.1 < counted.as_dict()["captured_mass"] <= 1


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({"flow": "quest"}, {}, "budget"),
        ({**QUEST, "flow": "no_such_flow"}, {}, "no_such_flow"),
        ({**QUEST, "page_size": 5}, {}, "does not divide"),
        ({**QUEST, "skip_layers": [3]}, {}, "[3]"),
        (H2O, {"enable_prefix_caching": True}, "--no-enable-prefix-caching"),
        (QUEST, {"kv_cache_dtype": "fp8"}, "kv-cache-dtype"),
    ],
)
def test_wrong_configurations(
    models: dict[str, Path], settings: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(KvsieveError, match=words.replace("[", r"\[")), serving(models["llama"], settings, **options):
        pass


def _attention(llm: Any) -> list[Any]:
    """The attention layers of an engine in this process."""
    core = llm.llm_engine.engine_core.engine_core
    context = core.model_executor.driver_worker.worker.model_runner.compilation_config.static_forward_context
    return list(context.values())


def _abort_in_flight(llm: Any, prompts: list[list[int]], aborted: tuple[int, ...]) -> dict[int, Answer]:
    """Serve prompts, end some of them after a few steps; returns the answers of the others."""
    front, done = llm.llm_engine, {}
    before = free_blocks(llm)
    for place, prompt in enumerate(prompts):
        front.add_request(f"request {place}", {"prompt_token_ids": prompt}, sampling(24))
    steps = 0
    while front.has_unfinished_requests():
        for result in front.step():
            if result.finished:
                done[int(result.request_id.split()[1].split("-")[0])] = answer(result)
        steps += 1
        if steps == 6:
            front.abort_request([f"request {place}" for place in aborted])
    assert free_blocks(llm) == before
    assert sorted(done) == [place for place in range(len(prompts)) if place not in aborted]
    return done
