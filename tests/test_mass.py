"""Attention mass: the store against a simulation that knows no pages, no lazy decay and no chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from kvsieve import Budget, ConfigError, Runtime
from kvsieve.backends import attention
from kvsieve.bench.seeding import largest_tensor
from kvsieve.flow import Flow, build_flow
from kvsieve.mass import AttentionMass, MassLedger
from kvsieve.paging.table import CROP_ROWS
from kvsieve.reference import reduce_group
from kvsieve.verify.data import IidData, LayerShape, PlantedData
from kvsieve.verify.poison import poisoned_pools
from kvsieve.verify.rounding import F64
from kvsieve.verify.twin import Twin, TwinOptions

pytestmark = pytest.mark.usefixtures("shared_traces")

SHAPE = LayerShape(2, 3, 20, 12)
RECENT = 10_000


class Everything(Flow):
    """Keeps mass, ranks nothing."""

    def __init__(self, mass: AttentionMass) -> None:
        self.mass = mass


class Pair:
    """A request of a runtime that attends every page, and the mass of one KV head in plain float64."""

    def __init__(
        self, mass: AttentionMass, page_size: int = 5, shape: LayerShape = SHAPE, budget: int = RECENT
    ) -> None:
        self.mass, self.shape, self.page_size = mass, shape, page_size
        with poisoned_pools():
            self.runtime = Runtime(Everything(mass), Budget(0, 1, budget), page_size=page_size)
        self.data, self.request, self.length = PlantedData(3), self.runtime.admit(), 0

    def draw(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.data.tokens(self.shape, 0, 0, first, count, (0, 0))

    def extend(self, *counts: int) -> None:
        for count in counts:
            self.runtime.extend([self.request], [count]).attend(0, *self.draw(self.length, count))
            self.length += count

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.runtime.step([self.request]).attend(0, *self.draw(self.length, 1))
            self.length += 1

    def stored(self, request: int | None = None) -> torch.Tensor:
        """Mass [H, T], and its page sums are right."""
        entry = self.runtime.tables[self.request if request is None else request]  # type: ignore[index]
        state, scale = self.runtime.layers[0].pool.state, self.mass.factor**entry.mass.age
        mass, sums = (state[name][:, entry.rows].to(F64) * scale for name in ("mass", "mass_sum"))
        assert torch.allclose(mass.sum(-1), sums, rtol=1e-5, atol=1e-7)
        assert not mass.flatten(1)[:, entry.length :].any()
        return mass.flatten(1)[:, : entry.length]

    def simulated(self, rows: Sequence[int], decays: int | None = None) -> torch.Tensor:
        """Mass [H, T] after the queries at ``rows``, each attending all tokens up to its own."""
        q, k, _ = (x.to(F64) for x in self.draw(0, self.length))
        q = q.unflatten(1, (self.shape.heads, self.shape.group))
        mass = torch.zeros(self.shape.heads, self.length, dtype=F64)
        for row in rows:
            logits = torch.einsum("hgd,thd->hgt", q[row], k[: row + 1]) * self.shape.head_dim**-0.5
            mass = self.mass.factor * mass
            received = torch.softmax(logits, -1)
            reduced = {"sum": received.sum(1), "mean": received.mean(1), "max": received.amax(1)}
            mass[:, : row + 1] += reduced[self.mass.group]
        return mass


def close(received: torch.Tensor, expected: torch.Tensor) -> None:
    assert received.shape == expected.shape
    assert (received - expected).abs().max() <= 1e-6 * expected.abs().max(), (received - expected).abs().max()


@pytest.mark.parametrize("group", ["sum", "mean", "max"])
@pytest.mark.parametrize("decay", [0.0, 0.9, 1 - 2**-6, 1.0])
@pytest.mark.parametrize("page_size", [1, 5, 33])
def test_seeded_by_every_prompt_query_and_fed_by_every_step(group: str, decay: float, page_size: int) -> None:
    pair = Pair(AttentionMass(decay, group), page_size)
    pair.extend(CROP_ROWS + 9, 3)
    pair.step(4)
    close(pair.stored(), pair.simulated(range(CROP_ROWS + 16)))
    pair.extend(2)  # a second turn
    pair.step()
    close(pair.stored(), pair.simulated(range(CROP_ROWS + 19)))


@pytest.mark.parametrize("chunks", [(140,), (1, 139), (64, 65, 11), (63, 1, 64, 12), (7,) * 20])
def test_chunks_do_not_matter(chunks: tuple[int, ...]) -> None:
    pair = Pair(AttentionMass(0.97))
    pair.extend(*chunks)
    pair.step()
    close(pair.stored(), pair.simulated(range(141)))


@pytest.mark.parametrize("chunks", [(140,), (139, 1), (100, 33, 7), (12, 128)])
def test_a_window_counts_the_last_queries_of_the_prompt(chunks: tuple[int, ...]) -> None:
    pair = Pair(AttentionMass(1.0, seed="window:32", update="none"))
    pair.extend(*chunks)
    pair.step(3)
    close(pair.stored(), pair.simulated(range(108, 140)))
    pair = Pair(AttentionMass(0.9, seed="window:32"))
    pair.extend(20)
    pair.step(3)
    close(pair.stored(), pair.simulated(range(23)))


def test_no_seed_counts_steps_only() -> None:
    pair = Pair(AttentionMass(0.9, seed="none"))
    pair.extend(70, 10)
    pair.step(3)
    close(pair.stored(), pair.simulated(range(80, 83)))


def test_a_crop_takes_back_what_the_last_short_call_added() -> None:
    for seed, rows in (("all", range(76)), ("window:32", range(43, 75))):
        pair = Pair(AttentionMass(0.9, seed=seed, update="steps" if seed == "all" else "none"))
        pair.extend(70, 20)
        pair.runtime.crop([pair.request], [75])
        pair.length = 75
        pair.step()
        close(pair.stored(), pair.simulated(rows))


@pytest.mark.parametrize("counts", [(70, 20), (20,)])
@pytest.mark.parametrize("seed", ["all", "window:32", "none"])
def test_stored_prompts_seed_as_attended_ones_do(counts: tuple[int, ...], seed: str) -> None:
    attended, stored = (Pair(AttentionMass(0.9, seed=seed)) for _ in range(2))
    attended.extend(*counts)
    for count in counts:
        q, k, v = stored.draw(stored.length, count)
        call = stored.runtime.extend([stored.request], [count])
        scale, heads = stored.shape.head_dim**-0.5, q.shape[1]
        if seed != "none":
            with pytest.raises(ConfigError, match="layer 0: expected q, which seeds the flow's attention mass"):
                call.store(0, k, v, query_heads=heads, scale=scale)
        call.store(0, k, v, query_heads=heads, scale=scale, q=q)
        stored.length += count
    for pair in (attended, stored):
        pair.step(2)
    assert torch.equal(attended.stored(), stored.stored())


def test_forks_go_their_own_ways() -> None:
    pair = Pair(AttentionMass(0.9))
    pair.extend(70, 5)
    twin = pair.runtime.fork(pair.request)
    pair.step(2)
    before = pair.stored(twin)
    close(before, Pair.simulated(_until(pair, 75), range(70)))  # the last five queries are still to be counted
    pair.runtime.step([twin]).attend(0, *pair.draw(75, 1))
    close(pair.stored(), pair.simulated(range(77)))
    close(pair.stored(twin), Pair.simulated(_until(pair, 76), range(76)))
    pair.runtime.preempt(twin)
    pair.step()
    pair.runtime.resume(twin)
    close(pair.stored(twin), Pair.simulated(_until(pair, 76), range(76)))


def _until(pair: Pair, length: int) -> Pair:
    other = object.__new__(Pair)
    vars(other).update(vars(pair), length=length)
    return other


@pytest.mark.slow
def test_each_query_adds_exactly_its_group() -> None:
    """Mass is conserved: 4,096 queries of G heads, undecayed, over prompt and steps."""
    shape = LayerShape(1, 3, 16, 4)
    pair = Pair(AttentionMass(1.0), 16, shape)
    pair.extend(2048, 1024)
    pair.step(1024)
    assert pair.stored().sum().item() == pytest.approx(4096 * 3, rel=1e-5)


@pytest.mark.slow
def test_one_scale_per_request_survives_twenty_thousand_steps() -> None:
    """With few pages attended, the store is rebased many times and still holds the recurrence's values."""
    shape, decay = LayerShape(1, 2, 4, 4), 1 - 2**-6
    pair = Pair(AttentionMass(decay), 8, shape, budget=2)
    pair.extend(16)
    ages = set()
    for _ in range(20_000):
        pair.step()
        ages.add(pair.runtime.tables[pair.request].mass.age)
    assert max(ages) < 3_000 and 0 in ages
    total = pair.stored().sum().item()
    assert total == pytest.approx(2 / (1 - decay), rel=1e-4)


