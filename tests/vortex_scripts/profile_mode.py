"""Profile mode of the heavy-hitter flows, as a script written for vortex_torch. Exit code 0: all as expected."""

import argparse
import sys

import torch
from vortex_torch.abs import FORMAT, as_vtensor
from vortex_torch.cache import Context as CacheContext
from vortex_torch.flow.algorithms import (
    GQAH2OSparseAttention,
    GQAH2OTokenSparseAttention,
    H2OSparseAttention,
    H2OTokenSparseAttention,
)
from vortex_torch.utils import Mode

PAGE_FLOWS, TOKEN_FLOWS = (
    (H2OSparseAttention, GQAH2OSparseAttention),
    (
        H2OTokenSparseAttention,
        GQAH2OTokenSparseAttention,
    ),
)
D = 128


def profile_cache(flow, page_size, device):
    """Profile forward_cache on zero-row fields and no tokens."""
    ctx = CacheContext()
    ctx.mode = Mode.profile
    ctx.page_size, ctx.head_dim, ctx.head_num = page_size, D, 1
    ctx.total_num_pages, ctx.max_new_tokens_per_batch = 0, 0
    ctx._created = True
    cache = {
        name: as_vtensor(torch.zeros((0, *shape), dtype=torch.bfloat16, device=device), FORMAT.PAGED)
        for name, shape in flow.get_cache_meta_info(page_size, D).items()
    }
    flow.forward_cache(cache=cache, loc=torch.empty(0, dtype=torch.int64, device=device), ctx=ctx)
    return ctx


def check_geometries(device):
    for cls in (*PAGE_FLOWS, *TOKEN_FLOWS):
        page_size = 1 if cls in TOKEN_FLOWS else 16
        for group in (1, 3, 4, 7, 8):
            flow = cls()
            read = flow.run_indexer_virtual(group, page_size, D)
            assert read == (D + 1 if cls in TOKEN_FLOWS else 3 * D), (cls, group, read)
            ctx = profile_cache(flow, page_size, device)
            assert ctx._aux_total_bytes == 0 and ctx._created
        fields = flow.get_cache_meta_info(page_size, D)
        assert fields["k"] == fields["v"] == (page_size, D)
        ratio = 2 + (1 / D if cls in TOKEN_FLOWS else 3 / page_size)
        assert abs(flow.get_token_ratio(page_size, D) - ratio) < 1e-12


def check_page_size_guard():
    for cls in TOKEN_FLOWS:
        for page_size in (2, 16):
            try:
                cls().create_cache(page_size, D)
            except AssertionError as error:
                assert "page_size" in str(error)
            else:
                raise SystemExit(f"{cls.__name__} took page size {page_size}")


def check_wiring():
    for cls in PAGE_FLOWS:
        flow = cls(w_avg=0.5, w_peak=2.0)
        assert (flow.add.alpha, flow.add.beta) == (0.5, 2.0)
        assert (cls().add.alpha, cls().add.beta) == (1.0, 1.0)
    for cls in TOKEN_FLOWS:
        flow = cls()
        assert flow.add.beta == 1 - 2**-6 == 0.984375 and flow.add.alpha == 1.0
        for head_dim in (64, 80, 128):
            assert flow.create_cache(1, head_dim) == {"hh_score": (1, 1)}
            assert flow.softmax.scale == head_dim**-0.5
        flow = cls(decay=0.5, scale=0.25)
        flow.create_cache(1, D)
        assert (flow.softmax.scale, flow.add.beta) == (0.25, 0.5)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    check_geometries(device)
    check_page_size_guard()
    check_wiring()
    print("profile mode: as expected")
    return 0


if __name__ == "__main__":
    sys.exit(main())
