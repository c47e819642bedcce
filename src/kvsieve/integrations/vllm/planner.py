"""What a step of vLLM on a GPU does to the flow's layers, worked out without waiting for the GPU.

Flows with state are the exception: whose state is whose is followed on the host, which has to see the block table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvsieve.integrations.vllm.fixed import DecodeMemory, FixedDecoding, filled_pages, leaves_pages_out
from kvsieve.integrations.vllm.group import LayerGroup
from kvsieve.integrations.vllm.mass import StepMass
from kvsieve.integrations.vllm.plan import Batch, BatchPlan, Decoding


@dataclass(frozen=True)
class Facts:
    """What vLLM says of a step of ``B`` rows, those that only pad the batch included.

    On the host: ``starts`` [B + 1], first token of each row; ``bounds`` [B], what no request's length exceeds;
    ``prefilling`` [B] bool, prompts that are not finished; ``longest``, what none of them exceeds; ``tokens``, new ones
    with padding. On the device: ``lengths`` [B] (0 in padding), ``blocks`` [B, N], ``slots`` [``tokens`` or more].
    """

    starts: torch.Tensor
    bounds: torch.Tensor
    prefilling: torch.Tensor
    longest: int
    tokens: int
    lengths: torch.Tensor
    blocks: torch.Tensor
    slots: torch.Tensor

    @property
    def single(self) -> bool:
        """Whether every row is one token, or padding: what decode graphs are captured for."""
        return self.tokens == len(self.lengths) and int((self.starts[1:] - self.starts[:-1]).max()) <= 1


@dataclass(frozen=True)
class Step:
    """A step: rows that the flow decides, None if there are none; pages that it fills [C], null ones among them; state
    rows that enter; what it does to mass; the layer that is audited.

    ``dense`` [B]: lengths of the rows that vLLM attends, 0 for the others; None if it attends none.
    """

    decoding: Decoding | FixedDecoding | None
    filled: torch.Tensor
    dense: torch.Tensor | None
    entered: torch.Tensor | None = None
    mass: StepMass | None = None
    audited: str | None = None


class StepPlanner:
    """Plans the steps of a group of layers.

    Args:
        rows: requests of a step, at most. tokens: of a request, at most.
        graphs: whether vLLM captures decode steps. Then a batch of single tokens is planned the same whoever runs it,
            as if each of them were a decode step: a graph cannot tell the last token of a prompt.
    """

    def __init__(
        self, group: LayerGroup, rows: int, tokens: int, block_size: int, graphs: bool, device: torch.device
    ) -> None:
        assert group.engine is not None
        self.group, self.graphs, self.device, self.block_size = group, graphs, device, block_size
        self.page_size, self.stateful = group.engine.settings.page_size, group.requests is not None
        self.asked = {(impl.budget, impl.graphs.score is not None) for impl in group.sparse.values()}
        self.memory = DecodeMemory(0 if self.stateful else rows, tokens, self.page_size, block_size, device)

    def step(self, facts: Facts) -> Step:
        """The next step; call it once a step, in order."""
        if self.stateful:
            return self._following(facts)
        blocks = torch.zeros(len(facts.bounds), 0, dtype=torch.int64)  # enough to count pages
        nothing = torch.zeros(0, dtype=torch.int64)
        known = Batch(facts.starts, facts.bounds, facts.prefilling, blocks, nothing)
        plan = BatchPlan(known, self.page_size, self.block_size)
        audited = self.group.count(plan, int(facts.starts[-1]))
        if self.graphs and facts.single:
            return self.captured(facts)
        filled = filled_pages(facts.slots[: facts.tokens], self.page_size, len(facts.bounds))
        if plan.decoding is None or not (self.graphs or leaves_pages_out(self.asked, facts.longest, self.page_size)):
            return Step(None, filled, facts.lengths)
        places, tokens = self._send(torch.stack((plan.decoding.places, facts.starts[plan.decoding.places])))
        decoding = FixedDecoding(
            self.memory, facts.lengths[places], facts.blocks[places], self._bound(facts), self.asked, tokens
        )
        return Step(decoding, filled, self._dense(facts, plan, places), audited=audited)

    def captured(self, facts: Facts) -> Step:
        """A step of single tokens, in the same memory whatever the requests, at the lengths that they may reach."""
        rows = len(facts.lengths)
        decoding = FixedDecoding(self.memory, facts.lengths, facts.blocks, self.memory.tokens, self.asked)
        return Step(decoding, self.memory.fill_pages(facts.slots[:rows]), None)

    def _following(self, facts: Facts) -> Step:
        """A step of a flow with state."""
        slots = facts.slots[: facts.tokens].cpu()
        batch = Batch(facts.starts, facts.lengths.cpu(), facts.prefilling, facts.blocks.cpu(), slots)
        plan = BatchPlan(batch, self.page_size, self.block_size)
        mass, audited = self.group.follow(batch, plan), self.group.count(plan, int(facts.starts[-1]))
        decoding = None if plan.decoding is None else plan.decoding.to(self.device)
        return Step(
            decoding,
            plan.filled.to(self.device),
            self._dense(facts, plan, None if decoding is None else decoding.places),
            None if plan.entered is None else plan.entered.to(self.device),
            None if mass is None else mass.to(self.device),
            audited,
        )

    @staticmethod
    def _dense(facts: Facts, plan: BatchPlan, places: torch.Tensor | None) -> torch.Tensor | None:
        if plan.prefilling is None:
            return None
        return facts.lengths if places is None else facts.lengths.index_fill(0, places, 0)

    def _bound(self, facts: Facts) -> int:
        """Powers of two where kernels need not be the captured ones: few of them are compiled."""
        if self.graphs:
            return self.memory.tokens
        return min(self.memory.tokens, 1 << (facts.longest - 1).bit_length())

    def _send(self, values: torch.Tensor) -> torch.Tensor:
        values = values.to(torch.int64)
        return values.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else values