def test_the_store_is_rebased_before_it_grows_too_large() -> None:
    mass, ledger = AttentionMass(0.5), MassLedger()
    units = [ledger.call(mass, position, 1, True, CROP_ROWS).counted for position in range(150)]
    assert all(update is not None and update.unit <= 2.0**60 for update in units)
    rebased = [i for i, update in enumerate(units) if update is not None and update.rebase is not None]
    assert rebased == [60, 121] and units[60].rebase == 0.5**61  # type: ignore[union-attr]


def test_rebasing_changes_no_mass() -> None:
    pair = Pair(AttentionMass(0.5))
    pair.extend(10)
    pair.step(130)
    close(pair.stored(), pair.simulated(range(140)))


def test_rows_below_rounding_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = attention._logits
    monkeypatch.setattr(
        attention, "_logits", lambda products, options: seen.append(products) or original(products, options)
    )
    options = attention.AttentionOptions(0.3, mass=AttentionMass(0.9))
    q, k = torch.randn(2000, 1, 2, 8), torch.randn(1, 2000, 8)
    sums = attention.column_sums(q, k, options)
    assert sum(products.shape[2] for products in seen) == 211  # 0.9 ** 210 > 2 ** -32 >= 0.9 ** 211
    assert sums.sum().item() == pytest.approx(20, rel=1e-6)


