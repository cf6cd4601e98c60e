"""Parts of a picture in SVG, as text. Pure. Colours are classes, which page.css gives for light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 420.0  # of every picture; the page scales it: 12.5 units of text are 10 pixels on a phone then
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The rectangle of a plot, and what values its edges stand for. `log_y`: the vertical axis is logarithmic."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    height: float = 250.0
    left: float = 52.0
    right: float = 12.0
    top: float = 10.0
    bottom: float = 42.0
    log_y: bool = False

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (WIDTH - self.left - self.right)

    def y(self, value: float) -> float:
        low, high = self.y_range
        if self.log_y:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.height - self.bottom - (value - low) / (high - low) * (self.height - self.top - self.bottom)

    @property
    def baseline(self) -> float:
        return self.height - self.bottom


def picture(parts: Iterable[str], *, height: float, label: str) -> str:
    """The whole of it. `label` says what is seen, for who does not see it."""
    return f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def axes(
    frame: Frame,
    *,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_name: str,
    y_name: str,
    x_format: Callable[[float], str] = lambda value: f"{value:g}",
    y_format: Callable[[float], str] = lambda value: f"{value:g}",
    grid: bool = True,
) -> list[str]:
    """Ticks, their words, names of both axes."""
    parts: list[str] = []
    right = WIDTH - frame.right
    for value in y_ticks:
        if grid:
            parts.append(line((frame.left, frame.y(value)), (right, frame.y(value)), "grid"))
        parts.append(text(frame.left - 6, frame.y(value) + 4, y_format(value), anchor="end"))
    parts += [text(frame.x(value), frame.baseline + 16, x_format(value), anchor="middle") for value in x_ticks]
    parts.append(line((frame.left, frame.baseline), (right, frame.baseline), "axis"))
    parts.append(text((frame.left + right) / 2, frame.height - 6, x_name, "name", anchor="middle"))
    middle = (frame.top + frame.baseline) / 2
    turned = f"translate(11 {middle:.1f}) rotate(-90)"
    parts.append(f'<text class="name" text-anchor="middle" transform="{turned}">{escape(y_name)}</text>')
    return parts


def text(x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> str:
    """Words, `anchor`ed at start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def line(start: Point, end: Point, kind: str) -> str:
    """A straight line."""
    return f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" class="{kind}"/>'


def path(points: Sequence[Point], kind: str) -> str:
    """Straight lines from point to point; nothing of fewer than two."""
    if len(points) < 2:
        return ""
    return f'<path d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in points)}" class="{kind}"/>'


def box(x: float, y: float, width: float, height: float, kind: str, *, title: str = "") -> str:
    """A filled rectangle; `title` is shown where a pointer rests on it."""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(0.0, width):.2f}" height="{max(0.0, height):.2f}" class="{kind}">'
        f"{_title(title)}</rect>"
    )


def dot(x: float, y: float, radius: float, kind: str, *, title: str = "") -> str:
    """A filled circle."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{kind}">{_title(title)}</circle>'


def legend(entries: Sequence[tuple[str, str]], *, kind: str = "key") -> str:
    """HTML below a picture: a swatch of each class, and its words."""
    items = "".join(f'<li><i class="{kind} {name}"></i>{escape(words)}</li>' for name, words in entries)
    return f'<ul class="legend">{items}</ul>'


def ticks(high: float, *, most: int = 6) -> list[float]:
    """Round numbers from 0 to at least `high`, at most `most` steps apart."""
    if high <= 0.0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(high / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor * most >= high)
    return [step * index for index in range(math.ceil(high / step - 1e-9) + 1)]


def _title(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""
