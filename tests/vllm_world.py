"""Engines of vLLM in this process, with tiny random models, and how their answers are compared."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # plug-in and engine live in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

pytest.importorskip("vllm")
import transformers
from vllm import LLM, SamplingParams

from kvsieve.integrations.vllm.engine import Engine, engines

VOCABULARY = 199
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_g7_d80": ("Llama", {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 80}),
    "mistral_sliding": ("Mistral", {"sliding_window": 40}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 40,
            "attn_logit_softcapping": 1.5,
            "query_pre_attn_scalar": 5,
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
        },
    ),
}
NEAR_TIE = 0.05
"""Of log-probabilities: what bfloat16 models that add up in another order may differ by."""


def write_model(architecture: str, folder: Path) -> Path:
    """A random model whose attention matters, as safetensors."""
    family, changes = ARCHITECTURES[architecture]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3 if "proj" in name else 0.1 if "head" in name else 0.6)
    target = folder / architecture
    model.save_pretrained(target)
    return target


@contextmanager
def serving(model: Path, settings: dict[str, Any] | None = None, **options: Any) -> Iterator[LLM]:
    """An engine with or without the plug-in's settings."""
    defaults: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "enforce_eager": True,
        "block_size": 32,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 200,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "skip_tokenizer_init": not (model / "tokenizer.json").exists(),
    }
    extra = {} if settings is None else {"additional_config": {"kvsieve": settings}}
    llm = LLM(model=str(model), **{**defaults, **extra, **options})
    _ALIVE.append(llm)
    yield llm


_ALIVE: list[LLM] = []
"""One that dies takes the process groups with it, which the next one needs."""


def engine() -> Engine:
    """The plug-in's part of the newest engine."""
    return engines()[-1]


def tokens(start: int, count: int) -> list[int]:
    """A prompt of a fixed pseudo-random text."""
    return [(i * i * 7 + 3 * i + i // 11) % (VOCABULARY - 3) + 2 for i in range(start, start + count)]


@dataclass(frozen=True)
class Answer:
    """Generated tokens, and the log-probabilities of the best ones in each place."""

    tokens: list[int]
    best: list[dict[int, float]]


def sampling(new: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, logprobs=5, detokenize=False)


def answers(llm: LLM, prompts: Sequence[list[int]], new: int = 24) -> list[Answer]:
    """Greedy answers to prompts that are served together."""
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = llm.generate(requests, sampling(new), use_tqdm=False)  # type: ignore[arg-type]
    return [answer(result) for result in results]


def answer(result: Any) -> Answer:
    """What a request of vLLM came to."""
    output = result.outputs[0]
    best = [{token: entry.logprob for token, entry in place.items()} for place in output.logprobs]
    return Answer(list(output.token_ids), best)


def same_but_near_ties(one: Answer, other: Answer, near: float = NEAR_TIE) -> int:
    """Check that two answers are equal, or part where both tokens are nearly as likely; returns how many are equal."""
    for place, (mine, yours) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        for token, expected in one.best[place].items():
            if token in other.best[place]:
                assert abs(other.best[place][token] - expected) <= 2 * near, f"token {place}: log-probabilities"
        if mine != yours:
            gap = one.best[place][mine] - one.best[place].get(yours, float("-inf"))
            assert gap <= near, f"token {place}: {mine} or {yours}, apart by {gap:.3f} in log-probability"
            return place
    return len(one.tokens)


def free_blocks(llm: LLM) -> int:
    """Blocks that no request holds."""
    core: Any = llm.llm_engine.engine_core
    return int(core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
