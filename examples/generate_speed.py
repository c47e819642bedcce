"""Decode speed of SmolLM2 with a sparse cache beside Transformers' own dynamic and static ones.

    python examples/generate_speed.py TEXT [CONTEXT ...]

Medians over single steps, after a few that warm up; every cache continues the same prompt.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from kvsieve import Budget, SparseCache
from kvsieve.models import load_model

WARM, STEPS, FLOW = 8, 60, "gqa_quest_sparse_attention"


def caches(config: Any, context: int) -> dict[str, tuple[str, Any]]:
    """Name to attention implementation and an empty cache."""
    budget = Budget.tokens(context // 8, 16)
    return {
        "dynamic": ("sdpa", DynamicCache(config=config)),
        "static": ("sdpa", StaticCache(config=config, max_cache_len=context + WARM + STEPS)),
        "sparse": ("kvsieve", SparseCache(config, FLOW, budget, backend="compiled")),
    }


@torch.inference_mode()
def step_times(model: Any, ids: torch.Tensor, cache: Any) -> list[float]:
    """Seconds of single decode steps after the prompt ``ids`` [1, T]."""
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    times = []
    for _ in range(WARM + STEPS):
        start = time.perf_counter()
        logits = model(logits.argmax(-1), past_key_values=cache).logits
        times.append(time.perf_counter() - start)
    return times[WARM:]


def main(path: str, *contexts: str) -> None:
    """Print tokens per second for every context and cache."""
    model, tokenizer = load_model("smollm2")
    ids = tokenizer(Path(path).read_text(), return_tensors="pt")["input_ids"]
    for context in [int(one) for one in contexts] or [4096]:
        for name, (implementation, cache) in caches(model.config, context).items():
            model.set_attn_implementation(implementation)
            median = statistics.median(step_times(model, ids[:, :context], cache))
            print(f"{context} tokens, {name}: {1 / median:.1f} tokens/s ({1e3 * median:.1f} ms a step)", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
