"""Charts as inline SVG: lines with markers, and heat maps of layers and heads. Colours come from the page's CSS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kvsieve.evaluate.axes import Scale

WIDTH, HEIGHT = 430, 300
REFERENCE_SHAPES = {"ref-random": 2, "ref-recent": 1}
LEFT, RIGHT, TOP, BOTTOM = 50, 408, 26, 258


@dataclass(frozen=True)
class Mark:
    """A point of a line, and what it says on hover."""

    x: float
    y: float
    title: str


@dataclass(frozen=True)
class Line:
    """A line of a chart. ``style`` is a CSS class such as ``s3`` or ``ref-dense``; ``level`` draws it across."""

    name: str
    style: str
    marks: Sequence[Mark]
    level: bool = False


def chart(title: str, x_name: str, y_name: str, x: Scale, y: Scale, lines: Sequence[Line]) -> str:
    """A chart with grid, axes, lines and markers. Names are for readers of the page and for screen readers."""
    body = "".join(_line(line, x, y) for line in lines)
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<text x="{LEFT}" y="14" class="title">{escape(title)}</text>{_grid(x, y)}'
        f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 8}" class="axis">{escape(x_name)}</text>'
        f'<text transform="translate(13 {(TOP + BOTTOM) / 2}) rotate(-90)" class="axis">{escape(y_name)}</text>'
        f"{body}</svg></figure>"
    )


def swatch(style: str) -> str:
    """The sign of a line, for a legend."""
    return (
        f'<svg class="swatch {style}" viewBox="0 0 28 14" aria-hidden="true"><path class="line" d="M1 7H27"/>'
        f"{_marker(style, 14, 7)}</svg>"
    )


def heat_map(title: str, values: Sequence[Sequence[float]], layers: Sequence[int]) -> str:
    """Shares in [0, 1] by layer (across) and KV head (down), darker for more; each cell says its number on hover."""
    heads = len(values[0])
    size, left, top = 13, 26, 18
    high = max(10, min(20, 60 // heads))
    cells = []
    for i, (layer, row) in enumerate(zip(layers, values, strict=True)):
        for head, value in enumerate(row):
            words = f"layer {layer}, head {head}: {value:.0%}"
            place = f'd="M{i} {head}h{1 - 1 / size:.2f}"'
            cells.append(f'<path {place} stroke-opacity="{value:.2f}"><title>{words}</title></path>')
    marks = "".join(
        f'<text class="tick" text-anchor="middle" x="{left + (i + 0.5) * size}" y="{top + heads * high + 11}">{layer}'
        "</text>"
        for i, layer in enumerate(layers)
        if i % 5 == 0
    )
    marks += "".join(
        f'<text class="tick" text-anchor="end" x="{left - 4}" y="{top + (head + 0.5) * high + 3}">h{head}</text>'
        for head in range(heads)
    )
    width, height = left + len(layers) * size + 4, top + heads * high + 16
    border = f'x="{left - 1}" y="{top - 1}" width="{len(layers) * size + 1}" height="{heads * high + 1}"'
    return (
        f'<figure class="heat"><svg viewBox="0 0 {max(width, 200)} {height}" role="img" aria-label="{escape(title)}">'
        f'<text x="{left}" y="11" class="title">{escape(title)}</text><rect class="frame" {border}/>'
        f'<g class="cells" transform="translate({left} {top + high / 2}) scale({size} {high})" '
        f'stroke-width="{1 - 1 / high:.2f}">{"".join(cells)}</g>{marks}</svg></figure>'
    )


def _grid(x: Scale, y: Scale) -> str:
    parts = []
    for tick in x.ticks():
        parts.append(f'<path class="grid" d="M{x(tick):.1f} {TOP}V{BOTTOM}"/>')
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{x(tick):.1f}" y="{BOTTOM + 15}">{x.label(tick)}</text>'
        )
    for tick in y.ticks():
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{RIGHT}"/>')
        parts.append(
            f'<text class="tick" text-anchor="end" x="{LEFT - 5}" y="{y(tick) + 4:.1f}">{y.label(tick)}</text>'
        )
    return "".join(parts)


def _line(line: Line, x: Scale, y: Scale) -> str:
    points = [(x(mark.x), y(mark.y)) for mark in line.marks]
    if line.level:
        path = f"M{LEFT} {points[0][1]:.1f}H{RIGHT}"
    else:
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
    marks = "".join(
        f"<g>{_marker(line.style, a, b)}<title>{escape(f'{line.name}: {mark.title}')}</title></g>"
        for (a, b), mark in zip(points, line.marks, strict=True)
    )
    return f'<g class="{line.style}"><path class="line" d="{path}"/>{marks}</g>'


def _marker(style: str, x: float, y: float) -> str:
    """A shape by the style's last digit, so that colour is not all that tells lines apart."""
    kind = int(style[-1]) % 4 if style[-1].isdecimal() else REFERENCE_SHAPES.get(style, 3)
    x, y = round(x, 1), round(y, 1)
    shapes = (
        f'<circle class="mark" cx="{x}" cy="{y}" r="4"/>',
        f'<rect class="mark" x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"/>',
        f'<path class="mark" d="M{x} {y - 5:.1f}l4.8 8.4h-9.6z"/>',
        f'<path class="mark" d="M{x} {y - 5:.1f}l5 5l-5 5l-5 -5z"/>',
    )
    return shapes[kind]
