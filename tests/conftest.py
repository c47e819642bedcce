"""Fixtures of all tests: memory that nobody has written is poison."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported: its kernels run on the CPU

from kvsieve.verify.poison import poisoned_pools

# The same examples in every run, however slow or busy the machine is.
settings.register_profile(
    "repeatable", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # a worker a core: threads that wait for each other cost minutes


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Every buffer that a pool creates is full of NaN, or of garbage where NaN does not exist."""
    with poisoned_pools():
        yield


@pytest.fixture
def generator() -> torch.Generator:
    """Seeded random numbers."""
    return torch.Generator().manual_seed(20240607)
