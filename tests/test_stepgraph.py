"""Steps with bounded sizes in fixed memory, as a CUDA graph runs them, beside ordinary steps.

Without a GPU the steps run op by op; the plan, its memory and its tables are the same. What is attended under a bound
may be split otherwise, or summed over padding, and round otherwise; on a GPU, where a fixed budget is the bound, the
bits are the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsieve import Budget, Runtime
from kvsieve.errors import ConfigError
from kvsieve.flow import build_flow, list_flows
from kvsieve.retention import Evict
from kvsieve.stepgraph import StepGraph

CUDA = torch.cuda.is_available()
DEVICE, BACKEND = ("cuda", "triton") if CUDA else ("cpu", "eager")
LAYERS, HEADS, GROUP, WIDTH = 2, 2, 3, 20
EVICTING = ["h2o", "tova", "snapkv"]


class Pair:
    """Two runtimes that live the same life; one steps through a graph."""

    def __init__(self, flow: str, lengths: list[int], evict: bool, until: int | list[int] = 150) -> None:
        torch.manual_seed(len(flow))
        built = build_flow(flow)
        page = built.page_size or 5
        kept = Budget(3, 1, 2, 0.2) if built.score else Budget(0, 1, 3)
        where: dict[str, Any] = {"retention": Evict(30, 4, 7)} if evict else {"budget": kept}
        self.runtimes = [Runtime(built, page_size=page, backend=BACKEND, **where) for _ in range(2)]
        self.requests = [[runtime.admit() for _ in lengths] for runtime in self.runtimes]
        new = [self.draw(sum(lengths)) for _ in range(LAYERS)]
        for runtime, requests in zip(self.runtimes, self.requests, strict=True):
            call = runtime.extend(requests, lengths)
            for layer, (q, k, v) in enumerate(new):
                call.attend(layer, q, k, v)
        self.inputs = [self.draw(len(lengths)) for _ in range(LAYERS)]
        self.graph = StepGraph(self.runtimes[1], self.requests[1], until, self.body, DEVICE)

    @staticmethod
    def draw(tokens: int) -> list[torch.Tensor]:
        return [torch.randn(tokens, heads, WIDTH, device=DEVICE) for heads in (HEADS * GROUP, HEADS, HEADS)]

    def body(self, call: Any) -> list[torch.Tensor]:
        results = [call.attend(layer, *new) for layer, new in enumerate(self.inputs)]
        return [part for result in results for part in (result.out, result.lse)]

    def renew(self) -> None:
        """Other inputs, where the graph reads them."""
        for old in self.inputs:
            for x, y in zip(old, self.draw(len(self.requests[0])), strict=True):
                x.copy_(y)

    def step(self) -> None:
        """The same step in both, with the same outputs and lse."""
        self.renew()
        want = self.body(self.runtimes[0].step(self.requests[0]))
        for mine, theirs in zip(self.graph.step(), want, strict=True):
            exact = CUDA and self.runtimes[0].eviction is None
            assert torch.equal(mine, theirs) if exact else torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)

    def both(self, what: str, *places: int) -> None:
        """Something that happens to a request of both runtimes."""
        for runtime, requests in zip(self.runtimes, self.requests, strict=True):
            if what == "crop":
                runtime.crop([requests[places[0]]], [runtime.length(requests[places[0]]) - places[1]])
            elif what == "preempt":
                runtime.preempt(requests[places[0]])
                runtime.resume(requests[places[0]])
            elif what == "fork":
                runtime.fork(requests[places[0]])
            elif what == "admit":
                other = runtime.admit()
                call = runtime.extend([other], [9])
                generator = torch.Generator().manual_seed(5)
                for layer in range(LAYERS):
                    new = [torch.randn(9, h, WIDTH, generator=generator) for h in (HEADS * GROUP, HEADS, HEADS)]
                    call.attend(layer, *(x.to(DEVICE) for x in new))


@pytest.mark.parametrize("flow", list_flows())
def test_steps_of_a_graph_are_ordinary_steps(flow: str) -> None:
    """Across page boundaries, under budget and beyond, with other requests coming and going between steps."""
    lengths = [30, 5, 12] if build_flow(flow).page_size == 1 else [70, 12, 33]
    pair = Pair(flow, lengths, evict=False)
    stateful = pair.runtimes[0].tables.stateful
    events = {6: ("admit",), 9: ("preempt", 1), 12: ("fork", 2), 15: ("crop", 0, 0 if stateful else 7)}
    for step in range(24):
        pair.step()
        if step in events:
            what, *places = events[step]
            pair.both(what, *places)  # type: ignore[arg-type]
    assert pair.runtimes[0].stats == pair.runtimes[1].stats


@pytest.mark.parametrize("flow", EVICTING)
def test_evicting_steps_of_a_graph(flow: str) -> None:
    """Under capacity, at it and long beyond, with copies on write in between."""
    pair = Pair(flow, [26, 24, 28], evict=True)
    for step in range(50):
        pair.step()
        if step in (8, 31):
            pair.both("fork", 1)
        if step == 20:
            pair.both("preempt", 2)
    assert pair.runtimes[0].stats == pair.runtimes[1].stats


def test_mass_is_rebased_ahead_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is rebased every few steps holds the same mass, up to rounding by powers of the decay."""
    monkeypatch.setattr("kvsieve.mass.LARGEST_UNIT", 2.0)
    pair = Pair("h2o", [70, 12, 33], evict=False)
    for _ in range(30):
        pair.renew()
        want = pair.body(pair.runtimes[0].step(pair.requests[0]))
        got = pair.graph.step()
        for mine, theirs in zip(got, want, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("flow", "page"), [("gqa_quest_sparse_attention", 4), ("h2o", 1)])
