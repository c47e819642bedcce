"""What it costs to seed the attention mass of a prompt, beside the dense prefill that it follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvsieve.backends import Backend, get_backend
from kvsieve.backends.base import AttentionOptions
from kvsieve.bench.run import describe
from kvsieve.bench.setting import Setting
from kvsieve.bench.timing import Clock
from kvsieve.errors import KvsieveError
from kvsieve.mass import AttentionMass
from kvsieve.paging.pool import LayerPool
from kvsieve.plan import Rows

DECAYS = (1.0, 0.9)
"""All prompt queries count; the last 211 do."""
TOLERANCE = 1e-5
"""Of a column sum, relative: float32 sums of as many terms as the prompt has queries."""
REFERENCE_ROWS = 128


@dataclass(frozen=True)
class Seeding:
    """Seeding with one decay: seconds (median and least), and bytes of the largest tensor that it made."""

    decay: float
    seconds: float
    least: float
    largest: int


@dataclass(frozen=True)
class SeedingCase:
    """One layer of one request at a prompt length: dense prefill, seconds (median and least), and seeding after it."""

    context: int
    prefill: float
    prefill_least: float
    seedings: tuple[Seeding, ...]


@dataclass(frozen=True)
class SeedingMeasurement:
    """All that one run measured."""

    setting: dict[str, Any]
    cases: tuple[SeedingCase, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


class Prompt:
    """A prompt of ``length`` random tokens that a layer has stored."""

    def __init__(self, setting: Setting, length: int) -> None:
        s, p, device = setting, setting.page_size, torch.device(setting.device)
        random = torch.Generator(device).manual_seed(length)
        heads = (s.query_heads, s.kv_heads, s.kv_heads)
        q, self.k, self.v = (
            torch.randn(length, h, s.head_dim, generator=random, device=device).to(s.dtype) for h in heads
        )
        self.q = q.unflatten(1, (s.kv_heads, s.group))
        pages, token = -(-length // p), torch.arange(length, device=device)
        self.blocks = torch.arange(1, pages + 1, device=device)
        self.pool = LayerPool(s.kv_heads, p, s.head_dim, s.head_dim, s.dtype, device, {}, {})
        self.pool.reserve(pages + 1, 0)
        self.pool.write(self.blocks[token // p], token % p, self.k, self.v)
        lengths = torch.tensor([length], device=device)
        self.rows = Rows((0,), (length,), (length,), self.blocks[None], lengths)
        self.options = AttentionOptions(s.head_dim**-0.5)

    def prefill(self, backend: Backend) -> torch.Tensor:
        """Dense attention of the whole prompt."""
        return backend.prefill(self.q, self.k, self.v, self.pool, self.rows, self.options)

    def seed(self, backend: Backend, decay: float) -> torch.Tensor:
        """The mass of its tokens [H, L]."""
        options = replace(self.options, mass=AttentionMass(decay))
        return backend.prompt_mass(self.q, self.pool, self.blocks, 0, options)

    def exact(self, decay: float) -> torch.Tensor:
        """The mass of its tokens for the last KV head, in float64, row after row."""
        q, k, n = self.q[:, -1].double(), self.k[:, -1].double(), len(self.k)
        total = torch.zeros(n, dtype=torch.float64, device=k.device)
        for first in range(0, n, REFERENCE_ROWS):
            place = torch.arange(first, min(first + REFERENCE_ROWS, n), device=k.device)
            logits = q[place] @ k.T * self.options.scale
            hidden = torch.arange(n, device=k.device) > place[:, None, None]
            received = torch.softmax(logits.masked_fill(hidden, float("-inf")), -1).sum(1)
            total += (decay ** (n - 1 - place).double()) @ received
        return total


def run_seeding(
    contexts: Sequence[int], setting: Setting, progress: Callable[[int, int], None] = lambda done, total: None
) -> SeedingMeasurement:
    """Check the column sums against float64 at every prompt length, then time prefill and seeding in turn.

    Raises:
        KvsieveError: the sums are wrong beyond rounding; no time is taken then.
    """
    backend, total, done = get_backend(setting.backend), len(contexts) * setting.repeats, 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    progress(0, total)
    cases = tuple(_measure(backend, setting, context, tick) for context in contexts)
    return SeedingMeasurement(describe(setting), cases)


def _measure(backend: Backend, setting: Setting, context: int, tick: Callable[[], None]) -> SeedingCase:
    prompt = Prompt(setting, context)
    for decay in DECAYS:
        _check(prompt, backend, decay)
    runs: dict[str, Callable[[int], object]] = {"prefill": lambda layer: prompt.prefill(backend)}
    for decay in DECAYS:
        runs[str(decay)] = partial(lambda decay, layer: prompt.seed(backend, decay), decay)
    times = Clock(torch.device(setting.device), 1, setting.repeats).measure(runs, {}, tick)
    seedings = tuple(Seeding(d, *times[str(d)], largest_tensor(partial(prompt.seed, backend, d))) for d in DECAYS)
    return SeedingCase(context, *times["prefill"], seedings)


def largest_tensor(run: Callable[[], object]) -> int:
    """Bytes of the largest tensor that a call makes."""
    largest = LargestTensor()
    with largest:
        run()
    return largest.bytes


def _check(prompt: Prompt, backend: Backend, decay: float) -> None:
    received, expected = prompt.seed(backend, decay)[-1].double(), prompt.exact(decay)
    error = float(((received - expected).abs() / expected.clamp(min=1e-6)).max())
    if not error <= TOLERANCE:
        raise KvsieveError(
            f"no time is shown, for seeding is wrong: decay {decay}, {len(expected):,} tokens, last KV head: a column "
            f"sum errs by {error:.1e}, expected at most {TOLERANCE:.0e}"
        )


class LargestTensor(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that an op made while it was on; views make none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {one.untyped_storage().data_ptr() for one in _tensors((args, kwargs))}
        made = [one.nbytes for one in _tensors(result) if one.untyped_storage().data_ptr() not in known]
        self.bytes = max([self.bytes, *made])
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]
