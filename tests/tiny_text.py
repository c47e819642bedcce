"""A tiny random model on disk with a tokenizer of one token a byte, and a text of seeded words."""

from __future__ import annotations

import random
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

LAYERS, KV_HEADS, GROUP, HEAD_DIM = 2, 2, 3, 12


def save_tiny(directory: Path, seed: int = 0) -> Path:
    """A Llama of two layers, G = 3 and head_dim 12, weights large enough for attention to matter."""
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()))
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet), hidden_size=36, intermediate_size=40, num_hidden_layers=LAYERS,
        num_attention_heads=GROUP * KV_HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        max_position_embeddings=1024, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3 if "proj" in name else 0.6)
    model.save_pretrained(directory)
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


def words(count: int, seed: int = 0) -> str:
    """``count`` made-up words in sentences."""
    rng = random.Random(seed)
    made = ["".join(rng.choice("abcdefghij") for _ in range(rng.randint(2, 7))) for _ in range(count)]
    return " ".join(word + "." * (i % 9 == 8) for i, word in enumerate(made))
