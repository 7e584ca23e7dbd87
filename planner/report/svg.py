"""Small charts as inline SVG: lines, points and bars, in colours from a style sheet.

Used by `pdserve.planner.report.report`. Every mark has a class (``s0``, ``s1``, ...) instead of a colour, so that a
page can be light or dark; browsers show the titles of points as tooltips. Knows nothing of plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from math import ceil, floor, isfinite, log10
from typing import NamedTuple

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 12, 44
_NUM_TICKS = 5
Format = Callable[[float], str]


class Point(NamedTuple):
    x: float
    y: float
    title: str = ""
    """Tooltip."""
    is_hollow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points of one colour, optionally joined by a line."""

    label: str
    points: Sequence[Point]
    color: int
    """Number of the CSS class."""
    is_dashed: bool = False
    has_line: bool = True
    has_dots: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    label: str
    format: Format
    low: float = 0.0
    high: float | None = None
    """``None`` uses the largest value in the chart."""


class Rule(NamedTuple):
    """A line across the chart, such as an objective."""

    label: str
    x: float | None = None
    y: float | None = None


class Bar(NamedTuple):
    label: str
    value: float
    text: str
    color: int


def chart(x: Axis, y: Axis, series: Sequence[Series], rules: Sequence[Rule] = ()) -> str:
    """Lines and points over two axes; skips values that are not finite."""
    frame = _Frame.around(x, y, series, rules)
    parts = [_grid(frame, x, y)]
    parts += [_rule(frame, rule) for rule in rules]
    parts += [_series(frame, each) for each in series]
    return _svg(HEIGHT, f"{y.label} against {x.label}", parts)


def bars(rows: Sequence[Bar], high: float = 1.0) -> str:
    """Horizontal bars from 0 to ``high``, one below the other, with their texts."""
    row_height, left, right = 30, 190, 64
    parts = []
    for row, bar in enumerate(rows):
        top = _TOP + row * row_height
        length = (WIDTH - left - right) * min(max(bar.value, 0.0) / high, 1.0)
        middle = top + row_height / 2 + 4
        parts.append(f'<text x="{left - 10}" y="{middle:.0f}" class="end">{escape(bar.label)}</text>')
        parts.append(
            f'<rect x="{left}" y="{top + 5}" width="{WIDTH - left - right}" height="18" rx="3" class="track"/>'
        )
        parts.append(f'<rect x="{left}" y="{top + 5}" width="{length:.1f}" height="18" rx="3" class="s{bar.color}"/>')
        parts.append(f'<text x="{WIDTH - right + 8}" y="{middle:.0f}">{escape(bar.text)}</text>')
    return _svg(2 * _TOP + len(rows) * row_height, "Shares as bars", parts)


class _Frame(NamedTuple):
    """Maps values to positions."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    @classmethod
    def around(cls, x: Axis, y: Axis, series: Sequence[Series], rules: Sequence[Rule]) -> _Frame:
        points = [point for each in series for point in each.points if isfinite(point.x) and isfinite(point.y)]
        x_values = [point.x for point in points] + [rule.x for rule in rules if rule.x is not None]
        y_values = [point.y for point in points] + [rule.y for rule in rules if rule.y is not None]
        return cls(x.low, _high(x, x_values), y.low, _high(y, y_values))

    def x(self, value: float) -> float:
        part = (value - self.x_low) / (self.x_high - self.x_low)
        return _LEFT + part * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        part = (value - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - _BOTTOM - part * (HEIGHT - _TOP - _BOTTOM)

    def holds(self, point: Point) -> bool:
        return self.x_low <= point.x <= self.x_high and self.y_low <= point.y <= self.y_high


def _high(axis: Axis, values: Sequence[float]) -> float:
    high = axis.high if axis.high is not None else max(values, default=axis.low + 1) * 1.04
    return high if high > axis.low else axis.low + 1


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers from ``low`` to ``high``: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / _NUM_TICKS
    power = 10.0 ** floor(log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough * (1 - 1e-9))
    first = ceil(low / step - 1e-9)
    values: list[float] = []
    for index in count(first):
        if index * step > high + step * 1e-9:
            return values
        values.append(index * step)
    raise AssertionError


def _grid(frame: _Frame, x: Axis, y: Axis) -> str:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = []
    for value in ticks(frame.y_low, frame.y_high):
        at = frame.y(value)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" class="end">{escape(y.format(value))}</text>')
    for value in ticks(frame.x_low, frame.x_high):
        at = frame.x(value)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}" class="axis"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 17}" class="mid">{escape(x.format(value))}</text>')
    parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}" class="axis"/>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" class="mid label">{escape(x.label)}</text>')
    return "".join(parts)


def _rule(frame: _Frame, rule: Rule) -> str:
    if rule.x is not None:
        at = frame.x(rule.x)
        is_right = at > WIDTH * 0.7
        anchor, shift = ("end", -5) if is_right else ("", 5)
        place = f'x="{at + shift:.1f}" y="{HEIGHT - _BOTTOM - 8}"'
        text = f'<text {place} class="{anchor} label">{escape(rule.label)}</text>'
        return f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" class="rule"/>{text}'
    assert rule.y is not None
    at = frame.y(rule.y)
    text = f'<text x="{_LEFT + 6}" y="{at - 5:.1f}" class="label">{escape(rule.label)}</text>'
    return f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="rule"/>{text}'


def _series(frame: _Frame, series: Series) -> str:
    points = [point for point in series.points if isfinite(point.x) and isfinite(point.y) and frame.holds(point)]
    parts = []
    if series.has_line and len(points) > 1:
        path = "M" + "L".join(f"{frame.x(point.x):.1f} {frame.y(point.y):.1f}" for point in points)
        dashed = " dashed" if series.is_dashed else ""
        parts.append(f'<path d="{path}" class="s{series.color} line{dashed}"/>')
    for point in points if series.has_dots else ():
        hollow = " hollow" if point.is_hollow else ""
        title = f"<title>{escape(point.title)}</title>" if point.title else ""
        at = f'cx="{frame.x(point.x):.1f}" cy="{frame.y(point.y):.1f}"'
        parts.append(f'<circle {at} r="3.5" class="s{series.color} dot{hollow}">{title}</circle>')
    return "".join(parts)


def _svg(height: int, name: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(name)}">{"".join(parts)}</svg>'
