"""vLLM's CPU attention backend, with decode steps that a flow decides."""

from __future__ import annotations

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from kvsieve.integrations.vllm.builder import SieveBuilder
from kvsieve.integrations.vllm.engine import engine_for
from kvsieve.integrations.vllm.layer import SieveImpl


class SieveBackend(CPUAttentionBackend):
    """Stands in for CPU_ATTN, under its name; without settings it is CPU_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return CPUAttentionBackendImpl if engine_for(get_current_vllm_config()) is None else SieveImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return SieveBuilder
