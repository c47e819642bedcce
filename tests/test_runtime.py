"""The life of requests: chunks, ragged batches, finish, wrong calls, what is read, what is never read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsieve.backends.base import AttentionOptions, Selection
from kvsieve.backends.eager import EagerBackend
from kvsieve.budget import Budget
from kvsieve.flow import list_flows
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import Rows
from kvsieve.runtime import Attended
from kvsieve.verify.data import LayerShape
from kvsieve.verify.rounding import F64
from kvsieve.verify.unselected import UnselectedNaN
from support import RELATIVE, PoisonedRuntime, Twin

pytestmark = pytest.mark.usefixtures("shared_traces")

SHAPES = [LayerShape(2, 3, 16, 16), LayerShape(1, 2, 8, 12)]
FLOWS = list(list_flows())


def budget_of(name: str, sink: int = 1, recent: int = 2) -> Budget:
    return Budget(0, sink, recent) if list_flows()[name].score is None else Budget(2, sink, recent)


def page_size_of(name: str) -> int:
    return list_flows()[name].page_size or 4


def twin_of(name: str, **arguments: Any) -> Twin:
    return Twin(name, budget_of(name), page_size_of(name), SHAPES, **arguments)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Two float32 results of the same mathematics: each is within RELATIVE of it."""
    return bool(((a - b).abs() <= 2 * RELATIVE * b.abs().amax(-1, keepdim=True).clamp(min=1e-30)).all())