def test_pools_have_grown_before_a_graph_runs(flow: str, page: int) -> None:
    """Another request takes the blocks that were free for the graph's: a replay does not make pools grow."""
    runtime = Runtime(flow, Budget(3, 1, 1), page_size=page, backend=BACKEND)
    request, steps = runtime.admit(), []

    def new(tokens: int) -> list[torch.Tensor]:
        return [torch.randn(tokens, heads, 16, device=DEVICE) for heads in (4, 2, 2)]

    def body(call: Any) -> torch.Tensor:
        pool, entry = runtime.layers[0].pool, runtime.tables[request]
        steps.append(pool.k.shape[1] > max(entry.blocks) and not (pool.state and pool.rows <= max(entry.rows)))
        return call.attend(0, *inputs).out

    runtime.extend([request], [5]).attend(0, *new(5))
    inputs = new(1)
    graph = StepGraph(runtime, [request], 60, body, DEVICE)
    idle = runtime.tables.block_allocator.idle_blocks
    runtime.extend([runtime.admit()], [idle * page]).attend(0, *new(idle * page))
    first = runtime.layers[0].pool.k.shape[1]
    for _ in range(55):
        graph.step()
    assert all(steps) and runtime.layers[0].pool.k.shape[1] > first


def test_layers_of_many_budgets() -> None:
    """A budget of its own for each of 40 layers, some dense, and a batch whose size is odd."""
    layers, batch = 40, 65
    budgets = {layer: Budget(3 + layer, 1, 1) for layer in range(layers)}
    runtimes = [Runtime("gqa_quest_sparse_attention", budgets, page_size=1, dense_layers=(7,)) for _ in range(2)]
    requests = [[runtime.admit() for _ in range(batch)] for runtime in runtimes]
    torch.manual_seed(1)
    prompt, new = ([torch.randn(tokens, 1, 4) for _ in range(3)] for tokens in (9 * batch, batch))
    for runtime, batch_of in zip(runtimes, requests, strict=True):
        call = runtime.extend(batch_of, [9] * batch)
        for layer in range(layers):
            call.attend(layer, *prompt)

    def body(call: Any) -> torch.Tensor:
        return torch.stack([call.attend(layer, *new).out for layer in range(layers)])

    graph = StepGraph(runtimes[1], requests[1], 80, body, "cpu")
    for _ in range(2):
        assert torch.allclose(graph.step(), body(runtimes[0].step(requests[0])), rtol=1e-5, atol=1e-6)


def test_a_step_with_queries_to_count_is_no_graph() -> None:
    """A short prompt's queries count in the step after it, which no other step repeats."""
    runtime = Runtime("h2o", Budget(3, 1, 2), page_size=5)
    request = runtime.admit()
    runtime.extend([request], [9]).attend(0, *(torch.randn(9, 2, 8) for _ in range(3)))
    shapes = []
    for _ in range(3):
        call = runtime.step([request])
        shapes.append(call.step_shape())
        call.attend(0, *(torch.randn(1, 2, 8) for _ in range(3)))
    assert shapes == [None, (None,), (None,)]


def test_a_graph_ends_at_its_length() -> None:
    pair = Pair("gqa_quest_sparse_attention", [20, 3], evict=False, until=22)
    pair.step()
    pair.step()
    with pytest.raises(ConfigError, match=r"expected requests of up to 22 tokens, one has 22 already"):
        pair.graph.step()


