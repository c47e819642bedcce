"""Kernels made from flows: ``summarize`` and ``score`` of any flow as Triton source, read and written page by page."""

from __future__ import annotations

from kvsieve.backends.triton.generate.errors import Refused
from kvsieve.backends.triton.generate.program import (
    ScoreProgram,
    SummarizeProgram,
    generate_score,
    generate_summarize,
)

__all__ = ["Refused", "ScoreProgram", "SummarizeProgram", "generate_score", "generate_summarize"]