def tokens(
    count: int, heads: int = 2, group: int = 3, k_width: int = 8, v_width: int = 8, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (count, heads * group, k_width), (count, heads, k_width), (count, heads, v_width)
    q, k, v = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return q, k, v


# Chunks and batches


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("chunks", [[23], [1] * 23, [4, 4, 4, 4, 4, 3], [3, 1, 9, 0, 10], [22, 1]])
def test_chunked_prefill_equals_whole_prefill(name: str, chunks: list[int]) -> None:
    """Outputs agree with the reference whatever the chunks; what is stored, and so every later step, is the same."""
    whole, chunked = twin_of(name, seed=3), twin_of(name, seed=3)
    draws = [whole.draw(layer, 23) for layer in range(len(SHAPES))]
    (a,), (b,) = whole.admit(), chunked.admit()
    whole.extend([a], [23], draws=draws)
    (other,) = chunked.admit()  # lets the empty chunk be a call
    start = 0
    for count in chunks:
        part = [tuple(x[start : start + count] for x in draw) for draw in draws]
        if count:
            chunked.extend([b], [count], draws=part)  # type: ignore[arg-type]
        else:
            chunked.extend([b, other], [0, 2])
        start += count
    chunked.check_storage()
    for _ in range(3):
        draws = [whole.draw(layer, 1) for layer in range(len(SHAPES))]
        for one, two in zip(whole.step([a], draws=draws), chunked.step([b], draws=draws), strict=True):
            assert one.selection is not None and two.selection is not None
            assert torch.equal(one.selection.pages, two.selection.pages)
            # The same numbers in other blocks go through the same kernels.
            assert torch.equal(one.out, two.out) and torch.equal(one.lse, two.lse)


@pytest.mark.parametrize("name", FLOWS)
def test_alone_in_a_batch_and_permuted(name: str) -> None:
    """A request does not notice its neighbours, nor its place among them."""
    p = page_size_of(name)
    lengths = [1, 5 * p + 1, p, 9 * p, 3 * p - 1]
    order = [3, 0, 4, 1, 2]
    together, permuted = twin_of(name), twin_of(name)
    ids, shuffled = together.admit(5), permuted.admit(5)
    alone = [twin_of(name) for _ in lengths]
    single = [twin.admit()[0] for twin in alone]
    source = twin_of(name, seed=11)
    prompts = [[source.draw(layer, length) for layer in range(2)] for length in lengths]
    joined = [_join([prompt[layer] for prompt in prompts]) for layer in range(2)]
    mixed = [_join([prompts[i][layer] for i in order]) for layer in range(2)]
    together.extend(ids, lengths, draws=joined)
    permuted.extend([shuffled[i] for i in order], [lengths[i] for i in order], draws=mixed)
    for twin, request, prompt, length in zip(alone, single, prompts, lengths, strict=True):
        twin.extend([request], [length], draws=prompt)
    for _ in range(3):
        rows = [[source.draw(layer, 1) for layer in range(2)] for _ in lengths]
        a = together.step(ids, draws=[_join([row[layer] for row in rows]) for layer in range(2)])
        b = permuted.step(
            [shuffled[i] for i in order], draws=[_join([rows[i][layer] for i in order]) for layer in range(2)]
        )
        c = [twin.step([request], draws=row) for twin, request, row in zip(alone, single, rows, strict=True)]
        for layer in range(2):
            assert torch.equal(a[layer].out[order], b[layer].out), "order in the batch changes nothing, bit for bit"
            for i in range(5):
                assert close(a[layer].out[i], c[i][layer].out[0])
                assert listed(a[layer].selection, i) == listed(c[i][layer].selection, 0)


def _join(draws: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (torch.cat(parts) for parts in zip(*draws, strict=True))
    return q, k, v


def listed(selection: Selection | None, request: int) -> list[list[int]]:
    assert selection is not None
    return selection.pages[request, :, : selection.count[request]].tolist()


@pytest.mark.parametrize("name", FLOWS)
def test_requests_come_and_go(name: str) -> None:
    """Admit, extend, step and finish in mid-flight, second turns, steps of some requests only."""
    twin, p = twin_of(name), page_size_of(name)
    a, b, c = twin.admit(3)
    twin.extend([a, b], [5 * p, 2])
    twin.step([b])
    twin.step([a, b])
    twin.extend([c, a, b], [7 * p + 1, 0, p])
    twin.step([c, a, b])
    twin.finish([a])
    (d,) = twin.admit()
    twin.step([c, b])
    twin.extend([d, c], [6 * p, 1])
    for _ in range(p + 1):
        twin.step([b, d, c])
    twin.finish([c, d])
    twin.step([b])
    twin.check_storage()


def test_two_runtimes_share_nothing() -> None:
    """A flow object serves several runtimes, whose requests have the same ids."""
    flow = list_flows()["h2o_token_sparse_attention"]()
    twins = [Twin(flow, Budget(2, 1, 1), 1, [SHAPES[0]], seed=seed) for seed in (1, 2)]
    ids = [twin.admit(2) for twin in twins]
    for twin, requests in zip(twins, ids, strict=True):
        twin.extend(requests, [9, 4])
    for _ in range(4):
        for twin, requests in zip(twins, ids, strict=True):
            twin.step(requests)
    for twin in twins:
        twin.check_storage()


# What is attended


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "sinks": True}])
def test_unselected_pages_are_not_read(name: str, options: dict[str, Any]) -> None:
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 1, 6)
    backend, p = UnselectedNaN("eager"), page_size_of(name)
    shapes = [LayerShape(2, 3, 16, 16)]
    clean = Twin(name, budget_of(name), p, shapes, seed=2, **options)
    poisoned = Twin(name, budget_of(name), p, shapes, seed=2, backend=backend, **options)
    for twin in (clean, poisoned):
        twin.extend(twin.admit(3), [12 * p, 6 * p + 1, 2])
    for _ in range(3):
        (a,), (b,) = clean.step([0, 1, 2]), poisoned.step([0, 1, 2])  # type: ignore[list-item]
        assert torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse)
    assert backend.overwritten >= 3 * 2 * (12 - 5)


