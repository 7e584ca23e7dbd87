from __future__ import annotations

from math import inf, nan
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.planner.report.svg import HEIGHT, WIDTH, Axis, Bar, Point, Rule, Series, bars, chart, ticks

X = Axis(label="x <s>", format=str)
Y = Axis(label="y", format=str, high=1.0)


def circles(svg: str) -> list[tuple[float, float]]:
    found = ElementTree.fromstring(svg).findall("circle")
    return [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in found]


def a_series(*points: Point) -> Series:
    return Series(label="a", points=points, color=0)


def test_points_are_where_their_values_are() -> None:
    (left, low), (right, high) = circles(chart(X, Y, [a_series(Point(0, 0), Point(10, 1))]))
    assert 0 < left < right < WIDTH
    assert 0 < high < low < HEIGHT
    (middle, _), *_ = circles(chart(X, Y, [a_series(Point(5, 0.5), Point(10, 1))]))
    assert middle == pytest.approx((left + right) / 2, abs=0.1)


def test_what_is_not_a_number_or_beyond_an_axis_is_left_out() -> None:
    points = (Point(1, nan), Point(inf, 0.5), Point(1, 2.0), Point(1, 0.5))
    assert len(circles(chart(X, Y, [a_series(*points)]))) == 1


def test_a_chart_of_nothing_is_a_chart() -> None:
    assert circles(chart(X, Y, [], [Rule("target", y=0.9), Rule("now", x=3.0)])) == []


def test_texts_are_escaped() -> None:
    svg = chart(X, Y, [a_series(Point(1, 1, "a < b & c"))])
    title = ElementTree.fromstring(svg).find("circle/title")
    assert title is not None
    assert title.text == "a < b & c"


def test_bars_are_as_long_as_their_values() -> None:
    root = ElementTree.fromstring(bars([Bar("half", 0.5, "50 %", 1), Bar("too much", 7.0, "700 %", 1)]))
    widths = [float(each.attrib["width"]) for each in root.findall("rect")]
    assert widths == [widths[0], widths[0] / 2, widths[0], widths[0]]


@given(st.floats(1e-6, 1e6), st.floats(0, 1e3))
def test_ticks_are_a_few_round_numbers_within(span: float, low: float) -> None:
    values = ticks(low, low + span)
    assert 1 <= len(values) <= 7
    assert low - span * 1e-6 <= values[0] <= values[-1] <= low + span * (1 + 1e-6)
