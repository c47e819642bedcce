"""Exact attention in plain PyTorch: over gathered tokens for a step, dense and causal for prefill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right

from kvsieve.backends.base import AttentionOptions, Selection
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import Rows

MASS_BLOCK, GPU_MASS_BLOCK = 2**19, 2**26  # probabilities at a time that are added up
MASS_ROWS, LEAST_ROWS = 128, 8  # query rows at a time, at most and at least
PREFILL_ROWS = 1024  # query rows at a time where a mask is needed: bounds it to rows x length


def attend_selected(
    q: torch.Tensor, pool: LayerPool, rows: Rows, selection: Selection, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Attention over a selection, its tokens gathered: q [B, H, G, D] -> out [B, H, G, Dv], lse [B, H, G] float32.

    With ``options.mass`` also what the step adds to the mass of the selected tokens [B, H, K, p].
    """
    batch, heads, group, _ = q.shape
    blocks = selection.blocks(rows.table)
    mask = selection.tokens(pool.page_size, rows.lengths_tensor)
    out, lse, mass = attend_tokens(
        q.transpose(0, 1).flatten(0, 1),
        gather_selected(pool.k, blocks),
        gather_selected(pool.v, blocks),
        mask.transpose(0, 1).reshape(heads * batch, -1),
        options,
    )
    shape = heads, batch, group
    if mass is not None:
        mass = mass.reshape(heads, batch, -1, pool.page_size).transpose(0, 1)
    return out.reshape(*shape, -1).transpose(0, 1), lse.reshape(shape).transpose(0, 1), mass


def prompt_mass(
    q: torch.Tensor, pool: LayerPool, blocks: torch.Tensor, first: int, options: AttentionOptions
) -> torch.Tensor:
    """:func:`column_sums` of queries at positions ``first ..`` over the pages in ``blocks`` [S]."""
    return column_sums(q, gather_pages(pool.k, blocks[None]).flatten(1, 2)[:, : first + len(q)], options)


def attend_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q [N, G, D], k [N, T, D], v [N, T, Dv], mask [N, T] -> out [N, G, Dv] in q's dtype, lse [N, G] float32.

    With ``options.mass`` also the probabilities, reduced over the group [N, T]; 0 for masked tokens, whose logits would
    else be NaN where a segment's lse is.

    Masked tokens may hold anything, NaN included. ``N`` is head-major; sink logits [H, G] repeat over requests.
    """
    logits = torch.matmul(q.float(), k.float().transpose(1, 2))
    logits = _logits(logits, options)
    logits = torch.where(mask[:, None], logits, float("-inf"))
    lse = torch.logsumexp(logits, -1)
    if options.sinks is not None:
        lse = torch.logaddexp(lse, options.sinks.float().repeat_interleave(q.shape[0] // options.sinks.shape[0], 0))
    probabilities = torch.exp(logits - lse[..., None])
    values = torch.where(mask[..., None], v.float(), 0.0)
    mass = None if options.mass is None else torch.where(mask, options.mass.reduce(probabilities, 1), 0.0)
    return torch.matmul(probabilities, values).to(q.dtype), lse, mass


def column_sums(q: torch.Tensor, k: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Decayed column sums of causal attention: the last tokens' q [n, H, G, D] over k [H, L, D] -> float32 [H, L].

    Query ``i`` counts ``decay ** (n - 1 - i)``; those whose weight is below rounding are skipped. Memory grows with
    the length only: a block of probabilities at a time.
    """
    mass = options.mass
    assert mass is not None
    heads, length = k.shape[:2]
    rows = mass.significant(len(q))
    weights = torch.tensor(mass.row_weights(rows), dtype=torch.float32, device=q.device)
    queries = q[len(q) - rows :].permute(1, 2, 0, 3)
    total = torch.zeros(heads, length, dtype=torch.float32, device=q.device)
    step, together = mass_block(q.device, heads, q.shape[2], length)
    for head in range(0, heads, together):
        some = slice(head, head + together)
        asked, keys = queries[some].float(), k[some].float()
        sinks = None if options.sinks is None else options.sinks[some]
        for first in range(0, rows, step):
            block = asked[:, :, first : first + step]
            last = length - rows + first + block.shape[2]
            probabilities = _causal_probabilities(block, keys[:, :last], replace(options, sinks=sinks))
            total[some, :last] += torch.matmul(weights[first : first + step], mass.reduce(probabilities, 1))
    return total