def test_each_request_may_have_its_own_length() -> None:
    """Room is made for what each may reach, not for the longest."""
    pair = Pair("gqa_quest_sparse_attention", [70, 3], evict=False, until=[150, 12])
    assert pair.runtimes[1].tables.block_allocator.capacity - 1 == 30 + 3
    for _ in range(9):
        pair.step()
    with pytest.raises(ConfigError, match=r"expected requests of up to 12 tokens, one has 12 already"):
        pair.graph.step()


def test_a_graph_has_room_for_all_pages_that_its_steps_will_score() -> None:
    """Of each request as many as it may have at its own length: a launch deals out no more chunks of pages."""
    pair = Pair("gqa_quest_sparse_attention", [70, 3, 12], evict=False, until=[150, 12, 31])
    plan = pair.runtimes[1].step(pair.requests[1]).plan_in(pair.graph._memory)
    window = plan.quota(Budget(3, 1, 2, 0.2), True, False).window
    assert window is not None and window.settled and window.width == 30 - 3
    assert (window.total_pages, window.most_pages) == (15 - 3, 30 - 3 + 0 + 7 - 3)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"until": [10, 20]}, r"expected a length for each of 1 requests, received \[10, 20\]"),
        ({"requests": []}, "expected at least one request, received none"),
        ({"until": 7.5}, r"StepGraph\(until=\): expected an integer"),
        ({"until": 2}, "expected requests of up to 2 tokens, one has 3 already; raise until"),
        ({"until": [3]}, "expected requests of up to 3 tokens, one has 3 already; raise until"),
        ({"device": "gpu"}, "expected cpu or a CUDA device, received 'gpu'"),
        ({"device": "meta"}, "expected cpu or a CUDA device, received meta"),
        ({"device": "cuda:0"}, "expected layers on cuda:0, received some on cpu"),
    ],
)
def test_bad_input_is_refused(what: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    runtime = Runtime("streaming_llm", Budget(0, 1, 1), page_size=5)
    request = runtime.admit()
    runtime.extend([request], [3]).attend(0, *(torch.randn(3, 2, 8) for _ in range(3)))
    given = {"requests": [request], "until": 10, "device": "cpu", **what}
    with pytest.raises(ConfigError, match=message):
        StepGraph(runtime, given["requests"], given["until"], lambda call: None, given["device"])


@pytest.mark.skipif(CUDA, reason="says what is missing on a machine without CUDA")
def test_a_missing_device() -> None:
    runtime = Runtime("streaming_llm", Budget(0, 1, 1), page_size=5)
    with pytest.raises(ConfigError, match="expected an available device, received cuda"):
        StepGraph(runtime, [runtime.admit()], 10, lambda call: None)


@pytest.mark.parametrize(
    ("flow", "where"),
    [
        ("gqa_quest_sparse_attention", {"budget": Budget(3, 1, 2)}),
        ("h2o", {"budget": Budget(3, 1, 2)}),
        ("h2o", {"retention": Evict(30, 4, 8)}),
    ],
)
def test_a_model_decodes_in_a_graph_as_ever(flow: str, where: dict[str, Any]) -> None:
    """Logits of a model whose rows are padded on the left."""
    transformers = pytest.importorskip("transformers")
    from kvsieve.integrations.transformers import GraphDecoder, SparseCache

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=101,
        attn_implementation="kvsieve",
    )
    model = transformers.LlamaForCausalLM(config).to(DEVICE).eval()
    ids = torch.randint(0, 101, (2, 50), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    runs = []
    for graphed in (False, True):
        cache = SparseCache(config, flow, page_size=5, backend=BACKEND, **where)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        seen, logits = mask, []
        with torch.inference_mode():
            last = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]
            decoder = GraphDecoder(model, cache, 90) if graphed else None
            with pytest.raises(ConfigError, match="until: expected an integer >= 51, received 50"):
                GraphDecoder(model, cache, until=50)
            for _ in range(12):
                token = last.argmax(-1, keepdim=True)
                seen = torch.cat([seen, torch.ones_like(token)], 1)
                if decoder is not None:
                    last = decoder.step(token).clone()
                else:
                    where_now = torch.tensor(cache.lengths, device=DEVICE)[:, None]
                    last = model(token, attention_mask=seen, position_ids=where_now, past_key_values=cache).logits[
                        :, -1
                    ]
                logits.append(last)
        runs.append(torch.stack(logits))
        assert cache.lengths == [62, 53] and cache.get_seq_length() == 62
    assert torch.allclose(runs[0], runs[1], rtol=1e-5, atol=1e-6)
