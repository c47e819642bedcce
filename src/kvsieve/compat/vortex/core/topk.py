"""The best pages of every segment's window."""

from __future__ import annotations

import torch

from kvsieve.compat.vortex.abs.tensor import plain
from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.core.kernels import widened
from kvsieve.compat.vortex.core.work import Windows


def topk_output(
    x: torch.Tensor,
    dense_kv_indptr: torch.Tensor,
    sparse_kv_indptr: torch.Tensor,
    dense_kv_indices: torch.Tensor,
    sparse_kv_indices: torch.Tensor,
    eff_batch_size: int,
    topk_val: int,
    reserved_bos: int,
    reserved_eos: int,
    max_num_pages_per_request: int = 0,
) -> None:
    """Write the page rows of each segment's ``topk_val`` best window pages, best first, to ``sparse_kv_indices``.

    A segment of more than ``topk_val + reserved_bos + reserved_eos`` pages is ranked over its pages
    ``[bos, pages - eos)``; others are left alone. At equal score the older page comes first; NaN ranks below -inf.

    Args:
        x: scores [S, 1, 1] of any floating dtype, by place in the page listing.
        dense_kv_indptr, dense_kv_indices: the page listing.
        sparse_kv_indptr: [segments + 1]; results go to ``sparse_kv_indptr[segment] + reserved_bos``.
        sparse_kv_indices: integers, changed in place.
        eff_batch_size: segments. max_num_pages_per_request: not needed; any number of pages is ranked.
    """
    if not x.dtype.is_floating_point:
        raise OpError("topk_output", f"expected floating-point scores, received {x.dtype}", "pass x.float()")
    if sparse_kv_indices.dtype not in (torch.int32, torch.int64):  # others cannot hold every page row
        problem = f"expected sparse_kv_indices of int32 or int64, received {sparse_kv_indices.dtype}"
        raise OpError("topk_output", problem, "make o an int32 tensor")
    windows = Windows.read(dense_kv_indptr, eff_batch_size, reserved_bos, reserved_eos, topk_val)
    if windows is None or topk_val < 1:
        return
    scores = widened(plain(x).reshape(-1)[windows.positions])
    # Two stable sorts: by value, then what is no number behind all numbers, then padding behind everything.
    nan = torch.isnan(scores)
    rank = torch.where(windows.valid, torch.where(nan, 1, 0), 2)
    order = torch.argsort(torch.where(nan, -torch.inf, scores), dim=1, descending=True, stable=True)
    order = order.gather(1, torch.argsort(rank.gather(1, order), dim=1, stable=True))[:, :topk_val]
    pages = plain(dense_kv_indices).reshape(-1)[windows.positions.gather(1, order)]
    place = plain(sparse_kv_indptr).reshape(-1)[windows.segments].long() + reserved_bos
    target = place[:, None] + torch.arange(topk_val, device=place.device)
    out = plain(sparse_kv_indices)
    if not out.is_contiguous():
        problem = f"expected contiguous sparse_kv_indices, received strides {out.stride()}"
        raise OpError("topk_output", problem, "pass a tensor of its own, not a view of one")
    out.view(-1)[target] = pages.to(out.dtype)
