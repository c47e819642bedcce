"""Drift of state is measured in values of the field, not in what cancellation leaves of one page's."""

from __future__ import annotations

import torch

from kvsieve.flow import Flow
from kvsieve.verify.subject import Subject
from kvsieve.verify.suite import CHECKS


class Average(Flow):
    """A running average of the best head's mean key; tied keys of both signs cancel to rounding in some pages."""

    def summarize(self, k, v):
        return {"mean": k.mean(0)}

    def init_state(self, page_size, head_dim):
        return {"average": torch.zeros(())}

    def score(self, q, pages):
        average = 0.8 * pages["average"] + 0.2 * (q @ pages["mean"].T).amax(0)
        return average, {"average": average}


def test_honest_state_drifts_by_rounding_only() -> None:
    (ties,) = (check for check in CHECKS if check.name == "ties")
    drift = ties.run(Subject(Average())).drift
    assert 0 < drift < 1e-5
