"""Two kinds of plots as SVG text: lines and bars. No script, no other file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Series", "bars", "lines"]

#: Told apart by people who see fewer colours, too (Okabe and Ito, 2008).
_COLOURS = ("#555555", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
_WIDTH, _HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 28, 34, 74


@dataclass(frozen=True, slots=True)
class Series:
    """A line: its name, and points with coordinates above 0."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Axis:
    """A logarithmic axis from `low` to `high`, on pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self, base: int) -> list[float]:
        first, last = math.ceil(math.log(self.low, base) - 1e-9), math.floor(math.log(self.high, base) + 1e-9)
        step = max(1, -(-(last - first + 1) // 9))
        return [float(base) ** power for power in range(first, last + 1, step)]


@dataclass(frozen=True, slots=True)
class _Linear:
    """An axis from 0 to `high`, on pixels `start` to `end`."""

    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        return self.start + value / self.high * (self.end - self.start)

    def ticks(self, _base: int) -> list[float]:
        return [self.high * part / 4 for part in range(5)]


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 6, 8 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next((first * power for first in (1, 2, 4, 6, 8) if first * power >= value * (1 - 1e-9)), 10 * power)


def _span(values: Sequence[float], base: int) -> tuple[float, float]:
    """The powers of `base` around all values; never empty."""
    low, high = min(values), max(values)
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    return float(base) ** first, float(base) ** max(last, first + 1)


def lines(
    title: str,
    x_name: str,
    y_name: str,
    series: Sequence[Series],
    *,
    x_shown: Callable[[float], str],
    y_shown: Callable[[float], str],
    from_zero: bool = False,
    target: float | None = None,
) -> str:
    """A plot of lines; x in powers of two; y in powers of ten, or from zero. `target`: a line across."""
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    x = _Axis(*_span([one[0] for one in points], 2), _LEFT, _WIDTH - _RIGHT)
    heights = [one[1] for one in points] + ([target] if target else [])
    floor, top = _HEIGHT - _BOTTOM, _TOP
    y = _Linear(_round_up(max(heights)), floor, top) if from_zero else _Axis(*_span(heights, 10), floor, top)
    parts = [_head(title, _HEIGHT)]
    for tick in x.ticks(2):
        at = x.at(tick)
        parts.append(f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{_HEIGHT - _BOTTOM}" class="grid"/>')
        parts.append(_text(at, _HEIGHT - _BOTTOM + 16, x_shown(tick), "middle"))
    for tick in y.ticks(10):
        at = y.at(tick)
        parts.append(f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_WIDTH - _RIGHT}" y2="{at:.1f}" class="grid"/>')
        parts.append(_text(_LEFT - 6, at + 4, y_shown(tick), "end"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - _BOTTOM + 34, x_name, "middle"))
    parts.append(_text(_LEFT, _TOP - 6, y_name, "start"))
    if target:
        at = y.at(target)
        parts.append(f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_WIDTH - _RIGHT}" y2="{at:.1f}" class="target"/>')
        parts.append(_text(_WIDTH - _RIGHT - 4, at - 4, "target", "end"))
    left: float = _LEFT
    for number, one in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in one.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="3" fill="{colour}"/>' for a, b in one.points]
        parts.append(f'<rect x="{left:.0f}" y="{_HEIGHT - 22}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(left + 17, _HEIGHT - 12, one.name, "start"))
        left += 34 + 7.2 * len(one.name)
    return "".join(parts) + "</svg>"


def bars(
    title: str,
    rows: Sequence[tuple[str, float, str]],
    *,
    mark: float | None = None,
    bad: Callable[[float], bool] = lambda _: False,
) -> str:
    """Bars to the right, each with its name and a text behind it. `mark`: a line at this value; `bad`: in red."""
    if not rows:
        return ""
    height = _TOP + 26 * len(rows) + 8
    most = max([value for _, value, _ in rows] + ([mark] if mark else [])) or 1.0
    left, right = 190.0, _WIDTH - 130.0
    parts = [_head(title, height)]
    for number, (name, value, text) in enumerate(rows):
        top = _TOP + 26 * number
        width = max(1.0, (right - left) * value / most)
        colour = "#d55e00" if bad(value) else "#0072b2"
        parts.append(_text(left - 8, top + 13, name, "end"))
        parts.append(f'<rect x="{left:.0f}" y="{top}" width="{width:.1f}" height="18" fill="{colour}"/>')
        parts.append(_text(left + width + 6, top + 13, text, "start"))
    if mark:
        at = left + (right - left) * mark / most
        parts.append(f'<line x1="{at:.1f}" y1="{_TOP - 4}" x2="{at:.1f}" y2="{height - 6}" class="target"/>')
    return "".join(parts) + "</svg>"


def _head(title: str, height: float) -> str:
    style = (
        "text{font:12px sans-serif;fill:#222}.title{font-weight:bold}.grid{stroke:#ddd}"
        ".target{stroke:#b00;stroke-dasharray:5 4}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
        f'height="{height:.0f}" role="img"><style>{style}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="8" y="16" class="title">{escape(title)}</text>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
