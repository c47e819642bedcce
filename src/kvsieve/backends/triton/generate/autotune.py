"""Tilings that were tried on a GPU and kept in the cache: by kernels, GPU and amount of work."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvsieve.backends.base import Tuning
from kvsieve.backends.triton.generate.kernel import Kernel
from kvsieve.backends.triton.generate.loader import replace_file
from kvsieve.backends.triton.generate.run import Built
from kvsieve.backends.triton.generate.tuning import MOST_PAGES, MOST_WARPS, Tiling, fewest_pages
from kvsieve.backends.triton.launch import INTERPRETED
from kvsieve.cache import cache_dir
from kvsieve.errors import ConfigError

Tilings = tuple[Tiling, ...]
Clock = Callable[[], float | None]
"""Seconds of a launch with the tilings that are set; None if the GPU cannot hold them."""
FILE = "tilings.json"


def work_class(pages: int) -> int:
    """Amounts of work that share a tiling: window pages of all requests, by powers of four."""
    return pages.bit_length() // 2


def kept_tilings(built: Built, heads: int, device: torch.device, pages: int) -> Tilings | None:
    """What was found best for so many pages on this GPU; None if nothing was tried.

    Interpreted kernels have no times: no file is read for them.
    """
    if INTERPRETED and not built.tuned:
        return None
    case = device, work_class(pages)
    if case not in built.tuned:
        found = _stored().get(_key(built, heads, *case), ())
        built.tuned[case] = tuple(Tiling(*one) for one in found) if len(found) == len(built.kernels) else None
    return built.tuned[case]


def tune(phase: str, built: Built, heads: int, device: torch.device, pages: int, scans: bool, clock: Clock) -> Tuning:
    """Try a handful of tilings, a stage after the other, and keep the fastest.

    Args:
        phase: what the kernels do. built: the kernels. heads: KV heads of their launches.
        pages: pages of one launch, of all requests.
        scans: whether chunks of pages follow each other, which then have one size in all stages.
        clock: times a launch.
    """
    case = device, work_class(pages)
    best = by_rule = tuple(built.tilings)
    tried = 1
    try:
        least = first = _timed(built, case, by_rule, clock)
        for stage, kernel in enumerate(built.kernels):
            for one in neighbours(kernel, best[stage], scans):
                candidate = (*best[:stage], one, *best[stage + 1 :])
                seconds = _timed(built, case, candidate, clock)
                tried += 1
                if seconds < least:
                    best, least = candidate, seconds
    finally:  # no trial stays
        built.tuned[case] = best
    if least < math.inf:
        _keep(_key(built, heads, *case), best)
    return Tuning(phase, tuple(map(astuple, by_rule)), first, tuple(map(astuple, best)), least, tried)


def neighbours(kernel: Kernel, one: Tiling, scans: bool) -> Iterator[Tiling]:
    """Tilings near one: fewer or more pages, warps, and stages where a program loops over heads."""
    least = fewest_pages(kernel)
    sizes = [one.pages] if scans or kernel.whole else [one.pages // 2, one.pages, one.pages * 2]
    for pages in sizes:
        for warps in (one.warps // 2, one.warps, one.warps * 2):
            if (
                least <= pages <= max(MOST_PAGES, one.pages)
                and 1 <= warps <= MOST_WARPS
                and (pages, warps) != (one.pages, one.warps)
            ):
                yield replace(one, pages=pages, warps=warps)
    if kernel.loops:
        yield replace(one, stages=one.stages + 1)


def _timed(built: Built, case: tuple[torch.device, int], tilings: Tilings, clock: Clock) -> float:
    built.tuned[case] = tilings
    seconds = clock()
    return math.inf if seconds is None else seconds


def _key(built: Built, heads: int, device: torch.device, work: int) -> str:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    digest = hashlib.sha256(built.source.encode()).hexdigest()[:16]
    return f"{digest} {heads} heads, {gpu}, 4**{work} pages"


def _path() -> Path:
    return cache_dir() / FILE


@cache
def _stored() -> dict[str, Sequence[Sequence[int]]]:
    """The file's tilings that are any; none if there is no such file, or not such a one."""
    try:
        found: Any = json.loads(_path().read_text())
        rows = {key: [[int(x) for x in one] for one in value] for key, value in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {key: value for key, value in rows.items() if all(map(_is_tiling, value))}


def _is_tiling(one: Sequence[int]) -> bool:
    """Pages, warps, stages and heads, as Triton takes them."""
    return len(one) == 4 and min(one) > 0 and all(x & (x - 1) == 0 for x in one[:2])


def _keep(key: str, tilings: Tilings) -> None:
    _stored.cache_clear()  # others may have added theirs
    stored = _stored()
    stored[key] = [astuple(one) for one in tilings]
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        replace_file(_path(), json.dumps(stored, indent=1, sort_keys=True))
    except OSError as error:
        raise ConfigError(
            f"tilings: expected a cache that can be written, received {_path()} ({error.strerror or error}); set "
            "KVSIEVE_CACHE to another folder"
        ) from None
