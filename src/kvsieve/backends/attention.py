"""Exact attention in plain PyTorch: over gathered tokens for a step, dense and causal for prefill."""

from __future__ import annotations

import torch

from kvsieve.backends.base import AttentionOptions

PREFILL_ROWS = 1024  # query rows at a time where a mask is needed: bounds it to rows x length


def attend_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [N, G, D], k [N, T, D], v [N, T, Dv], mask [N, T] -> out [N, G, Dv] in q's dtype, lse [N, G] float32.

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
    return torch.matmul(probabilities, values).to(q.dtype), lse


def prefill_request(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Causal attention of a request's last tokens: q [n, H, G, D], k [H, L, D], v [H, L, Dv] -> [n, H, G, Dv]."""
    n, heads, group, _ = q.shape
    length = k.shape[1]
    queries = q.flatten(1, 2).transpose(0, 1)[None]
    if options.softcap is None and options.sinks is None and n == length:
        out = torch.nn.functional.scaled_dot_product_attention(
            queries, k[None], v[None], is_causal=True, scale=options.scale, enable_gqa=group > 1
        )
        return out[0].transpose(0, 1).unflatten(1, (heads, group))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    parts = []
    for first in range(0, n, PREFILL_ROWS):
        part = queries[0, :, first : first + PREFILL_ROWS]
        last = length - n + first + part.shape[1]
        parts.append(_causal_rows(part, k[:, :last], v[:, :last], options))
    return torch.cat(parts, 1).transpose(0, 1).unflatten(1, (heads, group))


def _causal_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """The last rows of a causal square: q [Hq, n, D], k [Hq, L, D], v [Hq, L, Dv] -> [Hq, n, Dv]."""
    n, length = q.shape[1], k.shape[1]
    allowed = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    if options.softcap is None and options.sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=allowed, scale=options.scale
        )[0]
    logits = _logits(torch.matmul(q.float(), k.float().transpose(1, 2)), options)
    logits = torch.where(allowed, logits, float("-inf"))
    lse = torch.logsumexp(logits, -1, keepdim=True)
    if options.sinks is not None:
        lse = torch.logaddexp(lse, options.sinks.float().reshape(-1, 1, 1))
    return torch.matmul(torch.exp(logits - lse), v.float()).to(q.dtype)


def _logits(products: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    logits = products * options.scale
    return logits if options.softcap is None else options.softcap * torch.tanh(logits / options.softcap)
