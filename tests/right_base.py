"""A base class that flows of another file inherit from."""

from __future__ import annotations

from kvsieve.flow import Flow


class MeanKey(Flow):
    """Summary and a helper for its heirs."""

    def summarize(self, k, v):
        return {"mean": k.mean(0), "spread": k.std(0, correction=0)}

    def seen(self, q, pages):
        return pages["mean"] @ q.T
