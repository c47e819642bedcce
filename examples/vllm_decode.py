"""Decode speed inside vLLM, stock or with a flow, of a model of Llama-3.1-8B's shape with random weights.

    python examples/vllm_decode.py stock 8192x8 8192x32 32768x8
    python examples/vllm_decode.py gqa_quest_sparse_attention 8192x8 8192x32 32768x8

Each case is CONTEXTxBATCH: so many requests of so many tokens are read, then decode together. On CUDA every decode step
is one CUDA graph. ``--model DIR`` takes another model, whose weights lie there; it is what works on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from typing import Any

WARM, STEPS = 8, 64
BUDGET = {"topk": 64, "sink": 1, "recent": 1}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def engine(flow: str, model: str | None, longest: int, batch: int) -> Any:
    """vLLM with the flow, or without one."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where the counters are
    import torch
    from vllm import LLM

    more: dict[str, Any] = {}
    if model is None:
        model, more["load_format"] = tempfile.mkdtemp(), "dummy"
        with open(f"{model}/config.json", "w") as file:
            json.dump(LLAMA, file)
    if flow != "stock":
        more["additional_config"] = {"kvsieve": {"flow": flow, "budget": BUDGET}}
    if torch.cuda.is_available():
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted({1, 2, 8, batch})}
        more |= {"compilation_config": graphs, "gpu_memory_utilization": 0.87}
        more |= {"block_size": 16, "max_num_batched_tokens": 16384}
        more |= {} if flow == "stock" else {"attention_backend": "CUSTOM"}
    else:
        more["enforce_eager"] = True
    return LLM(model=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=longest, max_num_seqs=batch,
               enable_prefix_caching=False, disable_log_stats=True, seed=0, **more)  # fmt: skip


def decode(llm: Any, context: int, batch: int, words: int) -> tuple[float, float]:
    """Tokens and steps a second while all requests decode."""
    from vllm import SamplingParams

    room = llm.llm_engine.model_config.max_model_len - context
    params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True, detokenize=False)
    draw = random.Random(0)
    names = [f"{context}x{batch}.{number}" for number in range(batch)]
    for name in names:
        prompt = [draw.randrange(words) for _ in range(context)]
        llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    made = dict.fromkeys(names, 0)
    begin, before, steps = 0.0, 0, 0
    while steps < STEPS:
        for one in llm.llm_engine.step():
            made[one.request_id] = len(one.outputs[0].token_ids)
        if begin:
            steps += 1
        elif min(made.values()) >= WARM:
            begin, before = time.perf_counter(), sum(made.values())
    spent = time.perf_counter() - begin
    llm.llm_engine.abort_request(names)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return (sum(made.values()) - before) / spent, steps / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flow", help="a flow, or stock for vLLM's own attention")
    parser.add_argument("cases", nargs="+", metavar="CONTEXTxBATCH")
    parser.add_argument("--model")
    chosen = parser.parse_args()
    cases = [tuple(map(int, case.split("x"))) for case in chosen.cases]
    largest = max(batch for _, batch in cases)
    # The first requests decode while the last are still read.
    longest = max(context for context, _ in cases) + WARM + STEPS + 16 * largest
    llm = engine(chosen.flow, chosen.model, longest, largest)
    words = llm.llm_engine.model_config.get_vocab_size()
    for context, batch in cases:
        tokens, steps = decode(llm, context, batch, words)
        print(f"{chosen.flow}: {batch} x {context:,}: {tokens:,.0f} tokens/s, {1e3 / steps:.2f} ms a step")
    if chosen.flow != "stock":
        from kvsieve.integrations.vllm import stats

        print(stats())


if __name__ == "__main__":
    main()
