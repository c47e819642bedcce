"""The window of a step as the kernels see it: tables and sizes on the device, nothing for the host to wait for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ScoreWindow:
    """The window pages of the requests that are scored.

    Page w of request i is page ``sink + w`` of the request at place ``requests[i]`` in the batch.

    Args:
        requests: places in the batch, int64 [Bs].
        table: block of each page, int64 [B, S].
        row_table: state row of each page, int64 [B, S].
        widths: window pages of each scored request, int64 [Bs]; 0 is possible.
        lengths: tokens of each request, int64 [B].
        width: upper bound of ``widths`` (host); sizes the launch and the scores.
        sink: sink pages (host).
        page_size: tokens per page (host).
        mass_scale: what stored mass is multiplied by, float32 [Bs, 1]; None without mass.
    """

    requests: torch.Tensor
    table: torch.Tensor
    row_table: torch.Tensor
    widths: torch.Tensor
    lengths: torch.Tensor
    width: int
    sink: int
    page_size: int
    mass_scale: torch.Tensor | None = None
