"""The backend for CUDA between vLLM's own classes: its metadata and its FlashAttention, here without a GPU.

vLLM's kernel is replaced by plain attention over the metadata that it gets; the flow's kernels are interpreted.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("triton")

from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvsieve.errors import ConfigError
from kvsieve.integrations.vllm import CUDA_BACKEND, register
from kvsieve.integrations.vllm.cuda import SieveFlashBackend, SieveFlashBuilder, SieveFlashImpl, SieveFlashMetadata
from kvsieve.integrations.vllm.plan import Batch
from kvsieve.verify.engine_steps import StepOracle
from vllm_cuda_world import Cache
from vllm_stand_ins import plain_attention
from vllm_world import write_model

SETTINGS: dict[str, Any] = {
    "flow": "gqa_quest_sparse_attention",
    "page_size": 16,
    "budget": {"topk": 1, "sink": 1, "recent": 1},
    "skip_layers": [1],
}
H2O: dict[str, Any] = {**SETTINGS, "flow": "h2o", "skip_layers": []}
ROWS, LONGEST = 8, 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("models"))


class Layer(Attention):
    """A layer that knows its implementation and cache, and nothing of a platform."""

    def __init__(self, name: str, impl: FlashAttentionImpl, cache: torch.Tensor) -> None:
        torch.nn.Module.__init__(self)
        self.layer_name, self.impl, self.kv_cache, self.head_size = name, impl, cache, impl.head_size


class Engine:
    """vLLM's classes for two layers over one cache, as it would make them on a GPU."""

    NAMES = "model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"

    def __init__(self, model: Path, settings: dict[str, Any] | None, graphs: bool, dtype: torch.dtype) -> None:
        extra = {} if settings is None else {"additional_config": {"kvsieve": settings}}
        arguments = EngineArgs(
            model=str(model), skip_tokenizer_init=True, max_model_len=LONGEST, max_num_seqs=ROWS, block_size=32,
            enable_prefix_caching=False, **extra,
        )  # fmt: skip
        self.config = arguments.create_engine_config()
        self.config.device_config.device_type = "cuda"
        self.config.compilation_config.cudagraph_mode = (
            CUDAGraphMode.FULL_AND_PIECEWISE if graphs else CUDAGraphMode.NONE
        )
        self.cache = Cache(2, 20, 32, 60, dtype)
        with set_current_vllm_config(self.config):
            make: Any = SieveFlashBackend.get_impl_cls()
            impls = [make(6, 20, 20**-0.5, 2, None, None, "auto") for _ in self.NAMES]
            self.layers = [Layer(name, impl, self.cache.tensor) for name, impl in zip(self.NAMES, impls, strict=True)]
            self.config.compilation_config.static_forward_context.update(zip(self.NAMES, self.layers, strict=True))
            spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=20, dtype=dtype)
            self.builder = SieveFlashBackend.get_builder_cls()(spec, list(self.NAMES), self.config, torch.device("cpu"))

    def metadata(self, batch: Batch, longest: int | None = None, capture: bool = False) -> FlashAttentionMetadata:
        """What the builder makes of a batch."""
        counts = batch.starts[1:] - batch.starts[:-1]
        common = CommonAttentionMetadata(
            query_start_loc=batch.starts,
            query_start_loc_cpu=batch.starts,
            seq_lens=batch.lengths,
            num_reqs=len(batch.lengths),
            num_actual_tokens=len(batch.slots),
            max_query_len=int(counts.max()),
            max_seq_len=int(batch.lengths.max()) if longest is None else longest,
            block_table_tensor=batch.blocks,
            slot_mapping=batch.slots,
            is_prefilling=batch.prefilling[:-1],  # runners leave padding out
            seq_lens_cpu_upper_bound=batch.lengths.clone(),
        )
        with torch.inference_mode():
            made = self.builder.build_for_cudagraph_capture(common) if capture else self.builder.build(0, common)
        assert isinstance(made, FlashAttentionMetadata)
        return made

    def run(self, layer: int, metadata: FlashAttentionMetadata | None, q: torch.Tensor) -> torch.Tensor:
        """A layer's output [T, Hq, D], NaN where nobody writes."""
        out, one = torch.full(q.shape, float("nan"), dtype=q.dtype), self.layers[layer]
        nothing = torch.zeros(len(q), 2, 20, dtype=q.dtype)
        with torch.inference_mode():
            one.impl.forward(one, q, nothing, nothing, one.kv_cache, metadata, out)
        return out

    def queries(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, 6, 20, generator=self.cache.draw).to(self.cache.dtype)


