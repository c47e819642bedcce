"""Checks of the Transformers integration: equal to the model's own attention wherever nothing is left out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from kvsieve.budget import Budget
from kvsieve.dtypes import default_dtype
from kvsieve.verify.checks import Numbers, compare
from kvsieve.verify.poison import poisoned_pools
from kvsieve.verify.subject import Subject
from kvsieve.verify.suite import Check

AMPLE = Budget(1000)
TIGHT = Budget(1, 1, 1)
TOLERANCE = 1e-4
"""Of the largest logit: three layers of a random model, whose roundings no bound is derived for."""

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"sliding_window": 7, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 5},
    "GptOss": {
        "sliding_window": 7,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
}


def tiny_model(family: str) -> Any:
    """A model with random weights, large enough for attention to matter."""
    import transformers

    with torch.random.fork_rng(devices=[]), default_dtype(torch.float32):
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 or "sinks" in name:
                    parameter.normal_(0, 0.3 if "proj" in name else 0.6)
    return model


class _Pair:
    """A model with SparseCache beside the same one with its own attention and cache."""

    def __init__(self, family: str, subject: Subject, budget: Budget, skip_layers: tuple[int, ...] = ()) -> None:
        from transformers import DynamicCache

        from kvsieve.integrations.transformers import IMPLEMENTATION, SparseCache

        self.own, self.name, self.numbers = tiny_model(family), family, Numbers()
        self.own.set_attn_implementation("sdpa" if family == "Llama" else "eager")
        self.ours = copy.deepcopy(self.own)
        self.ours.set_attn_implementation(IMPLEMENTATION)
        self.own_cache = DynamicCache(config=self.own.config)
        self.cache = SparseCache(
            self.ours.config, subject.flow, budget, subject.page_size, skip_layers, backend=subject.backend
        )
        self.random = torch.Generator().manual_seed(subject.seed)

    @torch.no_grad()
    def forward(self, mask: torch.Tensor, new: int, what: str) -> None:
        """New tokens for every row, on both sides; ``mask`` [B, L] covers the cached tokens too."""
        ids = torch.randint(1, SIZES["vocab_size"], (len(mask), new), generator=self.random)
        real = mask[:, -new:].bool()
        logits = [
            model(ids, attention_mask=mask, past_key_values=cache).logits[real]
            for model, cache in ((self.ours, self.cache), (self.own, self.own_cache))
        ]
        bound = torch.full(logits[1].shape, TOLERANCE * float(logits[1].abs().max()), dtype=torch.float64)
        compare(self.numbers, "output", f"{self.name} logits, {what}", logits[0], logits[1].double(), bound)


def _generation(pair: _Pair) -> Numbers:
    """A padded batch: the prompt in two chunks, then steps."""
    lengths, width = (13, 4, 9), 13
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    with poisoned_pools():
        pair.forward(mask, width, "prompt")
        for new, what in ((3, "second chunk"), (1, "step"), (1, "step"), (1, "step")):
            mask = torch.cat([mask, torch.ones(len(lengths), new, dtype=mask.dtype)], 1)
            pair.forward(mask, new, what)
    return pair.numbers


def _beams(pair: _Pair) -> Numbers:
    """Beam search and a draft that is rolled back."""
    rows, order = 3, torch.tensor([1, 2, 1])
    lengths = iter((11, 1, 1, 4))

    def forward(length: int, what: str) -> int:
        length += (new := next(lengths))
        pair.forward(torch.ones(rows, length, dtype=torch.int64), new, what)
        return length

    with poisoned_pools():
        length = forward(forward(0, "prompt"), "step")
        for cache in (pair.cache, pair.own_cache):
            cache.reorder_cache(order)  # type: ignore[arg-type]
        length = forward(forward(length, "step after reorder"), "draft")
        for cache in (pair.cache, pair.own_cache):
            cache.crop(-3)
        lengths = iter((1,))
        forward(length - 3, "step after crop")
    return pair.numbers


def _check(family: str, run: Callable[[_Pair], Numbers], budget: Budget, skip: tuple[int, ...] = ()) -> Any:
    return lambda subject: run(_Pair(family, subject, budget, skip))


TRANSFORMERS: tuple[Check, ...] = (
    Check(
        "transformers: Llama",
        "a padded batch under budget is the model's own attention",
        _check("Llama", _generation, AMPLE),
    ),
    Check(
        "transformers: beams",
        "reordered rows and a rolled-back draft are the model's own attention",
        _check("Llama", _beams, AMPLE),
    ),
    Check(
        "transformers: skipped layers",
        "layers that are skipped stay dense above budget",
        _check("Llama", _generation, TIGHT, (0, 1, 2)),
    ),
    Check("transformers: Gemma2", "soft-cap and sliding window", _check("Gemma2", _generation, AMPLE)),
    Check("transformers: GptOss", "sink logits and sliding window", _check("GptOss", _generation, AMPLE)),
)
"""For flows whose page size is free; needs transformers."""
