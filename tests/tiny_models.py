"""Randomly initialised models of the supported architectures, small enough to run in a moment."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_mha_d20": ("Llama", {"num_key_value_heads": 6, "head_dim": 20}),
    "qwen2": ("Qwen2", {"head_dim": None, "hidden_size": 42, "num_attention_heads": 7, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {}),
    "smollm3": ("SmolLM3", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_sliding": ("Mistral", {"sliding_window": 11}),
    "qwen2_mixed": (
        "Qwen2",
        {"head_dim": None, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "gemma2": ("Gemma2", {"sliding_window": 9, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 5}),
    "gpt_oss": (
        "GptOss",
        {
            "sliding_window": 9,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
}


def build(architecture: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model with ``attn_implementation="kvsieve"``, weights large enough for attention to matter."""
    family, changes = ARCHITECTURES[architecture]
    arguments = {
        key: value for key, value in {**COMMON, **changes}.items() if not (key == "head_dim" and value is None)
    }
    config = getattr(transformers, f"{family}Config")(**arguments)
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25 if "proj" in name else 0.5)
            elif "sinks" in name:
                parameter.normal_(0, 1)
    model = model.to(dtype).eval()
    model.set_attn_implementation("kvsieve")
    return model
