"""Backend ``triton``: stored tokens, prompt mass, whole steps, what it refuses, and that all kernels compile.

On a machine with a GPU its tests run there, else in Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kvsieve import Budget, Runtime
from kvsieve.backends import get_backend
from kvsieve.backends.attention import column_sums
from kvsieve.backends.base import AttentionOptions
from kvsieve.backends.triton import TritonBackend
from kvsieve.backends.triton.launch import INTERPRETED
from kvsieve.errors import ConfigError
from kvsieve.mass import AttentionMass
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import Writes
from test_eager_grid import both_widths, compare_with_reference
from triton_device import DEVICE, NEEDS_GPU_OR_INTERPRETER
from triton_world import World

pytestmark = NEEDS_GPU_OR_INTERPRETER


def test_tokens_are_stored_from_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of strided K and V, whose memory the next kernel might have while this one reads it."""
    pool = LayerPool(3, 5, 20, 12, torch.float32, DEVICE, {}, {}, True)
    pool.reserve(9, 0)
    k, v = (torch.randn(3, width, 7, device=DEVICE).permute(2, 0, 1) for width in (20, 12))
    blocks, offsets = (torch.tensor(x, device=DEVICE) for x in ([8, 2, 2, 1, 5, 5, 7], [0, 4, 1, 2, 3, 0, 4]))
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self: pytest.fail("copied"))
    TritonBackend().write(pool, Writes(blocks, offsets, blocks[:0], blocks[:0]), k, v)
    assert torch.equal(pool.k[:, blocks, offsets], k.transpose(0, 1))
    assert torch.equal(pool.v[:, blocks, offsets], v.transpose(0, 1))


@pytest.mark.parametrize("reduction", ["sum", "mean", "max"])
@pytest.mark.parametrize(("decay", "first", "rows"), [(1.0, 0, 97), (0.9, 31, 70), (0.5, 40, 1), (0.0, 9, 12)])
def test_prompt_mass(decay: float, first: int, rows: int, reduction: str) -> None:
    """Decayed column sums beside float64, also of a chunk with a past, of grouped heads that are no power of two."""
    world = World([first + rows], 5, 3, 3, (20, 20), torch.float32)
    q = torch.randn(rows, 3, 3, 20, device=DEVICE)
    sinks = torch.randn(3, 3, device=DEVICE) if reduction == "sum" else None
    options = AttentionOptions(0.4, 5.0 if reduction == "max" else None, sinks, AttentionMass(decay, reduction))
    got = TritonBackend().prompt_mass(q, world.pool, world.rows.table[0], first, options)
    keys = world.pool.k[:, world.rows.table[0]].flatten(1, 2)[:, : first + rows]
    want = column_sums(q, keys, options)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="draws on the CPU; kvsieve verify --device cuda does it on a GPU")
@pytest.mark.parametrize(
    ("name", "page_size", "group", "head_dim"),
    [
        ("gqa_quest_sparse_attention", 5, 7, 20),
        ("gqa_h2o_token_sparse_attention", 1, 3, 20),
        ("h2o", 1, 7, 20),
        pytest.param("h2o", 5, 3, 20, marks=pytest.mark.slow),
        pytest.param("block_sparse_attention", 33, 7, 80, marks=pytest.mark.slow),
        pytest.param("gqa_block_sparse_attention", 5, 3, 20, marks=pytest.mark.slow),
        pytest.param("streaming_llm", 5, 24, 80, marks=pytest.mark.slow),
    ],
)
def test_whole_steps_equal_the_reference(name: str, page_size: int, group: int, head_dim: int) -> None:
    compare_with_reference("triton", name, page_size, both_widths(group, head_dim), group * 1000 + head_dim)


def test_a_device_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsieve.backends.triton.backend.INTERPRETED", False)
    runtime = Runtime("streaming_llm", Budget(0, 1, 1), page_size=5, backend="triton")
    call = runtime.extend([runtime.admit()], [3])
    with pytest.raises(ConfigError, match=r"backend triton: expected tensors on a CUDA device, received cpu"):
        call.attend(0, *(torch.randn(3, 2, 8) for _ in range(3)))


def test_names() -> None:
    assert get_backend("triton").name == "triton" and get_backend("triton+compiled").name == "triton+compiled"


def test_kernels_compile_for_a_gpu() -> None:
    """The interpreter accepts what the compiler refuses: types that change in a loop, shapes that do not fit."""
    where = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    ran = subprocess.run([sys.executable, str(script)], env=where, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0 and "26 kernels and 43 generated ones, 0 failed" in ran.stdout, ran.stdout + ran.stderr