@pytest.mark.parametrize("name", FLOWS)
def test_under_budget_is_dense_bit_for_bit(name: str) -> None:
    """Layer 1 is dense and gets the same q, K and V; their bits agree until the first page is left out."""
    p, budget = page_size_of(name), budget_of(name)
    twin = Twin(name, budget, p, [SHAPES[0], SHAPES[0]], dense_layers=[1])
    requests = twin.admit(3)
    kept = budget.kept(0)
    lengths = [kept * p - min(p, 3), 1, 2]
    draw = twin.draw(0, sum(lengths))
    twin.extend(requests, lengths, draws=[draw, draw])
    for _ in range(kept * p - lengths[0]):
        draw = twin.draw(0, 3)
        sparse, dense = twin.step(requests, draws=[draw, draw])
        assert torch.equal(sparse.out, dense.out) and torch.equal(sparse.lse, dense.lse)
    draw = twin.draw(0, 3)
    sparse, dense = twin.step(requests, draws=[draw, draw])
    assert not torch.equal(sparse.out[0], dense.out[0]) and close(sparse.out[1:], dense.out[1:])


@pytest.mark.parametrize("name", FLOWS)
def test_the_newest_token_is_always_visible(name: str) -> None:
    """A new token whose key dominates is the output, on the first and on the last place of a page."""
    p = page_size_of(name)
    twin = Twin(name, budget_of(name, recent=1), p, [LayerShape(2, 3, 16, 16)])
    (request,) = twin.admit()
    twin.extend([request], [8 * p])
    for _ in range(p + 1):
        q, k, v = twin.draw(0, 1)
        k = 50 * q.unflatten(1, (2, 3)).mean(2)
        q = k.repeat_interleave(3, 1) / 50
        (result,) = twin.step([request], draws=[(q, k, v)])
        assert torch.allclose(result.out.unflatten(1, (2, 3)), v[:, :, None].expand(-1, -1, 3, -1), atol=1e-4)


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_request_disturbs_no_other(name: str, bad: float) -> None:
    """The first of three requests has ``bad`` keys and values in its prompt and in every step."""
    p = page_size_of(name)
    lengths = [9 * p, 9 * p + 1, 2]
    source = Twin(name, budget_of(name), p, [LayerShape(2, 3, 16, 16)])
    draws = [source.draw(0, sum(lengths)), *(source.draw(0, 3) for _ in range(4))]

    def play(bad: float | None) -> list[Attended]:
        runtime = PoisonedRuntime(name, budget_of(name), page_size=p)
        requests = [runtime.admit() for _ in lengths]
        results = []
        for i, (q, k, v) in enumerate(draws):
            if bad is not None:
                k, v = k.clone(), v.clone()
                k[0 if i else 3 * p, :, 0] = bad
                v[0 if i else 2 * p, :, 0] = bad
            call = runtime.step(requests) if i else runtime.extend(requests, lengths)
            results.append(call.attend(0, q, k, v))
        return results

    for i, (clean, broken) in enumerate(zip(play(None), play(bad), strict=True)):
        others = slice(1 if i else lengths[0], None)
        assert torch.equal(broken.out[others], clean.out[others])
        if broken.lse is not None and clean.lse is not None:
            assert not torch.equal(broken.lse[0], clean.lse[0]) and torch.equal(broken.lse[1:], clean.lse[1:])
            assert [listed(broken.selection, j) for j in (1, 2)] == [listed(clean.selection, j) for j in (1, 2)]


class NoPrefill(EagerBackend):
    """Stores prompts without attending them: quadratic work that a test of steps does not need."""

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: LayerPool, rows: Rows, options: AttentionOptions
    ) -> torch.Tensor:
        return q.new_zeros(*q.shape[:3], v.shape[-1])


