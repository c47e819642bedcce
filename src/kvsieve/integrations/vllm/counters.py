"""What the plug-in did: counted once a step, for all layers together, and shown beside vLLM's own metrics."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

PREFIX = "kvsieve"


@dataclass
class Counters:
    """Totals of one engine in one process.

    ``sparse_steps``: steps in which some request left pages out; ``dense_steps``: other steps that decoded;
    ``sparse_rows`` and ``dense_rows``: the same by decoded token. ``prefill_tokens``: attended densely, as prompts.
    ``pages_seen`` and ``pages_kept``: of decoded tokens, over layers and KV heads that run the flow. ``bytes_dense``:
    K and V of those; ``bytes_read``: what was read of them, and to score. ``audits`` and ``captured``: how often, and
    what sum of shares of the exact attention the selection held. Totals never fall, as Prometheus wants it.
    """

    sparse_steps: int = 0
    dense_steps: int = 0
    sparse_rows: int = 0
    dense_rows: int = 0
    prefill_tokens: int = 0
    pages_seen: int = 0
    pages_kept: int = 0
    bytes_dense: int = 0
    bytes_read: int = 0
    audits: int = 0
    captured: float = 0.0

    def add(self, **amounts: float) -> None:
        """Count some more, here and in Prometheus where vLLM exports it."""
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)
            if name in _EXPORTED:
                _EXPORTED[name].inc(amount)

    def as_dict(self) -> dict[str, float]:
        """All totals by name, ``bytes_saved``, and ``captured_mass``: the mean over all audits, 0 before the first."""
        totals = {field.name: getattr(self, field.name) for field in fields(self)}
        captured = self.captured / self.audits if self.audits else 0.0
        return {**totals, "bytes_saved": self.bytes_dense - self.bytes_read, "captured_mass": captured}


_EXPORTED: dict[str, Any] = {}


def export() -> None:
    """Show the totals as ``kvsieve_*_total`` in Prometheus' default registry; nothing without prometheus_client.

    vLLM's server answers ``/metrics`` in another process than the one that decodes: with PROMETHEUS_MULTIPROC_DIR set,
    as ``kvsieve serve`` does, both share their numbers.
    """
    try:
        from prometheus_client import Counter
    except ImportError:
        return
    if _EXPORTED:
        return
    for field in fields(Counters):
        _EXPORTED[field.name] = Counter(f"{PREFIX}_{field.name}", f"kvsieve: {field.name.replace('_', ' ')}")
