from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.planner.workload.arrivals import POISSON, Arrivals, RandomGaps, Recorded, first_row

PROCESSES = [POISSON, RandomGaps(0), RandomGaps(3)]


@settings(max_examples=40)
@given(
    process=st.sampled_from(PROCESSES),
    num_arrivals=st.integers(1, 200),
    seed=st.integers(0, 2**32),
)
def test_arrivals_are_as_many_as_asked_and_in_order(process: Arrivals, num_arrivals: int, seed: int) -> None:
    unit_times = process.unit_times(num_arrivals, seed)
    np.testing.assert_array_equal(unit_times, process.unit_times(num_arrivals, seed))
    assert len(unit_times) == num_arrivals
    assert unit_times[0] >= 0
    assert (np.diff(unit_times) >= 0).all()


@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_asked_for(variation: float) -> None:
    gaps = np.diff(RandomGaps(variation).unit_times(200_000, seed=1))
    assert gaps.mean() == pytest.approx(1, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.03, abs=1e-12)


def test_seeds_differ() -> None:
    assert POISSON.unit_times(1, 0) != POISSON.unit_times(1, 1)


def test_a_recording_at_its_own_rate_is_as_recorded() -> None:
    recorded = Recorded(np.array([10.0, 11.0, 13.0, 20.0]))
    assert recorded.requests_per_s == pytest.approx(0.3)
    arrived_s = recorded.unit_times(4, seed=0) / recorded.requests_per_s
    np.testing.assert_allclose(arrived_s, [0, 1, 3, 10])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_stretch_has_the_rate_that_is_asked_in_quiet_and_in_busy_hours(seed: int) -> None:
    recorded = Recorded(np.concatenate([np.arange(100.0), 100 + 0.1 * np.arange(100.0)]))
    arrived_s = recorded.unit_times(20, seed) / 5.0
    assert 19 / (arrived_s[-1] - arrived_s[0]) == pytest.approx(5.0)
    own_per_s = recorded.stretch_per_s(20, seed)
    first = first_row(200, 20, seed)
    as_recorded = recorded.recorded_s[first : first + 20] - recorded.recorded_s[first]
    np.testing.assert_allclose(recorded.unit_times(20, seed) / own_per_s, as_recorded)
    at_once = Recorded(np.array([1.0, 1.0, 3.0]))
    assert at_once.stretch_per_s(2, 0) == at_once.requests_per_s


def test_other_seeds_replay_other_stretches() -> None:
    recorded = Recorded(np.cumsum(np.arange(100.0)))
    starts = {recorded.stretch_per_s(5, seed) for seed in range(10)}
    assert len(starts) > 5
    assert first_row(100, 5, seed=0) == 0
    assert {first_row(5, 5, seed) for seed in range(10)} == {0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomGaps(-1), "coefficient of variation of -1"),
        (lambda: RandomGaps(float("nan")), "coefficient of variation of nan"),
        (lambda: Recorded(np.array([1.0])), "no times to replay"),
        (lambda: Recorded(np.array([1.0, 1.0])), "no times to replay"),
        (lambda: first_row(3, 4, 0), "4 arrivals are asked of a trace of 3"),
    ],
)
def test_what_is_not_possible_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