@pytest.mark.parametrize(
    ("name", "page_size"),
    [("gqa_h2o_token_sparse_attention", 1), pytest.param("gqa_quest_sparse_attention", 2, marks=pytest.mark.slow)],
)
def test_long_contexts(name: str, page_size: int) -> None:
    """More than 65,536 pages beside a short request: scored to the end, selected from the whole window."""
    pages = 66_001
    twin = Twin(name, Budget(6, 1, 1), page_size, [LayerShape(1, 2, 4, 4)], backend=NoPrefill())
    requests = twin.admit(2)
    twin.extend(requests, [pages * page_size, 3], compare=False)
    (result,) = twin.step(requests)
    assert result.scores is not None and result.scores.shape[-1] >= pages - 2
    chosen = listed(result.selection, 0)[0]
    assert len(chosen) == 8 and any(page > 32_768 for page in chosen[:-2])


def test_strided_tensors_are_as_good_as_contiguous_ones() -> None:
    """Models hand over transposed views."""
    twin = twin_of("gqa_h2o_sparse_attention")
    requests = twin.admit(2)
    for counts in ([30, 7], [2, 5]):
        twin.extend(requests, counts, draws=[_strided(twin.draw(layer, sum(counts))) for layer in range(2)])
    for _ in range(3):
        twin.step(requests, draws=[_strided(twin.draw(layer, 2)) for layer in range(2)])
    twin.check_storage()


def _strided(draw: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in draw)
    assert not q.is_contiguous()
    return q, k, v


@pytest.mark.parametrize("name", FLOWS)
def test_no_autograd_graph_grows_in_the_memory(name: str) -> None:
    """Called with gradients enabled, the pool keeps values only, and the output says that it has no gradient."""
    runtime = PoisonedRuntime(name, budget_of(name), page_size=page_size_of(name))
    request = runtime.admit()
    for i in range(4):
        call = runtime.step([request]) if i else runtime.extend([request], [40])
        q, k, v = (x.requires_grad_() * 1.0 for x in tokens(1 if i else 40))
        assert not call.attend(0, q, k, v).out.requires_grad
    pool = runtime.layers[0].pool
    assert not any(x.requires_grad for x in (pool.k, pool.v, *pool.summaries.values(), *pool.state.values()))


# What is counted


@pytest.mark.parametrize("name", FLOWS)
def test_bytes_are_counted_from_the_selections(name: str) -> None:
    p = page_size_of(name)
    twin = twin_of(name, seed=4)
    requests = twin.admit(3)
    twin.extend(requests, [8 * p + 1, 3, 5 * p])
    assert twin.runtime.stats.kv_bytes == twin.runtime.stats.dense_bytes == twin.runtime.stats.steps == 0
    kv = dense = fields = 0
    for _ in range(3):
        results = twin.step(requests)
        for layer, (shape, result) in enumerate(zip(SHAPES, results, strict=True)):
            token = (shape.head_dim + shape.v_head_dim) * 4
            graphs = twin.runtime.layers[layer].graphs
            assert graphs is not None
            for i, request in enumerate(requests):
                length = twin.runtime.length(request)
                dense += length * shape.heads * token
                for pages in listed(result.selection, i):
                    kv += sum(min(p, length - page * p) for page in pages) * token
                for head in range(shape.heads):
                    window = twin.segments[layer, request, head].budget.window(-(-length // p))
                    over = -(-length // p) > budget_of(name).kept(0)
                    scored = list_flows()[name].score is not None and (
                        over or list_flows()[name].init_state is not None
                    )
                    fields += window * scored * graphs.score_bytes_per_page(torch.float32)
    stats = twin.runtime.stats
    assert (stats.kv_bytes, stats.dense_bytes, stats.field_bytes, stats.steps) == (kv, dense, fields, 3)


def test_reference_is_float64() -> None:
    twin = twin_of("h2o_token_sparse_attention")
    twin.extend(twin.admit(), [6])
    (result, _) = twin.step([0])  # type: ignore[list-item]
    segment = next(iter(twin.segments.values()))
    assert segment.k[0].dtype is F64 and segment.state[2]["heavy"].dtype is F64 and result.out.dtype is torch.float32
