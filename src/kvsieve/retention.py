"""What happens to K and V that a step does not select: they stay, or the tokens that matter least are evicted."""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.errors import ConfigError, check_integer


@dataclass(frozen=True)
class Keep:
    """Everything stays: a step reads a selection, and a page left out now may be chosen later."""


@dataclass(frozen=True)
class Evict:
    """At most ``capacity`` tokens per (request, KV head) stay: memory is constant however long a request becomes.

    H2O, arXiv 2306.14048, Algorithm 1, with attention sinks. Before every decode step, of what earlier calls left, the
    tokens of least attention mass go that are neither among the first ``sink`` nor among the last ``recent`` ones; at
    equal mass the older stays. What is evicted never returns; positions stay the original ones. A call of several
    tokens attends what is stored and all its own tokens, so that chunks of a prompt do not matter.

    Args:
        capacity: tokens that stay; a step attends one more, its own.
        sink: first tokens, never evicted. recent: last tokens, never evicted; at least 1.

    Raises:
        ConfigError: a value is no integer, or ``capacity`` does not hold the sink and recent tokens.
    """

    capacity: int
    sink: int = 4
    recent: int = 32

    def __post_init__(self) -> None:
        for name, least in (("capacity", 1), ("sink", 0), ("recent", 1)):
            check_integer(f"Evict({name}=)", getattr(self, name), least)
        if self.capacity < self.sink + self.recent:
            raise ConfigError(
                f"Evict(capacity=): expected at least sink + recent = {self.sink + self.recent} tokens, received "
                f"{self.capacity}; raise it, or lower sink or recent"
            )


Retention = Keep | Evict
KEEP = Keep()
