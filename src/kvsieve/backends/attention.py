"""Exact attention in plain PyTorch: over gathered tokens for a step, dense and causal for prefill."""

from __future__ import annotations

import torch

from kvsieve.backends.base import AttentionOptions

MASS_ROWS = 128  # query rows at a time whose probabilities are added up
PREFILL_ROWS = 1024  # query rows at a time where a mask is needed: bounds it to rows x length


def attend_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q [N, G, D], k [N, T, D], v [N, T, Dv], mask [N, T] -> out [N, G, Dv] in q's dtype, lse [N, G] float32.

    With ``options.mass`` also the probabilities, reduced over the group [N, T].

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
    mass = None if options.mass is None else options.mass.reduce(probabilities, 1)
    return torch.matmul(probabilities, values).to(q.dtype), lse, mass


def column_sums(q: torch.Tensor, k: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Decayed column sums of causal attention: the last tokens' q [n, H, G, D] over k [H, L, D] -> float32 [H, L].

    Query ``i`` counts ``decay ** (n - 1 - i)``; those whose weight is below rounding are skipped. Blockwise: the
    largest temporary is [H, G, MASS_ROWS, L].
    """
    mass = options.mass
    assert mass is not None
    rows, length = mass.significant(len(q)), k.shape[1]
    weights = torch.tensor(mass.row_weights(rows), device=q.device)
    queries, keys = q[len(q) - rows :].permute(1, 2, 0, 3).float(), k.float()[:, None].transpose(-1, -2)
    total = torch.zeros(k.shape[0], length, device=q.device)
    for first in range(0, rows, MASS_ROWS):
        block = queries[:, :, first : first + MASS_ROWS]
        last = length - rows + first + block.shape[2]
        hidden = torch.ones(block.shape[2], last, dtype=torch.bool, device=q.device).triu(last - block.shape[2] + 1)
        logits = _logits(torch.matmul(block, keys[..., :last]), options).masked_fill_(hidden, float("-inf"))
        lse = torch.logsumexp(logits, -1, keepdim=True)
        if options.sinks is not None:
            lse = torch.logaddexp(lse, options.sinks.float()[..., None, None])
        probabilities = mass.reduce(logits.sub_(lse).exp_(), 1)
        total[:, :last] += torch.matmul(weights[first : first + MASS_ROWS], probabilities)
    return total


def prefill_request(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Causal attention of a request's last tokens: q [n, H, G, D], k [H, L, D], v [H, L, Dv] -> [n, H, G, Dv]."""
    n, heads, group, _ = q.shape
    length = k.shape[1]
    queries = q.flatten(1, 2).transpose(0, 1)[None]
    if options.softcap is None and options.sinks is None and n == length:
        out = torch.nn.functional.scaled_dot_product_attention(
            queries, k[None], v[None], is_causal=True, scale=options.scale, enable_gqa=group > 1
        )
        return _grouped(out[0], heads)
    parts = []
    for first in range(0, n, PREFILL_ROWS):
        rows = min(PREFILL_ROWS, n - first)
        last = length - n + first + rows
        allowed = torch.ones(rows, last, dtype=torch.bool, device=q.device).tril(last - rows)
        part = queries[:, :, first : first + rows]
        parts.append(attend_masked(part, k[None, :, :last], v[None, :, :last], allowed, options)[0])
    return _grouped(torch.cat(parts, 1), heads)


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
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=options.scale)
    logits = _logits(torch.matmul(q.float(), k.float().transpose(-1, -2)), options)
    logits = torch.where(allowed, logits, float("-inf")) if allowed.dtype == torch.bool else logits + allowed
    lse = torch.logsumexp(logits, -1, keepdim=True)
    if options.sinks is not None:
        lse = torch.logaddexp(lse, options.sinks.float().reshape(-1, 1, 1))
    probabilities = torch.where(logits == float("-inf"), 0.0, torch.exp(logits - lse))
    return torch.matmul(probabilities, v.float()).to(q.dtype)


def _grouped(out: torch.Tensor, heads: int) -> torch.Tensor:
    """[Hq, n, Dv] -> [n, H, G, Dv]."""
    return out.transpose(0, 1).reshape(out.shape[1], heads, -1, out.shape[2])


def _logits(products: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    logits = products * options.scale
    return logits if options.softcap is None else options.softcap * torch.tanh(logits / options.softcap)
