"""What the layers of one vLLM engine share in a process: settings, traced flows, counters."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.backends import Backend, get_backend
from kvsieve.errors import ConfigError
from kvsieve.flow import extra_parameters
from kvsieve.graph import FlowGraphs, Geometry
from kvsieve.integrations.vllm.config import Settings, settings_from
from kvsieve.integrations.vllm.counters import Counters
from kvsieve.layers import Layers


class Engine:
    """Settings, the flow as its backend runs it, and counters."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.backend: Backend = get_backend(settings.backend)
        self.counters = Counters()
        self._layers = Layers(
            settings.flow, settings.budget, settings.page_size, settings.skip_layers, self.backend, settings.flow.mass
        )

    def flow_for(
        self, layer: int, head_dim: int, group: int, scale: float, device: torch.device
    ) -> tuple[FlowGraphs, Any]:
        """The flow for a layer, traced and prepared."""
        wanted = extra_parameters(self.settings.flow)
        geometry = Geometry(
            self.settings.page_size,
            head_dim,
            head_dim,
            group,
            scale if "scale" in wanted else None,
            layer if "layer" in wanted else 0,
        )
        return self._layers.prepared(geometry, device)


_ENGINES: dict[str, Engine] = {}


def engine_for(vllm_config: Any) -> Engine | None:
    """The engine that a vLLM configuration asks for, made once in a process; None without settings.

    Raises:
        ConfigError: the settings cannot be honoured.
    """
    name = vllm_config.instance_id
    if name not in _ENGINES:
        settings = settings_from(vllm_config.additional_config)
        if settings is None:
            return None
        refuse_what_vllm_lacks(settings, vllm_config)
        _ENGINES[name] = Engine(settings)
    return _ENGINES[name]


def engines() -> list[Engine]:
    """The engines of this process, the oldest first."""
    return list(_ENGINES.values())


def refuse_what_vllm_lacks(settings: Settings, vllm_config: Any) -> None:
    """Refuse a flow or an engine option that the plug-in cannot honour.

    Raises:
        ConfigError: with expected, received and the remedy.
    """
    flow, cache = settings.flow, vllm_config.cache_config
    if flow.mass is not None or flow.init_state is not None:
        raise ConfigError(
            f"flow {flow!r} keeps state or attention mass per request, which the vLLM plug-in does not carry yet: "
            "expected a flow of summaries only, such as gqa_quest_sparse_attention"
        )
    if cache.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise ConfigError(
            f"kv_cache_dtype: expected auto (K and V in the model's own dtype), received {cache.cache_dtype}; leave "
            "--kv-cache-dtype out"
        )