def mass_block(device: torch.device, heads: int, group: int, length: int) -> tuple[int, int]:
    """Query rows and KV heads at a time. On a CPU a block stays in its cache; a GPU wants much work at a time."""
    size, together = (MASS_BLOCK, 1) if device.type == "cpu" else (GPU_MASS_BLOCK, heads)
    return min(MASS_ROWS, max(LEAST_ROWS, size // (together * group * length))), together


def _causal_probabilities(q: torch.Tensor, k: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """What the last tokens' q [H, G, n, D] give to k [H, L, D], both float32: [H, G, n, L]."""
    heads, group, n, width = q.shape
    products = torch.matmul(q.reshape(heads, group * n, width), k.transpose(1, 2))
    logits = _logits(products.view(heads, group, n, -1), options)
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    logits[..., -n:].masked_fill_(hidden, float("-inf"))
    probabilities = torch.softmax(logits, -1)
    if options.sinks is not None:
        lse = torch.logsumexp(logits, -1, keepdim=True)
        probabilities *= torch.sigmoid(lse - options.sinks.float()[..., None, None])
    return probabilities


def prefill_requests(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: LayerPool, rows: Rows, options: AttentionOptions
) -> torch.Tensor:
    """Dense causal attention, request by request: q [T, H, G, D], k [T, H, D], v [T, H, Dv] -> [T, H, G, Dv]."""
    out = []
    first = 0
    for index, (start, count, length) in enumerate(zip(rows.starts, rows.counts, rows.lengths, strict=True)):
        new = slice(first, first + count)
        first += count
        if not count:
            continue
        if start == 0:
            keys, values = k[new].transpose(0, 1), v[new].transpose(0, 1)
        else:
            pages = rows.table[index : index + 1, : -(-length // pool.page_size)]
            keys, values = (gather_pages(field, pages).flatten(1, 2)[:, :length] for field in (pool.k, pool.v))
        out.append(prefill_request(q[new], keys, values, options))
    return torch.cat(out)


def prefill_request(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Causal attention of a request's last tokens: q [n, H, G, D], k [H, L, D], v [H, L, Dv] -> [n, H, G, Dv]."""
    n, heads, group, _ = q.shape
    length = k.shape[1]
    queries = q.flatten(1, 2).transpose(0, 1)[None]
    if options.softcap is None and options.sinks is None:
        if n == length:
            out = _sdpa(queries, k[None], v[None], options.scale, is_causal=True, enable_gqa=group > 1)
            return _grouped(out[0], heads)
        if q.is_cuda:
            return _grouped(attend_last(queries, k[None], v[None], options.scale)[0], heads)
    parts = []
    for first in range(0, n, PREFILL_ROWS):
        rows = min(PREFILL_ROWS, n - first)
        last = length - n + first + rows
        allowed = torch.ones(rows, last, dtype=torch.bool, device=q.device).tril(last - rows)
        part = queries[:, :, first : first + rows]
        parts.append(attend_masked(part, k[None, :, :last], v[None, :, :last], allowed, options)[0])
    return _grouped(torch.cat(parts, 1), heads)


def attend_last(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last of a request's tokens, whose GPU kernels need no mask in memory: q [B, Hq, n, D],
    k [B, H, L, D], v [B, H, L, Dv] -> [B, Hq, n, Dv]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # not every kernel knows groups
    return _sdpa(q, k, v, scale, attn_mask=causal_lower_right(q.shape[2], k.shape[2]))


def attend_masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Dense attention under a mask: q [B, Hq, n, D], k [B, H, L, D], v [B, H, L, Dv] -> [B, Hq, n, Dv].

    ``allowed`` broadcasts to [B, Hq, n, L]: bool, or a floating bias that is added to the logits. A row that may attend
    nothing comes out as 0.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if options.softcap is None and options.sinks is None:
        bias = allowed if allowed.dtype == torch.bool else allowed.to(q.dtype)
        return _sdpa(q, k, v, options.scale, attn_mask=bias)
    logits = _logits(torch.matmul(q.float(), k.float().transpose(-1, -2)), options)
    logits = torch.where(allowed, logits, float("-inf")) if allowed.dtype == torch.bool else logits + allowed
    lse = torch.logsumexp(logits, -1, keepdim=True)
    if options.sinks is not None:
        lse = torch.logaddexp(lse, options.sinks.float().reshape(-1, 1, 1))
    probabilities = torch.where(logits == float("-inf"), 0.0, torch.exp(logits - lse))
    return torch.matmul(probabilities, v.float()).to(q.dtype)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, **how: Any) -> torch.Tensor:
    """PyTorch's attention, which scales what it has masked: the sign of the scale goes into the queries, exactly."""
    if scale < 0:
        q, scale = -q, -scale
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, **how)


def gather_pages(field: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a head-major field [H, rows, *shape] for all heads alike: index [B, W] -> [H * B, W, *shape]."""
    batch, width = index.shape
    return field.index_select(1, index.flatten()).reshape(field.shape[0] * batch, width, *field.shape[2:])


def gather_selected(field: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Tokens of pages that differ by head: field [H, rows, p, D], blocks [B, H, K] -> [H * B, K * p, D]."""
    heads = torch.arange(field.shape[0], device=blocks.device)[:, None, None]
    return field[heads, blocks.transpose(0, 1)].flatten(0, 1).flatten(1, 2)


def _grouped(out: torch.Tensor, heads: int) -> torch.Tensor:
    """[Hq, n, Dv] -> [n, H, G, Dv]."""
    return out.transpose(0, 1).reshape(out.shape[1], heads, -1, out.shape[2])


def _logits(products: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    logits = products * options.scale
    return logits if options.softcap is None else options.softcap * torch.tanh(logits / options.softcap)
