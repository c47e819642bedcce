"""What the leading axis of a tensor means."""

from __future__ import annotations

from enum import Enum


class FORMAT(Enum):
    """What the leading axis of a tensor ``[L, D0, D1]`` counts.

    BATCHED: segments (``request * num_kv_heads + head``). RAGGED: places in the flat listing of all segments' pages
    (in the cache side: ``token * num_kv_heads + head`` of this call). PAGED: page rows of the pool.
    """

    BATCHED = 0
    RAGGED = 1
    PAGED = 2
