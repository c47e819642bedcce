"""Files that ``kvsieve new`` writes: ``@module@`` and ``@class@`` are replaced."""

FLOW_FILE = '''"""@class@: a sparse-attention flow of one's own.

A flow is written for ONE request and ONE KV head. Pages are runs of `page_size` tokens; at every decode step the pages
in the window compete, and the budget decides how many of the best are attended, beside the first and the last ones.

    kvsieve generate --flow @module@.py:@class@ --flow-arg peak=0.5 --prompt "Once upon a time" --compare
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

TEST_FILE = '''"""To be written."""
'''
