"""The loose functions of the token-level accumulator, as a script written for vortex_torch: fill, add, save.

128 tokens, 800 steps, bfloat16, beside float64. Exit code 1 if a figure leaves its band.
"""

import argparse
import math
import sys

import torch
from vortex_torch.cache.triton_kernels.fill_impl import _fill_p
from vortex_torch.indexer.triton_kernels.elementwise_binary_impl import _elementwise_binary_rpr
from vortex_torch.indexer.triton_kernels.save_load_impl import _load_pr, _save_rp
from vortex_torch.utils import ElementwiseBinaryOpType

TOKENS, STEPS, TOPK, CHUNK, HEADS = 128, 800, 32, 32, 1


def increments(seed):
    """Softmax of logits of deviation 2, with 0.3 anew each step; the heaviest token has a share of 0.28."""
    random = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(TOKENS, generator=random)
    heavy = int(logits.argmax())
    rest = torch.cat([logits[:heavy], logits[heavy + 1 :]])
    logits[heavy] = torch.logsumexp(rest, 0) + math.log(0.28 / 0.72)
    for _ in range(STEPS):
        yield torch.softmax(logits + 0.3 * torch.randn(TOKENS, generator=random), 0)


def check_fill(device):
    """Exactly the pages whose last slot is written, all heads, and nothing else."""
    for page_size, heads in ((1, 1), (1, 5), (5, 3), (16, 2)):
        x = torch.full((12 * heads, 2, 3), 7.0, dtype=torch.bfloat16, device=device)
        loc = torch.tensor([0, page_size - 1, 3 * page_size, 7 * page_size + page_size - 1], device=device)
        _fill_p(x, loc, heads, page_size, 0.5)
        done = sorted({int(slot) // page_size for slot in loc if (int(slot) + 1) % page_size == 0})
        expected = torch.full_like(x, 7.0)
        for page in done:
            expected[page * heads : (page + 1) * heads] = 0.5
        assert torch.equal(x, expected), (page_size, heads)


def run(decay, device, seed):
    """Relative error, maximum, top-32 overlap and last movement of the stored accumulator."""
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(99))
    indices = order.to(device=device, dtype=torch.int32)
    pool = torch.full((TOKENS + 8, 1, 1), float("nan"), dtype=torch.bfloat16, device=device)
    _fill_p(pool, torch.arange(TOKENS, device=device), HEADS, 1, 0.0)
    assert not pool[:TOKENS].any() and bool(pool[TOKENS:].isnan().all())
    offsets = torch.arange(0, TOKENS, CHUNK, dtype=torch.int32, device=device)
    lens = torch.full_like(offsets, CHUNK)
    winfo = offsets, lens, torch.tensor([len(offsets)], dtype=torch.int32, device=device), CHUNK
    out = torch.empty(TOKENS, 1, 1, dtype=torch.bfloat16, device=device)
    exact = torch.zeros(TOKENS, dtype=torch.float64)
    for step in increments(seed):
        x = step.to(device=device, dtype=torch.bfloat16).view(-1, 1, 1)
        exact = x.flatten().double().cpu() + decay * exact
        _elementwise_binary_rpr(x, pool, out, indices, *winfo, ElementwiseBinaryOpType.Add, 1.0, decay, 1)
        before = pool.clone()
        _save_rp(out, pool, indices, *winfo, 1)
    moved = float((pool[:TOKENS] - before[:TOKENS]).abs().max())
    loaded = torch.empty_like(out)
    _load_pr(pool, loaded, indices, *winfo, 1)
    assert torch.equal(loaded, out)
    stored = loaded.flatten().double().cpu()
    error = float((stored - exact).abs().max() / exact.max())
    top = [set(values.topk(TOPK).indices.tolist()) for values in (stored, exact)]
    return error, float(stored.max()), len(top[0] & top[1]) / TOPK, moved


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    check_fill(options.device)
    error, largest, overlap, moved = run(1 - 2**-6, options.device, options.seed)
    print(f"decay 0.984375: rel. error {error:.2e}, max {largest:.1f}, top-{TOPK} {overlap:.0%}, moved {moved:.1e}")
    good = error < 0.03 and 16.5 <= largest <= 18.8 and overlap >= 0.93 and moved > 1e-4
    error, largest, overlap, _ = run(1.0, options.device, options.seed)
    print(f"decay 1.0: rel. error {error:.2e}, max {largest:.1f}, top-{TOPK} {overlap:.0%}")
    good = good and 0.39 <= error <= 0.43 and largest <= 130
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
