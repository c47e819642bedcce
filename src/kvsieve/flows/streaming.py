"""StreamingLLM: sinks and recent tokens, nothing else."""

from __future__ import annotations

from kvsieve.flow import Flow, register


@register("streaming_llm")
class StreamingLLM(Flow):
    """Attends the sink and recent pages only (arXiv 2309.17453); positions stay the original ones.

    No score: the budget's ``topk`` and ``ratio`` must be 0. Reads nothing but the attended K and V.
    """

    evictable = True
