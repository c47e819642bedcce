"""How kernels are launched: sizes, programmatic dependent launch, and the interpreter that stands in for a GPU."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Kernels run as NumPy on the CPU: for tests. Triton reads the variable when it is imported."""


def power_of_two(size: int, least: int = 1) -> int:
    """The next power of two: tiles have such sizes."""
    return max(least, 1 << max(0, size - 1).bit_length())


def largest_power(number: int) -> int:
    """The largest power of two that is not above ``number``, at least 1."""
    return 1 << max(0, number.bit_length() - 1)


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _dependent(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


UNFUSED = {"enable_fp_fusion": False}
"""Option of all kernels. Lanes add up what each has multiplied: with products fused into sums one rounds where another
does not, and one number, such as a maximum and what it was taken of, would differ from lane to lane."""
AT_END, ONCE_WAITED, AT_ONCE = 1, 2, 3
"""When a kernel lets the next one be set up: behind its own work, whose place the next would take; once its inputs are
there, if it leaves room for the next or the next needs little (selection behind a score); or at its start, where a
score follows that may run beside it. Kernels compare ``PDL`` with the numbers; 0 is without."""


def launch_options(device: torch.device, programs: int | None = None, when: int = AT_END) -> dict[str, Any]:
    """Options of a kernel that starts while the one before it ends, where the GPU can: it must call
    :func:`wait_for_inputs` before it reads or writes what other kernels touch.

    ``programs``: how many there are; few leave room for the next kernel from their start on.
    """
    if not _dependent(device):
        return {"PDL": 0} | UNFUSED
    if programs is not None and programs <= multiprocessors(device):
        when = max(when, ONCE_WAITED)
    return {"PDL": when, "launch_pdl": True} | UNFUSED


@triton.jit
def wait_for_inputs(PDL: tl.constexpr, LATE: tl.constexpr = False):
    """Until the kernel before has ended and what it wrote is seen. It had itself waited for all that came before it.

    ``LATE``: this one reads and writes nothing that the kernel before writes or reads, temporary memory included, nor
    does the one ahead of that where the kernel before lets it go at once. What came earlier has ended: the first of the
    two waited for it before it let anyone go. This one waits at its own end instead, so that those behind it, which
    wait for it, find the work of all done.

    A score is such a kernel. Ahead of it are the one that stores a call's tokens, which lets the next go once it has
    waited, and perhaps the one that summarizes the pages they fill, which lets the next go at once; any kernel in
    between is PyTorch's, which waits for all. The two touch the last page, new tokens and summaries alone, and own no
    temporary memory; a score reads pages before the last, and the queries, unless they were copied for it.
    """
    if PDL == 3:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL > 0 and not LATE:
        tl.extra.cuda.gdc_wait()
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def let_next_start(PDL: tl.constexpr, LATE: tl.constexpr = False):
    """The kernel behind may be set up: it waits by itself."""
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL > 0 and LATE:
        tl.extra.cuda.gdc_wait()