@pytest.mark.parametrize("block", [(8, 1), (5, 4), (128, 2)])
@pytest.mark.parametrize(("group", "width", "softcap", "sinks"), [(3, 80, None, False), (7, 20, 2.0, True)])
@pytest.mark.parametrize("reduction", ["sum", "mean", "max"])
def test_column_sums_whatever_the_blocks(
    block: tuple[int, int],
    group: int,
    width: int,
    softcap: float | None,
    sinks: bool,
    reduction: str,
    monkeypatch: pytest.MonkeyPatch,
    generator: torch.Generator,
) -> None:
    monkeypatch.setattr(attention, "mass_block", lambda *sizes: block)
    n, length, heads = 37, 53, 4
    q = torch.randn(n, heads, group, width, generator=generator).bfloat16()
    k = torch.randn(heads, length, width, generator=generator).bfloat16()
    logits = torch.einsum("nhgd,hld->hgnl", q.to(F64), k.to(F64)) * 0.3
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(torch.ones(n, length, dtype=torch.bool).triu(length - n + 1), -torch.inf)
    lse, sink = torch.logsumexp(logits, -1), torch.randn(heads, group, generator=generator)
    lse = torch.logaddexp(lse, sink.to(F64)[..., None]) if sinks else lse
    received = reduce_group(torch.exp(logits - lse[..., None]), reduction, 1)
    mass = AttentionMass(0.95, reduction)
    options = attention.AttentionOptions(0.3, softcap, sink if sinks else None, mass)
    expected = torch.einsum("n,hnl->hl", 0.95 ** torch.arange(n - 1, -1, -1, dtype=F64), received)
    assert ((attention.column_sums(q, k, options).to(F64) - expected).abs() <= 4e-6 * expected).all()


def test_a_block_of_probabilities_does_not_grow_with_the_length() -> None:
    cpu = torch.device("cpu")
    assert attention.mass_block(cpu, 8, 4, 100) == (128, 1) and attention.mass_block(cpu, 8, 4, 4096) == (32, 1)
    options = attention.AttentionOptions(0.3, mass=AttentionMass(1.0))
    for length in (1000, 2000, 4000):
        q, k = torch.randn(length, 2, 4, 8), torch.randn(2, length, 8)
        largest = largest_tensor(partial(attention.column_sums, q, k, options))
        assert 4 * 2**18 < largest <= 4 * 2**19
    assert attention.mass_block(torch.device("meta"), 8, 4, 16_384) == (128, 8)


