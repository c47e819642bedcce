"""kvsieve inside vLLM: a plug-in that lets a flow decide what decode steps attend.

The package has an entry point ``vllm.general_plugins``: vLLM calls :func:`register` in each of its processes. Without
``additional_config={"kvsieve": {...}}`` it changes nothing.
"""

from __future__ import annotations

BACKEND = "kvsieve.integrations.vllm.backend.SieveBackend"
CUDA_BACKEND = "kvsieve.integrations.vllm.cuda.SieveFlashBackend"


def register() -> None:
    """Put the backend in place of vLLM's CPU attention, and offer the one for CUDA as ``CUSTOM``; may be called more
    than once. Other platforms stay as is."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)


def stats() -> dict[str, float]:
    """What the newest engine of this process has done (:class:`kvsieve.integrations.vllm.counters.Counters`)."""
    from kvsieve.integrations.vllm.engine import engines

    known = engines()
    return known[-1].counters.as_dict() if known else {}
