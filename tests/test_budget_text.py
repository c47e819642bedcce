"""A budget string means the same in every command; what could mean two things is refused."""

from __future__ import annotations

import pytest

from kvsieve.budget import Budget
from kvsieve.budget_text import parse_budget
from kvsieve.errors import ConfigError

CONTEXT, BEYOND = 330, 160


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ("0.125", 42), ("12.5%", 42), (".5", 165), ("33.%", 109), ("0.1%", 1), ("256", 256), ("007", 7), (" 64 ", 64),
        ("100%", CONTEXT + BEYOND), ("100.0%", CONTEXT + BEYOND), ("99%", 327),
    ],
)  # fmt: skip
def test_shares_and_tokens(words: str, tokens: int) -> None:
    assert parse_budget(words).of(CONTEXT, BEYOND) == tokens


@pytest.mark.parametrize(("words", "pages"), [("64+1+2", (64, 1, 2)), ("0+0+1", (0, 0, 1)), ("8+0+3", (8, 0, 3))])
def test_pages(words: str, pages: tuple[int, int, int]) -> None:
    topk, sink, recent = pages
    wish = parse_budget(words)
    assert wish.chooses_none == (topk == 0) and not parse_budget("64").chooses_none
    assert wish.budget(5) == wish.budget(33, 1000) == Budget(topk, sink, recent)
    assert wish.budget(5, selects=False) == Budget(0, sink, recent + topk)
    with pytest.raises(ConfigError, match=r"--budget: expected tokens such as 256.*received pages"):
        wish.of(CONTEXT)


def test_tokens_and_shares_become_pages_as_everywhere() -> None:
    for page_size in (1, 5, 16, 33):
        assert parse_budget("100").budget(page_size) == Budget.tokens(100, page_size)
        assert parse_budget("25%").budget(page_size, 400) == Budget.tokens(100, page_size)
        assert parse_budget("25%").budget(page_size, 400, selects=False) == Budget.tokens(100, page_size, selects=False)
    assert parse_budget("100%").budget(5, CONTEXT, BEYOND) == Budget.tokens(CONTEXT + BEYOND, 5)


@pytest.mark.parametrize(
    "words",
    [
        "0",
        "-1",
        "1.5",
        "120%",
        "x",
        "0%",
        "1/0",
        "",
        "%",
        ".",
        "1e3",
        "1_000",
        "8+1",
        "1+2+3+4",
        "1+1+x",
        "0.0",
        "+1+1+2",
    ],
)
def test_other_forms_are_refused_with_all_forms(words: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--budget: expected tokens such as 256 .*12\.5%.*64\+1\+2; received "
    ) as caught:
        parse_budget(words)
    assert str(caught.value).endswith(repr(words))


@pytest.mark.parametrize("words", ["1", "1.0", "1.", "01.00"])
def test_one_is_neither_a_token_nor_everything(words: str) -> None:
    with pytest.raises(ConfigError, match="expected 100% for all of the context, or more tokens than one"):
        parse_budget(words)


def test_what_cannot_be_a_budget_says_so_in_the_option_s_words() -> None:
    with pytest.raises(ConfigError, match="at least 1 recent page"):
        parse_budget("3+1+0")
    with pytest.raises(ConfigError, match=r"^--share: expected tokens such as 1024, or pages .* received a share"):
        parse_budget("12.5%", "--share").budget(16)
    with pytest.raises(ConfigError, match=r"^--budget 10: .* raise the budget to 48 tokens, or lower --page-size$"):
        parse_budget("10").budget(16)
