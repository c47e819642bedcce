"""Files that ``kvsieve new`` writes: ``@module@`` and ``@class@`` are replaced."""

FLOW_FILE = '''"""@class@: a sparse-attention flow of one's own.

A flow is written for ONE request and ONE KV head. Pages are runs of `page_size` tokens; at every decode step the pages
in the window compete, and the budget decides how many of the best are attended, beside the first and the last ones.

    kvsieve generate --flow @module@.py:@class@ --flow-arg peak=0.5 --prompt-file TEXT --budget-tokens 128 --compare
    python -m pytest test_@module@.py
"""

from kvsieve.flow import Flow, register


@register("@module@")
class @class@(Flow):
    """Ranks a page by its mean key: ``(1 - peak) * mean_h q_h.mean(k) + peak * max_h q_h.mean(k)``.

    Bytes per step: one mean key per page of the window, and K/V of the selected pages.
    """

    # Numbers that users tune are constructor arguments, checked here: --flow-arg peak=0.5
    def __init__(self, peak: float = 1.0) -> None:
        if not 0 <= peak <= 1:
            raise ValueError(f"peak: expected a number in [0, 1], received {peak}")
        self.peak = peak

    # Once per full page: k [page_size, head_dim], v [page_size, v_head_dim] -> what a step needs to know of the page.
    def summarize(self, k, v):
        return {"k_mean": k.mean(0)}

    # Every step: q [G, head_dim] holds the query heads that share this KV head, pages["k_mean"] [W, head_dim] the mean
    # keys of the W pages of the window. Returns a number per page, higher is better. pages also maps "k", "v",
    # "position" and "age". Methods are traced: use torch operations, no `if` on values and no .item().
    def score(self, q, pages):
        seen = pages["k_mean"] @ q.T  # [W, G]
        return (1 - self.peak) * seen.mean(1) + self.peak * seen.amax(1)
'''

TEST_FILE = '''"""@class@, batched and paged, against the float64 reference of one request and KV head."""

from pathlib import Path

import torch

from kvsieve.budget import Budget
from kvsieve.flow import load_flow
from kvsieve.reference import ReferenceSegment
from kvsieve.runtime import Runtime

FLOW = f"{Path(__file__).with_name('@module@.py')}:@class@"
HEADS, GROUP, HEAD_DIM, PAGE_SIZE, PROMPT, STEPS = 2, 3, 32, 4, 61, 12


def test_@module@_matches_the_reference():
    torch.manual_seed(0)
    flow, budget = load_flow(FLOW), Budget(topk=3)
    q = torch.randn(PROMPT + STEPS, HEADS * GROUP, HEAD_DIM)
    k, v = torch.randn(2, PROMPT + STEPS, HEADS, HEAD_DIM)
    runtime = Runtime(flow, budget, page_size=PAGE_SIZE)
    request = runtime.admit()
    runtime.extend([request], [PROMPT]).attend(0, q[:PROMPT], k[:PROMPT], v[:PROMPT])
    segments = [ReferenceSegment(flow, budget, PAGE_SIZE) for _ in range(HEADS)]
    grouped = q.unflatten(1, (HEADS, GROUP))
    for head, segment in enumerate(segments):
        segment.extend(grouped[:PROMPT, head], k[:PROMPT, head], v[:PROMPT, head])
    for t in range(PROMPT, PROMPT + STEPS):
        got = runtime.step([request]).attend(0, q[t : t + 1], k[t : t + 1], v[t : t + 1])
        for head, segment in enumerate(segments):
            want = segment.step(grouped[t, head], k[t, head], v[t, head])
            assert got.selection.pages[0, head, : got.selection.count[0]].tolist() == want.selection
            torch.testing.assert_close(got.out.view(HEADS, GROUP, -1)[head].double(), want.out, rtol=1e-4, atol=1e-5)
'''
