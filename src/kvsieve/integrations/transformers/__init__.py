"""kvsieve inside Hugging Face Transformers: ``attn_implementation="kvsieve"`` and :class:`SparseCache`.

Importing this package registers the attention implementation. The model writes K and V through the cache, the cache
tags them, and the attention function finds the cache by the tag.
"""

from __future__ import annotations

from kvsieve.errors import ConfigError

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ConfigError(
        "the Transformers integration needs transformers >= 5.16, which is not installed: pip install 'kvsieve[hf]'"
    ) from error

from kvsieve.integrations.transformers.attention import kvsieve_attention, kvsieve_mask
from kvsieve.integrations.transformers.cache import SparseCache
from kvsieve.integrations.transformers.graph import GraphDecoder
from kvsieve.models import IMPLEMENTATION

AttentionInterface.register(IMPLEMENTATION, kvsieve_attention)
AttentionMaskInterface.register(IMPLEMENTATION, kvsieve_mask)

__all__ = ["IMPLEMENTATION", "GraphDecoder", "SparseCache", "kvsieve_attention", "kvsieve_mask"]
