"""Dense attention of a prompt, or of a later chunk of it, beside float64; on a GPU by the kernels of PyTorch."""

from __future__ import annotations

import pytest
import torch

from kvsieve.backends.attention import attend_last, prefill_request
from kvsieve.backends.base import AttentionOptions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [  # new tokens, all tokens, KV heads, group, head_dim, of V
    (3, 10, 2, 3, 20, 12),
    (1, 7, 1, 7, 80, 80),
    (5, 5, 3, 1, 16, 16),
    (70, 1100, 1, 24, 128, 128),
    (1030, 1033, 2, 2, 64, 64),
]
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q [n, H, G, D], k [H, L, D], v [H, L, Dv]."""
    n, length, heads, group, width, v_width = shape
    torch.manual_seed(n)
    sizes = (n, heads, group, width), (heads, length, width), (heads, length, v_width)
    return tuple(torch.randn(size).to(dtype).to(DEVICE) for size in sizes)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """[n, H, G, Dv] in float64."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    n, length = len(q), k.shape[1]
    logits = torch.einsum("nhgd,hld->hgnl", q, k) * scale
    hidden = torch.arange(length)[None] > torch.arange(length - n, length)[:, None]
    return torch.einsum("hgnl,hld->nhgd", logits.masked_fill(hidden, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("scale", [0.2, -0.2])
def test_the_last_tokens_attend_all_before_them(shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> None:
    q, k, v = drawn(shape, dtype)
    expected = exact(q, k, v, scale)
    received = prefill_request(q, k, v, AttentionOptions(scale))
    torch.testing.assert_close(received.double().cpu(), expected, rtol=0, atol=BOUNDS[dtype])
    last = attend_last(q.flatten(1, 2).transpose(0, 1)[None], k[None], v[None], scale)[0]
    last = last.transpose(0, 1).reshape(received.shape)
    torch.testing.assert_close(last.double().cpu(), expected, rtol=0, atol=BOUNDS[dtype])
