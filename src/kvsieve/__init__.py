"""kvsieve: decode-time sparse attention, written for one request and one KV head, run batched, paged and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvsieve.budget import Budget
from kvsieve.errors import ConfigError, FlowError, KvsieveError, NotCroppable, OutOfPages
from kvsieve.flow import Flow, build_flow, list_flows, load_flow, register
from kvsieve.mass import AttentionMass
from kvsieve.retention import Evict, Keep
from kvsieve.runtime import Runtime
from kvsieve.version import __version__

if TYPE_CHECKING:
    from kvsieve.integrations.transformers import SparseCache

__all__ = [
    "AttentionMass",
    "Budget",
    "ConfigError",
    "Evict",
    "Flow",
    "FlowError",
    "Keep",
    "KvsieveError",
    "NotCroppable",
    "OutOfPages",
    "Runtime",
    "SparseCache",
    "__version__",
    "build_flow",
    "list_flows",
    "load_flow",
    "register",
]


def __getattr__(name: str) -> Any:
    if name == "SparseCache":  # imports transformers, and registers attn_implementation="kvsieve"
        from kvsieve.integrations.transformers import SparseCache

        return SparseCache
    raise AttributeError(f"module 'kvsieve' has no attribute {name!r}")
