"""A budget as it is written in a command: the same text means the same in all of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from kvsieve.budget import Budget, BudgetTooSmall
from kvsieve.errors import ConfigError

FORMS = (
    "tokens such as 256 (sink and recent ones included), a share of the context such as 12.5% or 0.125, or pages "
    "chosen+sink+recent such as 64+1+2"
)


@dataclass(frozen=True)
class BudgetText:
    """A budget as written: exactly one of ``tokens``, ``share`` of a context, and ``pages``.

    Attributes:
        text: what was written.
        option: the option that it was written for.
    """

    text: str
    option: str
    tokens: int | None = None
    share: Fraction | None = None
    pages: Budget | None = None

    @property
    def chooses_none(self) -> bool:
        """Whether it was written that no page is chosen."""
        return self.pages is not None and not self.pages.topk

    def of(self, context: int, beyond: int = 0) -> int:
        """Tokens at a context of so many, rounded up; 100% takes in what comes ``beyond`` it.

        Raises:
            ConfigError: the budget counts pages.
        """
        if self.share is not None:
            if self.share == 1:
                return context + beyond
            return -(-self.share.numerator * context // self.share.denominator)
        if self.tokens is None:
            raise ConfigError(
                f"{self.option}: expected tokens such as 256, or a share of the context such as 12.5%, since pages of "
                f"several sizes are compared; received pages ({self.text})"
            )
        return self.tokens

    def budget(self, page_size: int, context: int | None = None, beyond: int = 0, *, selects: bool = True) -> Budget:
        """In pages of ``page_size`` tokens; ``beyond`` as in :meth:`of`, ``selects`` as in :meth:`Budget.tokens`.

        Raises:
            ConfigError: it does not hold its sink and recent pages; or it is a share, and there is no one context.
        """
        if self.pages is not None:
            b = self.pages
            return b if selects else Budget(0, b.sink, b.recent + b.topk)
        if context is None and self.share is not None:
            raise ConfigError(
                f"{self.option}: expected tokens such as 1024, or pages chosen+sink+recent such as 64+1+2, for one "
                f"budget serves every context here; received a share ({self.text})"
            )
        tokens = self.of(context or 0, beyond)
        try:
            return Budget.tokens(tokens, page_size, selects=selects)
        except BudgetTooSmall as error:
            raise ConfigError(
                f"{self.option} {self.text}: {error.problem}; raise the budget to {error.least} tokens, or lower "
                "--page-size"
            ) from None


def parse_budget(text: str, option: str = "--budget") -> BudgetText:
    """``256`` is tokens, ``12.5%`` and ``0.125`` are shares of a context, ``64+1+2`` is pages chosen, sink and recent.

    Raises:
        ConfigError: another form; or ``1`` and ``1.0``, which could be one token or all of a context.
    """
    words = text.strip()
    if re.fullmatch(r"1|0*1\.0*", words):
        raise ConfigError(f"{option}: expected 100% for all of the context, or more tokens than one, received {text!r}")
    if re.fullmatch(r"\d+\+\d+\+\d+", words):
        topk, sink, recent = map(int, words.split("+"))
        if not recent:
            raise ConfigError(f"{option}: expected at least 1 recent page, received {text!r}")
        return BudgetText(words, option, pages=Budget(topk, sink, recent))
    if re.fullmatch(r"\d+", words) and int(words):
        return BudgetText(words, option, tokens=int(words))
    if re.fullmatch(r"(\d+\.?\d*|\.\d+)%|\d*\.\d+", words):
        share = Fraction(words.rstrip("%")) / (100 if words.endswith("%") else 1)
        if 0 < share <= 1:
            return BudgetText(words, option, share=share)
    raise ConfigError(f"{option}: expected {FORMS}; received {text!r}")
