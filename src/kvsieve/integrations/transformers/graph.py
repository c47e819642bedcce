"""A model's decode steps as one CUDA graph, with a SparseCache."""

from __future__ import annotations

import torch

from kvsieve.call import Call
from kvsieve.errors import ConfigError, check_integer
from kvsieve.integrations.transformers.cache import SparseCache
from kvsieve.stepgraph import StepGraph


class GraphDecoder:
    """Decode steps of a causal language model: the second is captured, later ones are replayed.

    Args:
        model: its ``attn_implementation`` is "kvsieve".
        cache: holds the prompt of every row.
        until: tokens that a row may reach, prompt included.

    Raises:
        ConfigError: the cache has no past, or sliding-window layers; or a row has ``until`` tokens already.
    """

    def __init__(self, model: torch.nn.Module, cache: SparseCache, until: int) -> None:
        self.model, self.cache = model, cache
        runtime, requests = cache.graph_runtime()
        check_integer("until", until, max(cache.lengths) + 1)
        device = next(model.parameters()).device
        self._ids = torch.zeros(len(requests), 1, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._ids)
        self._ran = False
        self._graph: StepGraph[torch.Tensor] = StepGraph(runtime, requests, until, self._forward, device)

    @torch.inference_mode()
    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows' next tokens [B, 1] -> logits [B, vocabulary], which the next step overwrites."""
        if ids.shape != self._ids.shape:
            raise ConfigError(f"step: expected ids {list(self._ids.shape)}, received {list(ids.shape)}")
        self._ids.copy_(ids)
        positions = torch.tensor(self.cache.lengths)[:, None]
        self._positions.copy_(positions.pin_memory() if ids.is_cuda else positions, non_blocking=True)
        self._ran = False
        logits = self._graph.step()
        if not self._ran:
            self.cache.join_step(None)
        return logits

    def _forward(self, call: Call) -> torch.Tensor:
        self._ran = True
        self.cache.join_step(call)
        logits: torch.Tensor = self.model(
            input_ids=self._ids, position_ids=self._positions, past_key_values=self.cache, use_cache=True
        ).logits
        return logits[:, -1]
