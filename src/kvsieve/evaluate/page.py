"""A self-contained HTML page: one style sheet for light and dark, phone and wide screens; nothing is loaded."""

from __future__ import annotations

from html import escape
from pathlib import Path

from kvsieve.errors import ConfigError

STYLE = """
:root{--ink:#1c2330;--soft:#5b6575;--paper:#fff;--panel:#f5f7fa;--rule:#d9dfe7;--heat:#0b5fa5;--lost:#c2410c;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#b5489a;--c4:#a67c00;--c5:#2f9fd0;--c6:#7b52c9;--c7:#8c564b;--c8:#5c8a00;
--c9:#d1495b}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#9aa6b6;--paper:#12161d;--panel:#1b212b;--rule:#323b48;
--heat:#6cb6ff;--lost:#ff9457;--c0:#4aa8e8;--c1:#ff8a4a;--c2:#35c99c;--c3:#e58ad0;--c4:#e0b83f;--c5:#7fd0f5;--c6:#b196f5;
--c7:#c99a8d;--c8:#a5cf4a;--c9:#ff8593}}
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:1rem;max-width:90rem;color:var(--ink);background:var(--paper);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.5rem;margin:.2rem 0 .6rem}h2{font-size:1.2rem;margin:2.2rem 0 .3rem}
h3{font-size:1rem;margin:1.2rem 0 .3rem}
p{margin:.4rem 0;max-width:70ch}.soft,figcaption{color:var(--soft);font-size:.9rem}
code,pre{font:.85em ui-monospace,Consolas,monospace}pre{background:var(--panel);padding:.6rem;overflow-x:auto}
.charts,.heats{display:grid;gap:.8rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,21rem),1fr))}
.heats{grid-template-columns:repeat(auto-fill,minmax(min(100%,24rem),1fr))}
figure{margin:0;background:var(--panel);border-radius:.5rem;padding:.5rem}
figure svg{display:block;width:100%;height:auto;max-width:44rem}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}svg .title{font-weight:600}
svg .tick{fill:var(--soft);font-size:11px}svg .axis{fill:var(--soft);text-anchor:middle}
svg .grid{stroke:var(--rule);fill:none}.line{fill:none;stroke:currentColor;stroke-width:2}
.mark{fill:currentColor;stroke:var(--panel)}.cells rect{fill:var(--heat)}.frame{fill:none;stroke:var(--rule)}
.s0{color:var(--c0)}.s1{color:var(--c1)}.s2{color:var(--c2)}.s3{color:var(--c3)}.s4{color:var(--c4)}.s5{color:var(--c5)}
.s6{color:var(--c6)}.s7{color:var(--c7)}.s8{color:var(--c8)}.s9{color:var(--c9)}
.ref-dense,.ref-oracle{color:var(--ink)}.ref-random,.ref-recent{color:var(--soft)}
.ref-dense .line,.ref-dense.swatch .line{stroke-dasharray:7 4}
.ref-random .line,.ref-random.swatch .line{stroke-dasharray:2 3}
.ref-recent .line,.ref-recent.swatch .line{stroke-dasharray:6 3 2 3}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;margin:.5rem 0;list-style:none;font-size:.9rem}
.swatch{width:28px;height:14px;vertical-align:-2px;margin-right:.35rem}
.scroll{overflow-x:auto;margin:.8rem 0}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--rule)}
th{color:var(--soft);font-weight:600}th:first-child,td:first-child{text-align:left;
position:sticky;left:0;background:var(--paper)}
details{margin:.6rem 0}summary{cursor:pointer;font-weight:600;padding:.3rem 0}
@media (max-width:32rem){body{padding:.7rem}h1{font-size:1.25rem}figure{padding:.3rem}
th:first-child,td:first-child{max-width:9.5rem;white-space:normal;overflow-wrap:anywhere}}
@media print{body{max-width:none}details{break-inside:avoid}}
"""


def page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """A whole page; ``style`` and ``script`` are added inline."""
    tail = f"<script>{script}</script>" if script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head>\n<body>\n{body}\n{tail}</body></html>\n"
    )


def table(titles: list[str], rows: list[list[str]]) -> str:
    """A table that scrolls sideways by itself where the screen is narrow; cells are plain text."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def write_file(path: Path, text: str, option: str) -> None:
    """Write a text file whole, making its folder.

    Raises:
        ConfigError: it cannot be written; names the option.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror or error}; expected a file to write to") from None
