"""One dense prefill serves caches with other flows, budgets and page sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from kvsieve.backends.eager import EagerBackend  # noqa: E402
from kvsieve.budget import Budget  # noqa: E402
from kvsieve.errors import ConfigError, OutOfPages  # noqa: E402
from kvsieve.flow import build_flow  # noqa: E402
from kvsieve.graph import FlowGraphs  # noqa: E402
from kvsieve.integrations.transformers import SparseCache  # noqa: E402
from kvsieve.paging.table import RequestId  # noqa: E402
from kvsieve.runtime import Runtime  # noqa: E402
from kvsieve.verify.data import Draw, IidData, LayerShape  # noqa: E402
from kvsieve.verify.twin import Twin, TwinOptions  # noqa: E402
from tiny_models import build  # noqa: E402

QUEST, TOKENS = "gqa_quest_sparse_attention", "gqa_h2o_token_sparse_attention"


def rows(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of 37 and 24 tokens, the short one padded on the left, and 6 tokens more of each."""
    ids = torch.randint(2, 97, (2, 43), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    return ids, mask


def steps(model: Any, cache: SparseCache, first: int = 37) -> torch.Tensor:
    """Logits of the decode steps from column ``first`` on."""
    ids, mask = rows()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return torch.stack(
            [
                model(
                    ids[:, t : t + 1],
                    attention_mask=mask[:, : t + 1],
                    position_ids=positions[:, t : t + 1],
                    past_key_values=cache,
                ).logits
                for t in range(first, ids.shape[1])
            ]
        )


def prefilled(model: Any, flow: str, budget: Budget, page_size: int) -> SparseCache:
    ids, mask = rows()
    cache = SparseCache(model.config, flow, budget, page_size)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids[:, :37], attention_mask=mask[:, :37], position_ids=positions[:, :37], past_key_values=cache)
    return cache


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(("flow", "page_size"), [(QUEST, 3), (TOKENS, 1)])
def test_a_copied_past_is_the_past_of_a_prefill(architecture: str, flow: str, page_size: int) -> None:
    model = build(architecture)
    budget = Budget(2, 1, 1)
    source = prefilled(model, "streaming_llm", Budget(0, 0, 100), 5)
    expected = steps(model, prefilled(model, flow, budget, page_size))
    for _ in range(2):  # the source serves as often as it is asked
        copied = SparseCache(model.config, flow, budget, page_size)
        copied.copy_past(source)
        assert copied.lengths == [37, 24] and copied.get_seq_length() == 37
        assert torch.equal(steps(model, copied), expected)
        assert copied.stats.steps == 6 and copied.stats.kv_bytes < copied.stats.dense_bytes
    dense = steps(model, source)
    assert torch.equal(dense, steps(model, prefilled(model, "streaming_llm", Budget(0, 0, 100), 5)))
    assert not torch.equal(dense, expected)


def test_wrong_copies_are_refused() -> None:
    model = build("llama")
    source = prefilled(model, QUEST, Budget(2), 4)
    target = SparseCache(model.config, QUEST, Budget(2))
    with pytest.raises(ConfigError, match="run the prefill first"):
        target.copy_past(SparseCache(model.config, QUEST, Budget(2)))
    with pytest.raises(ConfigError, match="expected an empty cache"):
        source.copy_past(source)
    other = build("gemma2")
    with pytest.raises(ConfigError, match="same model"):
        SparseCache(other.config, QUEST, Budget(2)).copy_past(source)


def test_adopting_into_a_small_pool_changes_nothing() -> None:
    model = build("llama")
    source = prefilled(model, QUEST, Budget(2), 4)
    small = Runtime(QUEST, Budget(2), page_size=7, num_blocks=8)  # 6 + 4 pages are needed
    with pytest.raises(OutOfPages):
        small.adopt(source.runtime, source._requests)
    assert len(small.tables) == 0 and small.tables.block_allocator.idle_blocks == 8
    enough = Runtime(QUEST, Budget(2), page_size=7, num_blocks=10)
    assert [enough.length(one) for one in enough.adopt(source.runtime, source._requests)] == [37, 24]


def test_a_decode_step_is_not_stored() -> None:
    runtime = Runtime(QUEST, Budget(2), page_size=3)
    q, k = torch.ones(4, 6, 5), torch.ones(4, 2, 5)
    request = runtime.admit()
    runtime.extend([request], [4]).attend(0, q, k, k)
    with pytest.raises(ConfigError, match="received a decode step"):
        runtime.step([request]).store(0, k[:1], k[:1], query_heads=6, scale=1.0)


SHAPES = (LayerShape(2, 3, 20, 12), LayerShape(1, 7, 5, 5))


def stored(shapes: Sequence[LayerShape], layers: Sequence[int], dtype: torch.dtype, **options: Any) -> Runtime:
    """A runtime that holds 17 and 4 tokens in some layers, and its requests are 0 and 1."""
    runtime = Runtime("streaming_llm", Budget(0, 0, 100), page_size=5)
    call = runtime.extend([runtime.admit(), runtime.admit()], [17, 4])
    for layer, shape in zip(layers, shapes, strict=True):
        call.attend(layer, *(torch.randn(size).to(dtype) for size in shape.sizes(21)), **options)
    return runtime


def target(shapes: Sequence[LayerShape] = SHAPES, data: IidData | None = None, backend: Any = "eager") -> Twin:
    """A runtime beside float64, with page 3 and room to spare."""
    options = TwinOptions(3, tuple(shapes), num_blocks=40)
    return Twin(build_flow(QUEST), Budget(2, 1, 1), options, data or IidData(5), backend)


