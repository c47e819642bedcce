"""A real text as tokens: what tasks cut their contexts from."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from kvsieve.errors import ConfigError


class Corpus:
    """A text and its tokens.

    Args:
        tokenizer: a Transformers tokenizer.
        text: the text; the longer, the less samples overlap.
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = self.encode(text)
        self.start: list[int] = list(tokenizer("").input_ids)
        """What the tokenizer puts before every text, such as a BOS token; often nothing."""
        if not self.ids:
            raise ConfigError("--text: expected some text, received none")

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def cut(self, rng: random.Random, count: int) -> list[int]:
        """``count`` consecutive tokens from a random place.

        Raises:
            ConfigError: the text is shorter.
        """
        if count > len(self.ids):
            raise ConfigError(
                f"the text has {len(self.ids)} tokens and this task needs {count} that do not repeat: use a longer "
                "--text FILE, a shorter --context, or --task needle"
            )
        first = rng.randrange(len(self.ids) - count + 1)
        return self.ids[first : first + count]

    def fill(self, rng: random.Random, count: int) -> list[int]:
        """As :meth:`cut`; a text that is shorter goes on from its beginning, as often as needed."""
        if count <= len(self.ids):
            return self.cut(rng, count)
        first = rng.randrange(len(self.ids))
        return [self.ids[(first + i) % len(self.ids)] for i in range(count)]

    def break_after(self, ids: Sequence[int], place: int) -> int:
        """The first place >= ``place`` where a sentence or line of ``ids`` ends; ``place`` if none does soon."""
        for index in range(max(1, place), min(len(ids), place + 64)):
            if self._ends[ids[index - 1]]:
                return index
        return place

    @cached_property
    def _ends(self) -> dict[int, bool]:
        """Whether a token of the text ends a sentence or a line."""
        pieces = {token: self.tokenizer.decode([token]) for token in set(self.ids)}
        return {token: piece.endswith((".", "!", "?", "\n")) for token, piece in pieces.items()}


def digest(text: str) -> str:
    """A short name of a text's content."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def spread(index: int, shift: float) -> float:
    """The ``index``-th of evenly spread numbers in [0, 1), however many are drawn (golden-ratio sequence)."""
    return (shift + index * 0.6180339887498949) % 1.0
