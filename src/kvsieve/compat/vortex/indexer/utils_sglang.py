"""Planning for an engine of SGLang's kind: decode steps, and dense prefill in head-major order."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from kvsieve.compat.vortex.abs.tensor import plain
from kvsieve.compat.vortex.core.errors import OpError, described
from kvsieve.compat.vortex.core.step import number
from kvsieve.compat.vortex.indexer.context import PAGE_LISTS, WORK_LIST
from kvsieve.compat.vortex.indexer.plan import Listing, Outputs, StepShape, indptr, page_rows, send, write_plan
from kvsieve.compat.vortex.utils import UNSET


def plan_decode(cached_seq_lens: torch.Tensor, req_to_token: torch.Tensor, req_indices: torch.Tensor, ctx: Any) -> None:
    """Fill a context's page lists and work list for a decode step, and set its batch size.

    For segment ``g = b * H + h`` with P pages of which ``K = min(topk + bos + eos, P)`` are attended:
    ``dense_kv_indptr`` and ``sparse_kv_indptr`` are prefix sums of P and K; ``dense_kv_indices`` the page rows
    ``(slot // page_size) * H + h`` in sequence order; ``sparse_kv_indices`` all of them if ``P <= topk + bos + eos``,
    else the first ``bos`` and last ``eos`` (the middle is left for ``topK``); ``kv_last_page_len`` the tokens of the
    last page; ``winfo_*`` the items of at most ``max_chunk_size`` pages over the windows ``[bos, P - eos)`` that hold
    more than ``topk`` pages. Any number of requests, heads and pages.

    Args:
        cached_seq_lens: [B] tokens of each request, the newest included.
        req_to_token: [requests, tokens], slot of each token; only every ``page_size``-th one is read.
        req_indices: [B] rows of ``req_to_token``.
        ctx: the context, with ``page_size``, ``num_kv_heads``, ``topk_val``, ``page_reserved_bos``,
            ``page_reserved_eos`` and ``max_chunk_size``. Output tensors that nobody has set are made.

    Raises:
        OpError: an output tensor is too small, or a number is out of range.
    """
    lengths = read_lengths(cached_seq_lens, req_to_token, req_indices)
    chunk = number(ctx, "max_chunk_size", unset=0) or max(1, max(lengths, default=1))
    step = StepShape(
        lengths,
        number(ctx, "page_size"),
        number(ctx, "num_kv_heads"),
        number(ctx, "topk_val"),
        number(ctx, "page_reserved_bos"),
        number(ctx, "page_reserved_eos"),
        chunk,
    )
    _make_missing(ctx, step, plain(req_to_token).device)
    out = Outputs({name: getattr(ctx, name) for name in (*PAGE_LISTS, *WORK_LIST)})
    write_plan(step, out, plain(req_to_token), plain(req_indices).flatten())
    ctx.batch_size = len(lengths)


def sglang_plan_decode(
    cached_seq_lens: torch.Tensor,
    dense_kv_indptr: torch.Tensor,
    dense_kv_indices: torch.Tensor,
    sparse_kv_indptr: torch.Tensor,
    sparse_kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    req_to_token: torch.Tensor,
    req_indices: torch.Tensor,
    winfo_q_indices: torch.Tensor,
    winfo_kv_offsets: torch.Tensor,
    winfo_kv_lens: torch.Tensor,
    winfo_num_workloads: torch.Tensor,
    winfo_chunk_size: torch.Tensor,
    page_size: int,
    num_kv_heads: int,
    topk_val: int,
    page_reserved_bos: int,
    page_reserved_eos: int,
    max_chunk_size: int,
    min_chunk_size: int = 1,
) -> None:
    """:func:`plan_decode` with every argument loose. ``min_chunk_size`` has no effect, as in vortex_torch."""
    lengths = read_lengths(cached_seq_lens, req_to_token, req_indices)
    step = StepShape(lengths, page_size, num_kv_heads, topk_val, page_reserved_bos, page_reserved_eos, max_chunk_size)
    lists = dense_kv_indptr, dense_kv_indices, sparse_kv_indptr, sparse_kv_indices, kv_last_page_len
    winfo = winfo_q_indices, winfo_kv_offsets, winfo_kv_lens, winfo_num_workloads, winfo_chunk_size
    out = Outputs(dict(zip((*PAGE_LISTS, *WORK_LIST), (*lists, *winfo), strict=True)))
    write_plan(step, out, plain(req_to_token), plain(req_indices).flatten())


def sglang_plan_prefill(
    cached_seq_lens: torch.Tensor,
    dense_kv_indptr: torch.Tensor,
    dense_kv_indices: torch.Tensor,
    input_seq_lens: torch.Tensor,
    qo_indptr_ragged: torch.Tensor,
    qo_indptr_paged: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    req_to_token: torch.Tensor,
    req_indices: torch.Tensor,
    batch_table: torch.Tensor,
    page_size: int,
    num_kv_heads: int,
) -> None:
    """Fill the lists of a dense prefill: pages of the cached tokens, and rows of q per request and per segment.

    Args:
        cached_seq_lens: [B] tokens stored before this call. input_seq_lens: [B] tokens of this call.
        qo_indptr_ragged: [B + 1], prefix sums of the new tokens; qo_indptr_paged: [B * H + 1], the same per segment.
        batch_table: [new tokens], the request of every new token.
    """
    lengths = read_lengths(cached_seq_lens, req_to_token, req_indices)
    new = [int(n) for n in plain(input_seq_lens).flatten().tolist()]
    if len(new) != len(lengths) or min(new, default=0) < 0:
        problem = f"expected {len(lengths)} numbers >= 0, received {new}"
        raise OpError("plan_prefill: input_seq_lens", problem, "pass the new tokens of each request")
    step, device = StepShape(lengths, page_size, num_kv_heads, 0, 0, 0, 1), dense_kv_indices.device
    pages = step.per_segment(step.pages)
    last = [(length - 1) % page_size + 1 if length else 0 for length in lengths]
    values = {
        "dense_kv_indptr": (dense_kv_indptr, send(indptr(pages), device)),
        "dense_kv_indices": (
            dense_kv_indices,
            page_rows(step, Listing.of(pages, device), plain(req_to_token).to(device), plain(req_indices).to(device)),
        ),
        "qo_indptr_ragged": (qo_indptr_ragged, send(indptr(new), device)),
        "qo_indptr_paged": (qo_indptr_paged, send(indptr(step.per_segment(new)), device)),
        "kv_last_page_len": (kv_last_page_len, send(step.per_segment(last), device)),
        "batch_table": (batch_table, Listing.of(new, device).segment),
    }
    out = Outputs({name: tensor for name, (tensor, _) in values.items()})
    out.check({name: len(value) for name, (_, value) in values.items()})
    for name, (_, value) in values.items():
        out.write(name, value)


def chunkwise_nh2hn_transpose(x: torch.Tensor, out: torch.Tensor, indptr: torch.Tensor, *_: Any) -> torch.Tensor:
    """Token-major to head-major within each request: x [tokens, heads, D] -> out, per request [heads, tokens, D]."""
    return _transposed(x, out, indptr, to_heads=True)


def chunkwise_hn2nh_transpose(x: torch.Tensor, out: torch.Tensor, indptr: torch.Tensor, *_: Any) -> torch.Tensor:
    """The inverse of :func:`chunkwise_nh2hn_transpose`."""
    return _transposed(x, out, indptr, to_heads=False)


def _transposed(x: torch.Tensor, out: torch.Tensor, starts: torch.Tensor, to_heads: bool) -> torch.Tensor:
    tokens, heads, width = x.shape
    bounds = plain(starts).flatten().tolist()
    counts = [end - start for start, end in itertools.pairwise(bounds)]
    listing = Listing.of(counts, x.device)
    begin, count = (send(values, x.device)[listing.segment] for values in (bounds[:-1], counts))
    head = torch.arange(heads, device=x.device)
    order = (begin * heads + listing.place)[:, None] + head * count[:, None]
    flat = plain(x).reshape(-1, width)
    result = torch.empty_like(flat)
    if to_heads:
        result[order.flatten()] = flat[: len(order) * heads]
    else:
        result[: len(order) * heads] = flat[order.flatten()]
    plain(out).view(-1, width).copy_(result.view(tokens * heads, width))
    return out


def read_lengths(lengths: torch.Tensor, req_to_token: torch.Tensor, req_indices: torch.Tensor) -> list[int]:
    """The requests' lengths, read back together with their rows of the table, which must hold them.

    Raises:
        OpError: there is no such row, or it holds fewer tokens.
    """
    given = {"cached_seq_lens": (lengths, 1), "req_to_token": (req_to_token, 2), "req_indices": (req_indices, 1)}
    for name, (x, rank) in given.items():
        if not isinstance(x, torch.Tensor) or x.dim() != rank or x.is_floating_point():
            problem = f"expected an integer tensor of {rank} axes, received {described(x)}"
            raise OpError(f"plan: {name}", problem, "pass lengths [B], slots [requests, tokens], rows [B]")
    rows, width = plain(req_to_token).shape
    lens, indices = (plain(x).long() for x in (lengths, req_indices))
    if len(lens) != len(indices):
        problem = f"expected a row of req_to_token for each of {len(lens)} lengths, received {len(indices)}"
        raise OpError("plan: req_indices", problem, "pass as many rows as lengths")
    read, places = torch.stack([lens, indices.to(lens.device)]).tolist()
    for length, place in zip(read, places, strict=True):
        if not (0 <= length <= width and 0 <= place < rows):
            problem = (
                f"expected lengths in [0, {width}] and rows in [0, {rows}) of req_to_token {[rows, width]}, "
                f"received length {length} in row {place}"
            )
            raise OpError("plan", problem, "enter the slot of every token in req_to_token first")
    return [int(length) for length in read]


def _make_missing(ctx: Any, step: StepShape, device: torch.device) -> None:
    """Make the outputs that nobody has set, and anew those that it made and that have become too small."""
    made: dict[str, torch.Tensor] = getattr(ctx, "_made", None) or {}
    segments, pages = len(step.lengths) * step.heads, sum(step.pages) * step.heads
    sizes = {"dense_kv_indptr": segments + 1, "sparse_kv_indptr": segments + 1, "kv_last_page_len": segments}
    sizes |= {"dense_kv_indices": pages, "sparse_kv_indices": pages, "winfo_num_workloads": 1, "winfo_chunk_size": 1}
    for name in (*PAGE_LISTS, *WORK_LIST):
        size, held = sizes.get(name, sum(step.items) * step.heads), getattr(ctx, name, UNSET)
        outgrown = name in made and held is made[name] and made[name].numel() < size
        if held is UNSET or outgrown:
            made[name] = torch.zeros(2 * size if outgrown else size, dtype=torch.int32, device=device)
            setattr(ctx, name, made[name])
    ctx._made = made
