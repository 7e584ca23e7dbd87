"""Shares that depend on a count: interpolation, and that more work never takes less time."""

from __future__ import annotations

from math import log

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pdserve.model.cost.curve import Curve


def test_a_curve_is_straight_in_the_logarithm_and_flat_outside() -> None:
    curve = Curve(((16, 0.2), (256, 0.4), (4096, 0.8)))
    assert [curve.at(count) for count in (1, 16, 64, 256, 1024, 4096, 10**6)] == pytest.approx(
        [0.2, 0.2, 0.3, 0.4, 0.6, 0.8, 0.8]
    )


def test_a_constant_is_the_same_everywhere() -> None:
    assert {Curve.constant(0.7).at(count) for count in (0.5, 1, 7, 10**9)} == {0.7}


@given(
    points=st.lists(st.tuples(st.integers(1, 10**5), st.floats(0.01, 1)), min_size=1, max_size=6),
    counts=st.lists(st.floats(1, 10**6), min_size=2, max_size=2),
)
def test_more_work_never_takes_less_time(points: list[tuple[int, float]], counts: list[float]) -> None:
    try:
        curve = Curve(tuple(sorted(points)))
    except ValueError:
        assume(False)
    fewer, more = sorted(counts)
    assert fewer / curve.at(fewer) <= more / curve.at(more) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ((), "a curve needs a point; write"),
        (((1, 0.0),), "a share above 0 and up to 1"),
        (((1, 1.5),), "a share above 0 and up to 1"),
        (((0, 0.5),), "a count is at least 1"),
        (((8, 0.5), (8, 0.6)), "counts must rise, and 8 follows 8"),
        (((64, 0.1), (128, 0.1 + 0.101 * log(2))), "would do more work in less time; raise the first or lower"),
    ],
)
def test_points_that_make_no_curve_are_refused(points: tuple[tuple[int, float], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curve(points)
