"""What the plug-in did: counted once a step, for all layers together."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Totals of one engine in one process.

    ``sparse_rows``: decoded tokens whose request left pages out; ``dense_rows``: those under budget;
    ``prefill_tokens``: tokens attended densely as a prompt. ``pages_seen`` and ``pages_kept``: of decoded tokens, per
    layer and KV head that runs the flow. ``bytes_saved``: K and V not read, less what scoring read.
    """

    sparse_steps: int = 0
    dense_steps: int = 0
    sparse_rows: int = 0
    dense_rows: int = 0
    prefill_tokens: int = 0
    pages_seen: int = 0
    pages_kept: int = 0
    bytes_saved: int = 0
    audits: int = 0
    captured_mass: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """All totals by name; ``captured_mass`` is the mean over all audits."""
        totals = asdict(self)
        totals["captured_mass"] = self.captured_mass / self.audits if self.audits else None
        return totals