def held(runtime: Runtime) -> Any:
    """All that a failed adoption must leave as it was."""
    tables = runtime.tables
    return (
        {request: runtime.length(request) for request in tables},
        (tables.block_allocator.used_blocks, tables.row_allocator.used_blocks, tables.block_allocator.idle_blocks),
        {index: layer.signature() for index, layer in runtime.layers.items()},
        runtime.stats,
    )


def refused(runtime: Runtime, source: Runtime, says: str) -> None:
    """Adopting raises one line and changes nothing on either side."""
    before = held(runtime), held(source)
    with pytest.raises(ConfigError, match=says) as caught:
        runtime.adopt(source, [RequestId(0), RequestId(1)])
    assert "\n" not in str(caught.value)
    assert (held(runtime), held(source)) == before


WRONG_LAYERS = ((0,), (1,), (0, 1, 2), (0, 2))


@pytest.mark.parametrize("layers", WRONG_LAYERS, ids=str)
def test_other_layers_are_refused(layers: tuple[int, ...]) -> None:
    pair = target()
    first = pair.admit()
    pair.extend([first], [23])
    source = stored([SHAPES[layer % 2] for layer in layers], layers, torch.float32)
    refused(pair.runtime, source, rf"stored layers \[0, 1\], received one with \[{', '.join(map(str, layers))}\]")
    goes_on(pair, first)


def goes_on(pair: Twin, request: RequestId) -> None:
    """What is there goes on with right values, and a later adoption succeeds."""
    pair.step([request])
    other = pair.admit()
    pair.extend([other, request], [7, 2])
    pair.step([request, other])
    pair.finish([request])
    shapes, layers = pair.options.shapes, range(len(pair.options.shapes))
    adopted = pair.runtime.adopt(stored(shapes, layers, torch.float32), [RequestId(0), RequestId(1)])
    assert [pair.runtime.length(one) for one in adopted] == [17, 4]
    pair.runtime.finish(adopted)
    pair.step([other])


OTHER_SECOND_LAYERS = {
    "KV heads": {"heads": 2},
    "group": {"group": 3},
    "head_dim": {"head_dim": 6},
    "v_head_dim": {"v_head_dim": 7},
}


@pytest.mark.parametrize("difference", [*OTHER_SECOND_LAYERS, "dtype", "scale"])
def test_another_geometry_is_refused(difference: str) -> None:
    """The second layer differs, so the first has been copied by then."""
    pair = target()
    first = pair.admit()
    pair.extend([first], [23])
    shapes = (SHAPES[0], replace(SHAPES[1], **OTHER_SECOND_LAYERS.get(difference, {})))
    dtype = torch.bfloat16 if difference == "dtype" else torch.float32
    source = stored(shapes, (0, 1), dtype, **({"scale": 0.7} if difference == "scale" else {}))
    refused(pair.runtime, source, r"layer [01]: expected \(KV heads, K width")
    goes_on(pair, first)


class Narrow(EagerBackend):
    """Refuses heads of width 5."""

    name = "narrow"

    def refusal(self, graphs: FlowGraphs) -> str | None:
        return "too narrow" if graphs.geometry.head_dim == 5 else None


def test_a_flow_that_the_backend_refuses_leaves_an_empty_runtime() -> None:
    """The first layer was made and filled before the second was refused: another model may come in their place."""
    pair = target((LayerShape(1, 3, 12, 8), LayerShape(2, 1, 16, 16)), backend=Narrow())
    refused(pair.runtime, stored(SHAPES, (0, 1), torch.float32), "backend narrow refuses flow .*: too narrow")
    assert held(pair.runtime)[0] == held(pair.runtime)[2] == {} and held(pair.runtime)[1] == (0, 0, 40)
    first = pair.admit()
    pair.extend([first], [23])
    goes_on(pair, first)


class Interrupted(IidData):
    """Does something else between the first layer and the second."""

    hook: Callable[[], None] | None = None

    def tokens(self, shape: LayerShape, layer: int, *arguments: Any) -> Draw:
        if layer == 1 and self.hook is not None:
            hook, self.hook = self.hook, None
            hook()
        return super().tokens(shape, layer, *arguments)


def test_a_call_under_way_is_not_disturbed() -> None:
    data = Interrupted(5)
    pair = target(data=data)
    first, second = pair.admit(), pair.admit()
    pair.extend([first], [23])
    source = stored(SHAPES, (0, 1), torch.float32)
    for event in (lambda: pair.extend([second, first], [9, 2]), lambda: pair.step([first, second])):
        data.hook = lambda: refused(pair.runtime, source, r"layers \[1\] did not attend the previous call")
        event()
        assert data.hook is None
    pair.finish([second])
    goes_on(pair, first)


def test_a_source_in_the_middle_of_a_call_is_refused() -> None:
    pair, source = target(), stored(SHAPES, (0, 1), torch.float32)
    first = pair.admit()
    pair.extend([first], [23])
    call = source.extend([RequestId(0)], [2])
    draws = [[torch.randn(size) for size in shape.sizes(2)] for shape in SHAPES]
    call.attend(0, *draws[0])
    refused(pair.runtime, source, r"layers \[1\] did not attend the previous call")
    call.attend(1, *draws[1])
    assert [pair.runtime.length(one) for one in pair.runtime.adopt(source, [RequestId(0)])] == [19]


def test_a_source_without_layers() -> None:
    source = Runtime(QUEST, Budget(2), page_size=3)
    source.extend([source.admit(), source.admit()], [2, 2])
    pair = target()
    refused(pair.runtime, source, r"stored layers 0, 1, \.\.\., received one with \[\]")
