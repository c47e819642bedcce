"""What the layers of one vLLM engine share in a process: settings, traced flows, counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvsieve.backends import Backend, get_backend
from kvsieve.backends.base import Selection
from kvsieve.flow import extra_parameters
from kvsieve.graph import FlowGraphs, Geometry
from kvsieve.integrations.vllm.cache import PagePool
from kvsieve.integrations.vllm.config import Settings, settings_from
from kvsieve.integrations.vllm.counters import Counters, export
from kvsieve.integrations.vllm.fixed import FixedDecoding
from kvsieve.integrations.vllm.limits import refuse_backend, refuse_what_vllm_lacks
from kvsieve.integrations.vllm.plan import Decoding
from kvsieve.layers import Layers
from kvsieve.plan import Quota


class Recorder(Protocol):
    """Sees what decode steps did; only checks set one."""

    def step(
        self,
        impl: Any,
        pool: PagePool,
        rows: Decoding | FixedDecoding,
        quota: Quota,
        q: torch.Tensor,
        scores: torch.Tensor | None,
        selection: Selection,
        out: torch.Tensor,
        lse: torch.Tensor,
        mass_scales: Sequence[float] | None,
    ) -> None:
        """A layer's decode step: q, out [R, H, G, D], lse [R, H, G], scores [Rs, H, W].

        ``mass_scales`` [R]: what stored mass is multiplied by after it, if there is mass.
        """

    def prompt(self, impl: Any, pool: PagePool, pages: torch.Tensor, length: int, q: torch.Tensor) -> None:
        """Prompt queries [n, H, G, D] that seed mass, the last of a request's ``length`` tokens in ``pages``."""


class Engine:
    """Settings, the flow as its backend runs it, counters."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.backend: Backend = get_backend(settings.backend)
        self.counters = Counters()
        self.recorder: Recorder | None = None
        self._layers = Layers(
            settings.flow, settings.budget, settings.page_size, settings.skip_layers, self.backend, settings.flow.mass
        )

    @property
    def stateful(self) -> bool:
        """Whether the flow keeps state of requests."""
        return self.settings.flow.init_state is not None or self.settings.flow.mass is not None

    @property
    def capturable(self) -> bool:
        """Whether decode steps can be CUDA graphs: their kernels take no number from the host, and no state has to be
        followed there."""
        return self.settings.backend == "triton" and not self.stateful

    def flow_for(
        self, layer: int, head_dim: int, group: int, scale: float, device: torch.device
    ) -> tuple[FlowGraphs, Any]:
        """The flow for a layer, traced and prepared.

        Raises:
            FlowError, ConfigError: the flow breaks a rule, or the backend refuses it.
        """
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
        device = vllm_config.device_config.device_type
        settings = settings_from(vllm_config.additional_config, device)
        if settings is None:
            return None
        refuse_what_vllm_lacks(settings, vllm_config)
        refuse_backend(settings, device)
        export()
        _ENGINES[name] = Engine(settings)
    return _ENGINES[name]


def engines() -> list[Engine]:
    """The engines of this process, the oldest first."""
    return list(_ENGINES.values())
