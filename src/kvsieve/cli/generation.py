"""One greedy generation, measured: tokens, times, and the bytes that decode steps read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvsieve.budget import Budget
from kvsieve.cli.terminal import progress_bar
from kvsieve.errors import ConfigError
from kvsieve.flow import Flow, flow_name
from kvsieve.models import IMPLEMENTATION, positions_of
from kvsieve.retention import KEEP, Retention


@dataclass(frozen=True)
class Setup:
    """A model and the tokens that it continues; ``inputs`` holds ``input_ids`` and ``attention_mask`` [1, T]."""

    model: Any
    tokenizer: Any
    inputs: dict[str, torch.Tensor]
    max_new_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return int(self.inputs["input_ids"].shape[1])


@dataclass(frozen=True)
class StepBytes:
    """Bytes per decode step over all layers: K/V attended, fields that scores read and wrote, and dense K/V."""

    kv: float
    fields: float
    dense: float


@dataclass(frozen=True)
class Run:
    """A generation: new tokens, their text, seconds up to the first new token and from there to the last."""

    text: str
    tokens: list[int]
    prefill_seconds: float
    decode_seconds: float
    step_bytes: StepBytes | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed, prefill left out; None for a single token."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 else None


@dataclass(frozen=True)
class Parting:
    """Where two runs part: index of the first new token that differs, and what each wrote from there on."""

    index: int
    sparse: str
    dense: str


class TokenClock:
    """A Transformers streamer that notes when each token came and says how many there are."""

    def __init__(self, progress: Callable[[int, int], None], total: int) -> None:
        self.times: list[float] = []
        self._progress, self._total = progress, total

    def put(self, _tokens: torch.Tensor) -> None:
        """Called once with the prompt, then with each new token."""
        self.times.append(time.perf_counter())
        self._progress(len(self.times) - 1, self._total)

    def end(self) -> None:
        """Called after the last token."""


def prepare(model: Any, tokenizer: Any, text: str, max_new_tokens: int) -> Setup:
    """Tokenise a prompt.

    Raises:
        ConfigError: prompt and new tokens together exceed the model's positions.
    """
    encoded = tokenizer(text, return_tensors="pt")
    inputs = {name: encoded[name].to(model.device) for name in ("input_ids", "attention_mask")}
    length = inputs["input_ids"].shape[1]
    limit = positions_of(model)
    if limit is not None and length + max_new_tokens > limit:
        raise ConfigError(
            f"the prompt has {length} tokens: with {max_new_tokens} new ones expected at most {limit}, the model's "
            "positions; shorten the prompt or lower --max-new-tokens"
        )
    return Setup(model, tokenizer, inputs, max_new_tokens)


def run_sparse(
    setup: Setup,
    flow: Flow,
    budget: Budget | None,
    page_size: int,
    skip_layers: Sequence[int],
    backend: str = "eager",
    retention: Retention = KEEP,
) -> Run:
    """Generate with a flow on a backend; the run carries the bytes counted by the cache."""
    from kvsieve.integrations.transformers import SparseCache

    cache = SparseCache(
        setup.model.config,
        flow=flow,
        budget=budget,
        page_size=page_size,
        skip_layers=list(skip_layers),
        backend=backend,
        retention=retention,
    )
    setup.model.set_attn_implementation(IMPLEMENTATION)
    run = _generate(setup, flow_name(flow), past_key_values=cache)
    stats = cache.stats
    if not stats.steps:
        return run
    per_step = StepBytes(*(total / stats.steps for total in (stats.kv_bytes, stats.field_bytes, stats.dense_bytes)))
    return replace(run, step_bytes=per_step)


def run_dense(setup: Setup) -> Run:
    """Generate with the model's own dense attention and cache."""
    setup.model.set_attn_implementation("sdpa")
    return _generate(setup, "dense")


def find_parting(tokenizer: Any, sparse: Sequence[int], dense: Sequence[int]) -> Parting | None:
    """Compare the new tokens of two runs; None: they are equal. A run that ended early parts at its end."""
    if list(sparse) == list(dense):
        return None
    differing = (index for index, (a, b) in enumerate(zip(sparse, dense, strict=False)) if a != b)
    index = next(differing, min(len(sparse), len(dense)))
    return Parting(index, tokenizer.decode(list(sparse[index:])), tokenizer.decode(list(dense[index:])))


def _generate(setup: Setup, label: str, **arguments: Any) -> Run:
    end_token = setup.model.generation_config.eos_token_id
    with progress_bar(label) as progress, torch.inference_mode():
        clock = TokenClock(progress, setup.max_new_tokens)
        start = time.perf_counter()
        output = setup.model.generate(
            **setup.inputs,
            **arguments,
            max_new_tokens=setup.max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=end_token[0] if isinstance(end_token, list) else end_token,
            streamer=clock,
        )
    tokens = output[0, setup.prompt_tokens :].tolist()
    first, last = clock.times[1], clock.times[-1]
    return Run(setup.tokenizer.decode(tokens, skip_special_tokens=True), tokens, first - start, last - first)