@pytest.fixture(autouse=True)
def without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashAttentionImpl, "forward", plain_attention)


def mixed(cache: Cache, decoding: list[int], chunks: dict[int, int], done: bool = False) -> Batch:
    """Requests that take a token, and chunks of prompts, in turn."""
    parts = [cache.step([request], 1, LONGEST // 32) for request in decoding]
    places = [(request, 0) for request in decoding]
    for request, count in chunks.items():
        at = random.Random(request).randint(0, len(parts))
        parts.insert(at, cache.chunk(request, count, LONGEST // 32))
        places.insert(at, (request, count))
    counts = torch.tensor([0, *(max(1, count) for _, count in places)])
    return Batch(
        counts.cumsum(0).to(torch.int32),
        torch.cat([part.lengths for part in parts]),
        torch.tensor([bool(count) for _, count in places]),
        torch.cat([part.blocks for part in parts]),
        torch.cat([part.slots for part in parts]),
    )


def expect_dense(engine: Engine, out: torch.Tensor, q: torch.Tensor, batch: Batch, rows: list[int]) -> None:
    """These rows are attended as vLLM does it."""
    whole: Any = SimpleNamespace(query_start_loc=batch.starts, seq_lens=batch.lengths, block_table=batch.blocks)
    want = plain_attention(engine.layers[1].impl, None, q, None, None, engine.cache.tensor, whole, q.clone())
    for row in rows:
        first, last = int(batch.starts[row]), int(batch.starts[row + 1])
        assert torch.equal(out[first:last], want[first:last])


@pytest.mark.parametrize("graphs", [True, False])
def test_mixed_steps(model: Path, graphs: bool) -> None:
    """Prompts in chunks beside decoding requests: each row is attended by whom it should be."""
    engine = Engine(model, SETTINGS, graphs, torch.float32)
    flow = engine.builder.group.engine
    oracle = flow.recorder = StepOracle([0])
    cache = engine.cache
    requests = [cache.admit(0) for _ in range(4)]
    chunks = [{0: 40, 1: 90}, {0: 31, 2: 33, 3: 2}, {2: 17}, {}]
    decoding: list[list[int]] = [[], [1], [0, 1, 3], requests]
    for step, (some, prompts) in enumerate(zip(decoding, chunks, strict=True)):
        batch = mixed(cache, some, prompts)
        metadata = engine.metadata(batch)
        q = engine.queries(len(batch.slots))
        out = engine.run(0, metadata, q)
        assert not out.isnan().any()
        expect_dense(engine, out, q, batch, batch.prefilling.nonzero().flatten().tolist())
        expect_dense(engine, engine.run(1, metadata, q), q, batch, list(range(len(batch.lengths))))
        assert oracle.steps == sum(len(some) for some in decoding[: step + 1])
    assert oracle.numbers.selections and flow.counters.sparse_rows and flow.counters.prefill_tokens == 40 + 90 + 83


def test_both_schedules_of_a_mixed_step_are_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 3 has a schedule per metadata, which the builder writes to one place where graphs are."""
    engine = Engine(model, SETTINGS, True, torch.float32)
    monkeypatch.setattr(
        flash_attn, "get_scheduler_metadata", lambda cache_seqlens, **_: cache_seqlens.clone(), raising=False
    )
    engine.builder.aot_schedule = engine.builder.use_full_cuda_graph = True
    engine.builder.scheduler_metadata = torch.zeros(40, dtype=torch.int32)
    for _ in range(2):
        engine.cache.admit(50)
    engine.cache.admit(0)
    metadata = engine.metadata(mixed(engine.cache, [0, 1], {2: 20}))
    assert isinstance(metadata, SieveFlashMetadata) and metadata.others is not None
    for one, lengths in ((metadata, [51, 51, 20]), (metadata.others, [0, 0, 20])):
        assert one.scheduler_metadata is not None and sorted(one.scheduler_metadata.tolist()) == sorted(lengths)
        assert one.scheduler_metadata.tolist() == one.seq_lens.tolist()
    whole = engine.metadata(engine.cache.step([0, 1], 4, 8))
    assert whole.scheduler_metadata is not None and whole.scheduler_metadata.tolist() == [52, 52, 0, 0]
    assert whole.scheduler_metadata.data_ptr() == engine.builder.scheduler_metadata.data_ptr(), "a graph reads it there"


def test_steps_under_budget_are_vllms_own(model: Path) -> None:
    engine = Engine(model, SETTINGS, False, torch.float32)
    request = engine.cache.admit(0)
    engine.run(0, engine.metadata(engine.cache.chunk(request, 40, 8)), engine.queries(40))
    batch, q = engine.cache.step([request], 1, 8), engine.queries(1)
    metadata = engine.metadata(batch)
    assert isinstance(metadata, SieveFlashMetadata) and metadata.step is not None and metadata.step.decoding is None
    expect_dense(engine, engine.run(0, metadata, q), q, batch, [0])


def test_a_captured_step_reads_what_later_builds_write(model: Path) -> None:
    """vLLM captures with dummies, and builds metadata for each replay; the graph has the first one's tensors."""
    engine = Engine(model, SETTINGS, True, torch.float32)
    dummy = Batch(
        torch.arange(5, dtype=torch.int32), torch.ones(4, dtype=torch.int32), torch.zeros(4, dtype=torch.bool),
        torch.zeros(4, 8, dtype=torch.int32), torch.full((4,), -1),
    )  # fmt: skip
    captured = engine.metadata(dummy, LONGEST, capture=True)
    assert engine.layers[0].impl._pool is not None, "made before a graph is captured"
    oracle = engine.builder.group.engine.recorder = StepOracle([0])
    for request, length in enumerate([70, 33, 130, 64]):
        engine.cache.admit(0)
        engine.run(0, engine.metadata(engine.cache.chunk(request, length, 8)), engine.queries(length))
    for some in ([0, 1, 2], [3, 2], [1, 0, 3, 2]):
        batch = engine.cache.step(some, 4, 8)
        built = engine.metadata(batch)
        assert isinstance(built, SieveFlashMetadata) and built.others is None
        q = engine.queries(4)
        out = engine.run(0, captured, q)
        assert not out[: len(some)].isnan().any() and not out[len(some) :].any()
    assert oracle.steps == 9 and oracle.numbers.selections >= 6


def test_state_is_followed_on_the_host(model: Path) -> None:
    engine = Engine(model, H2O, True, torch.float32)
    assert not engine.builder.planner.graphs
    oracle = engine.builder.group.engine.recorder = StepOracle([0])
    for request, length in enumerate([70, 33, 90]):
        engine.cache.admit(0)
        for chunk in (length // 2, length - length // 2):
            engine.run(0, engine.metadata(engine.cache.chunk(request, chunk, 8)), engine.queries(chunk))
    for some in ([0, 1, 2], [2, 0], [1, 0, 2], [0, 1, 2]):
        batch = mixed(engine.cache, some, {})
        engine.run(0, engine.metadata(batch), engine.queries(len(some)))
    assert oracle.steps == 11 and oracle.numbers.checked["mass"] > 20


def test_what_can_be_captured(model: Path) -> None:
    support = AttentionCGSupport
    stock = Engine(model, None, True, torch.float32)
    assert type(stock.layers[0].impl) is FlashAttentionImpl and stock.builder.planner is None
    theirs = super(SieveFlashBuilder, SieveFlashBuilder).get_cudagraph_support(stock.config, None)
    for settings, graphs, expected in (
        (None, True, theirs),
        (SETTINGS, True, support.UNIFORM_SINGLE_TOKEN_DECODE),
        ({**SETTINGS, "backend": "triton+compiled"}, True, support.NEVER),
        (H2O, True, support.NEVER),
    ):
        engine = Engine(model, settings, graphs, torch.float32)
        assert SieveFlashBuilder.get_cudagraph_support(engine.config, None) is expected
        assert isinstance(engine.layers[0].impl, SieveFlashImpl) == (settings is not None)
        assert not engine.builder.supports_update_block_table or settings is None
        assert not engine.run(0, None, engine.queries(3)).any(), "profiling"


def test_refused_at_start(model: Path) -> None:
    for changes, words in (
        ({"audit_every": 2}, "enforce-eager"),
        ({"backend": "compiled"}, "triton"),
        ({"page_size": 12}, "page_size 12"),
    ):
        with pytest.raises(ConfigError, match=words):
            Engine(model, {**SETTINGS, **changes}, True, torch.float32)


def test_registered() -> None:
    register()
    assert AttentionBackendEnum.CUSTOM.get_path() == CUDA_BACKEND
    assert AttentionBackendEnum.CUSTOM.get_class() is SieveFlashBackend
    assert AttentionBackendEnum[SieveFlashBackend.get_name()] is AttentionBackendEnum.CUSTOM
