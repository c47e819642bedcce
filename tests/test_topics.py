"""Topics that return: what comes back when everything is kept, and what cannot once it is evicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import torch

from kvsieve import Budget, Evict, Runtime, build_flow
from kvsieve.flow import Flow
from kvsieve.mass import AttentionMass
from kvsieve.paging.slots import POSITION
from kvsieve.runtime import RequestId
from kvsieve.verify.data import Draw, LayerShape, TopicData

SHAPE = LayerShape(1, 3, 32, 16)
PROMPT, STEPS, PAGE = 2304, 1500, 16
BUDGET = Budget(12, sink=1, recent=2)
KEPT = 15 * PAGE


class MassOnly(Flow):
    """Ranks pages by their attention mass and nothing else."""

    mass = AttentionMass(0.9)

    def score(self, q: torch.Tensor, pages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return pages["mass_sum"]


@dataclass
class Seen:
    """Per step, the share of the window's attention that was captured; how often a page came back that the step before
    had left out; tokens that were attended after a step without them."""

    shares: list[float] = field(default_factory=list)
    returned: int = 0
    revived: int = 0

    @property
    def captured(self) -> float:
        return sum(self.shares) / len(self.shares)

    def later(self) -> float:
        """What was captured in the last third of the steps."""
        third = self.shares[-len(self.shares) // 3 :]
        return sum(third) / len(third)


@cache
def drawn() -> Draw:
    return TopicData(1).tokens(SHAPE, 0, 0, 0, PROMPT + STEPS, (0, 0))


def attention(step: int) -> torch.Tensor:
    """What dense attention gives each token [T] in a step, summed over the group's query heads."""
    q, k, _ = drawn()
    return torch.softmax(q[step] @ k[: step + 1, 0].T * SHAPE.head_dim**-0.5, -1).sum(0)


def decode(runtime: Runtime) -> Seen:
    """Prompt and steps of one segment, and what they captured."""
    q, k, v = drawn()
    request, seen = runtime.admit(), Seen()
    runtime.extend([request], [PROMPT]).attend(0, q[:PROMPT], k[:PROMPT], v[:PROMPT])
    before: set[int] = set(range(PROMPT))
    for step in range(PROMPT, PROMPT + STEPS):
        result = runtime.step([request]).attend(0, q[step, None], k[step, None], v[step, None])
        assert result.selection is not None
        if runtime.eviction:
            tokens = _stored(runtime, request)
        else:
            pages = result.selection.pages[0, 0, : int(result.selection.count[0])]
            tokens = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
            tokens = tokens[tokens <= step]
        attended = torch.zeros(step + 1, dtype=torch.bool)
        attended[tokens] = True
        window = slice(PAGE, (step // PAGE - 1) * PAGE)  # neither the sink page nor the last two
        mass = attention(step)[window]
        seen.shares.append(float(mass[attended[window]].sum() / mass.sum()))
        now = set(tokens.tolist())
        if step > PROMPT:  # every token was attended while the prompt was read
            back = now - before - {step}
            seen.revived += len(back)
            seen.returned += len({token // PAGE for token in back})
        before = now
    return seen


def _stored(runtime: Runtime, request: RequestId) -> torch.Tensor:
    entry = runtime.tables[request]
    return runtime.layers[0].pool.state[POSITION][0, entry.rows].flatten()[: entry.stored]


def test_returning_topics_come_back_where_all_is_kept_and_cannot_once_evicted() -> None:
    def kept(flow: Flow) -> Seen:
        return decode(Runtime(flow, BUDGET, page_size=PAGE))

    h2o, mean = kept(build_flow("h2o")), kept(build_flow("gqa_block_sparse_attention"))
    mass = kept(MassOnly())
    evicted = decode(Runtime("h2o", page_size=PAGE, retention=Evict(KEPT, sink=PAGE, recent=2 * PAGE)))
    assert mean.captured > 0.5 and h2o.captured >= 0.9 * mean.captured
    assert h2o.returned > 100
    assert mass.returned == 0 and mass.captured < 0.25 * mean.captured
    assert evicted.revived == 0
    first = sum(evicted.shares[:100]) / 100  # the topic that the prompt ended with
    assert first > 0.4 and evicted.later() < 0.25 * first
    assert evicted.captured < 0.25 * h2o.captured and h2o.later() > 5 * evicted.later()
