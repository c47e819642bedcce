"""One forward call of a model: from a padded batch to the real tokens that the runtime sees, and back."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.backends.base import AttentionOptions
from kvsieve.call import Call
from kvsieve.errors import ConfigError


class Forward:
    """One forward call of the model: its shape, which tokens are real (None: all), and the runtime's call."""

    def __init__(self, shape: tuple[int, int], real: torch.Tensor | None, call: Call | None) -> None:
        self.shape, self.real, self.call = shape, real, call

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """query [B, Hq, T, D], key [B, H, T, D], value [B, H, T, Dv] -> [B, T, Hq, Dv]; zeros where padded."""
        real = None if self.real is None else self.real.to(query.device)
        q, k, v = (_flatten(x, real) for x in (query, key, value))
        shape = *self.shape, query.shape[1], value.shape[3]
        flat = None
        if self.call is not None:
            flat = self.call.attend(
                layer, q, k, v, scale=options.scale, softcap=options.softcap, sinks=options.sinks
            ).out
        if flat is not None and real is None:
            out = flat.reshape(shape)
        else:
            out = query.new_zeros(shape)
            if flat is not None:
                out[real] = flat
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            out = _Inference.apply(out, query)  # type: ignore[no-untyped-call]
        return out


class _Inference(torch.autograd.Function):
    """The identity, which refuses a backward pass: gradients do not flow through pages."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ConfigError("SparseCache is for inference: expected no backward pass; train with another cache")


def new_tokens(mask: torch.Tensor | None, seen: torch.Tensor, batch: int, rows: int) -> torch.Tensor:
    """Which of the new columns hold real tokens: bool [B, T] on the CPU.

    Raises:
        ConfigError: the mask has another length, or disagrees with what is stored.
    """
    if mask is None:
        return torch.ones(batch, rows, dtype=torch.bool)
    mask = mask.to("cpu", torch.bool)
    if mask.shape != (batch, seen.shape[1] + rows):
        raise ConfigError(
            f"attention_mask: expected {[batch, seen.shape[1] + rows]} (cached + new tokens), received "
            f"{list(mask.shape)}"
        )
    if not torch.equal(mask[:, : seen.shape[1]], seen):
        raise ConfigError(
            "attention_mask hides or shows cached tokens that were stored otherwise; keep the mask of earlier calls "
            "and append to it, or start a new cache"
        )
    return mask[:, seen.shape[1] :]


def _flatten(x: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """[B, H, T, D] -> real tokens, row after row: [tokens, H, D]."""
    rows = x.transpose(1, 2)
    return rows.flatten(0, 1) if real is None else rows[real]
