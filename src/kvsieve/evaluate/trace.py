"""One generation, recorded: which pages each layer and head kept at each step, and the exact attention of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvsieve.backends import get_backend
from kvsieve.backends.base import Selection
from kvsieve.budget import Budget
from kvsieve.errors import ConfigError
from kvsieve.evaluate.probe import Probe, Step
from kvsieve.flow import Flow
from kvsieve.models import positions_of


@dataclass(frozen=True)
class Loss:
    """A page that was not selected: where and when, and its share of the exact attention."""

    layer: int
    head: int
    step: int
    page: int
    mass: float


@dataclass(frozen=True)
class Trace:
    """A recorded generation of ``T`` decode steps on ``L`` layers with ``H`` KV heads and at most ``S`` pages.

    Attributes:
        flow: the flow and its arguments. page_size, budget: of the run.
        ids, pieces: every token of prompt and generation, and the same as text.
        prompt: tokens that were prefilled densely; step ``t`` feeds token ``prompt + t``.
        forced: steps whose token was given; the rest were generated.
        layers: indices of the L layers.
        mass: float32 [L, H, T, S], the share of the exact attention each page would get; 0 where there is no page.
        kept: bool [L, H, T, S], pages attended.
    """

    flow: str
    page_size: int
    budget: Budget
    ids: list[int]
    pieces: list[str]
    prompt: int
    forced: int
    layers: list[int]
    mass: torch.Tensor
    kept: torch.Tensor

    @property
    def steps(self) -> int:
        """T."""
        return self.mass.shape[2]

    @property
    def captured(self) -> float:
        """Share of the exact attention that fell on kept pages, over everything."""
        return captured(self.mass, self.kept)

    def page_text(self, page: int) -> str:
        """The tokens of a page as text."""
        return "".join(self.pieces[page * self.page_size : (page + 1) * self.page_size])

    def losses(self, count: int) -> list[Loss]:
        """The pages whose loss mattered most: largest exact mass not kept. Each page once, at its worst."""
        lost = torch.where(self.kept, 0.0, self.mass)
        worst, place = lost.permute(3, 0, 1, 2).flatten(1).max(1)
        found = []
        for page in torch.sort(worst, descending=True, stable=True).indices[:count].tolist():
            if worst[page] > 0:
                layer, rest = divmod(int(place[page]), lost.shape[1] * self.steps)
                head, step = divmod(rest, self.steps)
                found.append(Loss(self.layers[layer], head, step, page, float(worst[page])))
        return found


def captured(mass: torch.Tensor, kept: torch.Tensor) -> float:
    """Share of the exact attention ``mass`` that fell on kept pages; both of one shape."""
    return float(torch.where(kept, mass, 0.0).sum() / mass.sum())


def record(
    model: Any,
    tokenizer: Any,
    flow: Flow,
    budget: Budget,
    page_size: int,
    prompt: Sequence[int],
    forced: Sequence[int],
    new_tokens: int,
    *,
    backend: str = "eager",
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Prefill ``prompt`` densely, feed the ``forced`` tokens, then generate greedily; record every decode step.

    Raises:
        ConfigError: prompt and tokens exceed the model's positions.
    """
    from kvsieve.integrations.transformers import SparseCache

    total = len(forced) + new_tokens
    limit = positions_of(model)
    if limit is not None and len(prompt) + total > limit:
        raise ConfigError(f"expected at most {limit} tokens, the model's positions, received {len(prompt) + total}")
    seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def observe(step: Step, selection: Selection) -> None:
        seen.setdefault(id(step.pool), []).append((step.mass[0].cpu(), step.selected(selection)[0].cpu()))

    cache = SparseCache(model.config, flow, budget, page_size, backend=Probe(get_backend(backend), observe))
    fed: list[int] = []
    with torch.inference_mode():
        logits = model(_row(model, prompt), past_key_values=cache, logits_to_keep=1).logits
        for index in range(total):
            fed.append(forced[index] if index < len(forced) else int(logits[0, -1].argmax()))
            logits = model(_row(model, fed[-1:]), past_key_values=cache).logits
            if progress is not None:
                progress(index + 1, total)
    recorded = {index: seen[id(layer.pool)] for index, layer in cache.runtime.layers.items() if id(layer.pool) in seen}
    layers = sorted(recorded)
    mass = torch.stack([_stacked([one for one, _ in recorded[layer]]) for layer in layers])
    kept = torch.stack([_stacked([one for _, one in recorded[layer]]) for layer in layers])
    ids = [*prompt, *fed]
    pieces = [tokenizer.decode([token]) for token in ids]
    return Trace(repr(flow), page_size, budget, ids, pieces, len(prompt), len(forced), layers, mass, kept)


def _row(model: Any, ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor([list(ids)], device=model.device)


def _stacked(steps: Sequence[torch.Tensor]) -> torch.Tensor:
    """[H, S_t] per step -> [H, T, S], padded with zeros."""
    width = max(one.shape[-1] for one in steps)
    return torch.stack([torch.nn.functional.pad(one, (0, width - one.shape[-1])) for one in steps], 1)
