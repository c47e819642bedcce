"""A self-contained HTML page: one style sheet for light and dark, phone and wide screens; nothing is loaded."""

from __future__ import annotations

from html import escape
from pathlib import Path


def asset(name: str) -> str:
    """A style sheet or script that lies beside this file."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """A whole page; ``style`` and ``script`` are added inline."""
    tail = f"<script>{script}</script>" if script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{asset('page.css')}{style}</style></head>\n<body>\n{body}\n{tail}</body></html>\n"
    )


def table(titles: list[str], rows: list[list[str]]) -> str:
    """A table that scrolls sideways by itself where the screen is narrow; cells are plain text."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
