"""Line charts as SVG text: a few milliseconds where matplotlib takes a hundred, so that a slider can redraw them.

Nothing here is global, so any thread may draw.
"""

import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 300, 200  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 46, 34  # around its axes
COLUMNS = 2
DASHES = {"-": "", "--": "7 3", "-.": "8 3 2 3", ":": "2 3"}


@dataclass(frozen=True)
class Line:
    """A curve, or with `step` the value that holds from each x to the next; `faint` is in the background."""

    x: Sequence[float]
    y: Sequence[float]
    colour: str
    label: str = ""
    style: str = "-"
    step: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Panel:
    """Curves under one title; both axes begin at 0, and the vertical one reaches at least to `top`."""

    title: str
    xlabel: str
    lines: Sequence[Line]
    top: float = 0.0


def ticks(high: float, most: int = 5) -> list[float]:
    """0, step, 2·step, … up to `high` or just past it, with a step of 1, 2 or 5 times a power of ten."""
    if not high > 0:
        high = 1.0
    power = 10.0 ** math.floor(math.log10(high / most))
    step = next(k * power for k in (1, 2, 5, 10, 20) if k * power * most >= high * (1 - 1e-9))
    return [i * step for i in range(math.ceil(high / step - 1e-9) + 1)]


def chart(panels: Sequence[Panel]) -> str:
    """The panels, two in a row."""
    places = [(i % COLUMNS * WIDTH, i // COLUMNS * HEIGHT) for i in range(len(panels))]
    parts = [f'<g transform="translate({x} {y})">{_panel(p)}</g>' for (x, y), p in zip(places, panels, strict=True)]
    wide, high = min(len(panels), COLUMNS) * WIDTH, math.ceil(len(panels) / COLUMNS) * HEIGHT
    size = f'width="{wide}" height="{high}" viewBox="0 0 {wide} {high}"'
    style = 'font-family="sans-serif" font-size="11" fill="#222222"'
    white = '<rect width="100%" height="100%" fill="#ffffff"/>'  # a dark page would swallow the letters
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{white}{"".join(parts)}</svg>'


def image(picture: str | bytes, alt: str, kind: str = "svg+xml") -> str:
    """An <img> with its picture and its alt text inside."""
    data = b64encode(picture.encode() if isinstance(picture, str) else picture).decode()
    look = f"width: 100%; max-width: {COLUMNS * WIDTH}px"
    return f'<img alt="{escape(alt)}" src="data:image/{kind};base64,{data}" style="{look}">'


def swatch(colour: str, style: str) -> str:
    """A piece of a line, for a legend in a table."""
    look = f'stroke="{colour}" stroke-width="3" stroke-dasharray="{DASHES[style]}"'
    return f'<svg width="40" height="10" aria-hidden="true"><line x1="0" y1="5" x2="40" y2="5" {look}/></svg>'


def _panel(panel: Panel) -> str:
    seen = [[(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)] for line in panel.lines]
    xs = ticks(max((x for points in seen for x, _ in points), default=1))
    ys = ticks(max([panel.top, *(y for points in seen for _, y in points)]))
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x, y):
        return LEFT + wide * x / xs[-1], TOP + high * (1 - y / ys[-1])

    out = [f'<text x="{LEFT}" y="18" font-size="13">{escape(panel.title)}</text>']
    out.append(f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 5}" text-anchor="middle">{escape(panel.xlabel)}</text>')
    for x in xs:
        px, py = place(x, 0)
        out.append(f'<text x="{px:.1f}" y="{py + 15:.1f}" text-anchor="middle">{x:g}</text>')
    for y in ys:
        px, py = place(0, y)
        out.append(f'<path d="M{px:.1f} {py:.1f}h{wide}" stroke="{"#888888" if y == 0 else "#dddddd"}"/>')
        out.append(f'<text x="{px - 6:.1f}" y="{py + 4:.1f}" text-anchor="end">{y:.4g}</text>')
    for line, points in zip(panel.lines, seen, strict=True):
        out.append(_curve([place(x, y) for x, y in points], line))
    return "".join([*out, _legend([line for line in panel.lines if line.label])])


def _curve(points: list[tuple[float, float]], line: Line) -> str:
    if not points:
        return ""
    steps = [f"H{x:.1f}V{y:.1f}" if line.step else f"L{x:.1f} {y:.1f}" for x, y in points[1:]]
    look = f'fill="none" stroke="{line.colour}" stroke-width="2" stroke-dasharray="{DASHES[line.style]}"'
    look += ' opacity="0.3"' if line.faint else ""
    x, y = points[-1]
    end = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{line.colour}"/>'
    return f'<path d="M{points[0][0]:.1f} {points[0][1]:.1f}{"".join(steps)}" {look}/>{end}'


def _legend(lines: Sequence[Line]) -> str:
    """In a row between the title and the axes, where no curve can run into it."""
    out, x = [], LEFT
    for line in lines:
        look = f'stroke="{line.colour}" stroke-width="2" stroke-dasharray="{DASHES[line.style]}"'
        out.append(f'<path d="M{x} 32h24" {look}/><text x="{x + 29}" y="36">{escape(line.label)}</text>')
        x += 42 + 6 * len(line.label)
    return "".join(out)
