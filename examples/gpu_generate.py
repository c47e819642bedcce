"""Decode speed of a model of Llama-3.1-8B's shape, with random weights, on a CUDA GPU: SparseCache beside sdpa with a
static cache. Every decode step is one CUDA graph.

    python examples/gpu_generate.py 1x4096 1x32768 8x32768 [--flow NAME ...]

Prints, per batch x context: tokens/s, ms a step, peak memory, and which kernels a step's time goes to.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from kvsieve import Budget, SparseCache
from kvsieve.integrations.transformers import GraphDecoder

STEPS, WARM = 64, 4
BUDGET = Budget(64, 1, 1)
OURS = ("_attend_kernel", "_merge_kernel", "_select_kernel", "_bound_kernel", "_bitmap_kernel", "_write_kernel",
        "_mass_kernel", "_evict_kernel", "_score_", "_summarize_")  # fmt: skip
PRODUCTS = ("gemm", "gemv", "nvjet", "cutlass", "splitk")
DENSE = ("flash", "fmha", "attention", "softmax")


def llama() -> Any:
    """A model of Llama-3.1-8B's shape."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072 + 1024,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        attn_implementation="kvsieve",
    )
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def static_step(model: Any, batch: int, context: int) -> Callable[[], torch.Tensor]:
    """A captured decode step on a static cache whose past is random."""
    model.set_attn_implementation("sdpa")
    cache = StaticCache(config=model.config, max_cache_len=context + STEPS + 2 * WARM)
    ids = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
    positions = torch.full_like(ids, context)

    def forward() -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, position_ids=positions, past_key_values=cache).logits
        return logits

    forward()
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(context)
    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = forward()

    def step(kept: object = cache) -> torch.Tensor:  # the graph's memory is the cache's
        positions.add_(1)
        graph.replay()
        ids.copy_(logits[:, -1].argmax(-1, keepdim=True))
        return logits

    return step


def sparse_step(model: Any, cache: SparseCache, ids: torch.Tensor, context: int) -> Callable[[], torch.Tensor]:
    """A captured decode step on a sparse cache that holds the prompt."""
    decoder = GraphDecoder(model, cache, context + STEPS + 4 * WARM)

    def step() -> torch.Tensor:
        logits = decoder.step(ids)
        ids.copy_(logits.argmax(-1, keepdim=True))
        return logits

    return step


def report(name: str, batch: int, context: int, step: Callable[[], torch.Tensor]) -> None:
    """Time steps, then look at two of them."""
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / STEPS
    memory = torch.cuda.max_memory_allocated() / 2**30
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    shares = {"linear layers": 0.0, "kvsieve": 0.0, "dense attention": 0.0, "rest": 0.0}
    for event in seen.key_averages():
        name_of = event.key.lower()
        kind = "rest"
        for words, category in ((OURS, "kvsieve"), (PRODUCTS, "linear layers"), (DENSE, "dense attention")):
            if any(word in name_of for word in words):
                kind = category
                break
        shares[kind] += event.self_device_time_total / 1e3
    parts = ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in shares.items() if ms)
    print(
        f"{batch} x {context:,}, {name}: {batch / seconds:.0f} tokens/s, {1e3 * seconds:.2f} ms a step, peak "
        f"{memory:.1f} GiB; kernels: {parts}",
        flush=True,
    )


@torch.inference_mode()
def main(*arguments: str) -> None:
    """Run all cases."""
    flows = [word for before, word in pairwise(arguments) if before == "--flow"]
    cases = [word for word in arguments if "x" in word and word.replace("x", "").isdigit()]
    if not torch.cuda.is_available():
        sys.exit("expected a CUDA GPU, received none")
    model = llama()
    for case in cases or ["1x4096"]:
        batch, context = map(int, case.split("x"))
        torch.cuda.reset_peak_memory_stats()
        report("sdpa, static cache", batch, context, static_step(model, batch, context))
        model.set_attn_implementation("kvsieve")
        first: SparseCache | None = None
        for flow in flows or ["gqa_quest_sparse_attention"]:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            cache = SparseCache(model.config, flow, BUDGET, backend="triton")
            ids = torch.randint(0, model.config.vocab_size, (batch, context), device="cuda")
            if first is None:
                start = time.perf_counter()
                logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
                torch.cuda.synchronize()
                print(f"{case}: prompt {time.perf_counter() - start:.1f} s", flush=True)
                del logits
                first = cache
            else:
                cache.copy_past(first)
            torch.cuda.reset_peak_memory_stats()
            report(flow, batch, context, sparse_step(model, cache, ids[:, :1].clone(), context))
        del first, cache
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