def test_a_request_whose_mass_is_seeded_starts_without_a_known_prefix() -> None:
    for seed, length in (("all", 0), ("window:4", 0), ("none", 10)):
        pair = Pair(AttentionMass(seed=seed))
        pair.request = pair.runtime.admit(["a", "b"])
        pair.extend(10)
        pair.step()
        other = pair.runtime.admit(["a", "b"])
        assert pair.runtime.length(other) == length


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"decay": -1}, "decay"),
        ({"decay": 0.001}, "decay"),
        ({"decay": True}, "decay"),
        ({"group": "prod"}, "group"),
        ({"seed": "window:"}, "seed"),
        ({"seed": "window:-3"}, "seed"),
        ({"seed": 3}, "seed"),
        ({"update": "all"}, "update"),
    ],
)
def test_wrong_masses_are_refused(arguments: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=rf"AttentionMass\({word}=\): expected"):
        AttentionMass(**arguments)  # type: ignore[arg-type]


def test_a_mass_of_another_type_is_refused() -> None:
    class Wrong(Flow):
        mass = "sum"  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="expected an AttentionMass or None, received 'sum'"):
        Runtime(Wrong(), Budget(0, 1, 2), page_size=4)


def beside(flow: str) -> Twin:
    with poisoned_pools():
        options = TwinOptions(4, (LayerShape(2, 3, 20, 12), LayerShape(1, 7, 5, 5)))
        return Twin(build_flow(flow), Budget(1, 1, 1), options, IidData(2))


@pytest.mark.parametrize("flow", ["h2o", "snapkv", "tova"])
def test_a_call_without_tokens_for_a_request_leaves_its_kept_queries(flow: str) -> None:
    pair = beside(flow)
    first, second = pair.admit(), pair.admit()
    pair.extend([first, second], [40, 9])
    pair.extend([second, first], [0, 12])
    pair.extend([second, first], [5, 0])
    pair.extend([first, second], [0, 1])
    pair.crop([first], [45])
    pair.step([second])
    pair.step([first, second])
    pair.extend([first, second], [3, 0])
    pair.step([first])


@pytest.mark.parametrize(
    ("mass", "kept", "long"),
    [
        (AttentionMass(0.9), 5, 0),
        (AttentionMass(0.9, seed="window:3"), 8, 3 + CROP_ROWS),
        (AttentionMass(0.9, seed="none"), 0, 0),
    ],
    ids=lambda value: getattr(value, "seed", None),
)
def test_queries_are_kept_until_they_count(mass: AttentionMass, kept: int, long: int) -> None:
    """A prompt of more rows than a crop takes back counts at once; a shorter one when the next call comes."""

    def held(pair: Pair) -> int:
        queries = pair.runtime.layers[0].queries._kept
        assert set(queries) <= {pair.request}
        return len(queries.get(pair.request, ()))

    pair = Pair(mass)
    pair.extend(3, 5)
    assert held(pair) == kept
    pair.step()
    assert held(pair) == 0, "a step counts them"
    pair.extend(4)
    pair.extend(CROP_ROWS + 6)
    assert held(pair) == long
    pair.extend(4)
    pair.runtime.finish([pair.request])
    assert not pair.runtime.layers[0].queries._kept


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"])
def test_queries_without_numbers_give_no_mass_to_what_is_not_there(backend: str) -> None:
    """Nor to the room that the next token takes, nor to pages that a shorter list only seems to name."""
    if backend == "triton":
        pytest.importorskip("triton")
    torch.manual_seed(0)
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    runtime = Runtime(Everything(AttentionMass(seed="none")), Budget(0, 0, 2), page_size=5, backend=backend)
    requests = [runtime.admit(), runtime.admit()]

    def draw(tokens: int) -> list[torch.Tensor]:
        return [torch.randn(tokens, heads, 20, device=device) for heads in (6, 2, 2)]

    runtime.extend(requests, [33, 3]).attend(0, *draw(36))
    q, k, v = draw(2)
    runtime.step(requests).attend(0, torch.full_like(q, torch.nan), k, v)
    mass = runtime.layers[0].pool.state["mass"].cpu()
    for request, length in zip(requests, (34, 4), strict=True):
        stored = mass[:, runtime.tables[request].rows].flatten(1)
        listed = (torch.arange(stored.shape[1]) // 5 >= stored.shape[1] // 5 - 2) & (
            torch.arange(stored.shape[1]) < length
        )
        assert stored[:, listed].isnan().all() and (stored[:, ~listed] == 0).all()
