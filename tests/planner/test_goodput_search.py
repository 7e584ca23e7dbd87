from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log

import numpy as np
import pytest

from pdserve.contracts.deployment import SloConfig
from pdserve.planner.goodput import Run, Runner, run_search
from pdserve.planner.goodput_search import GoodputSearch
from pdserve.planner.simulation import Simulation
from tests.planner.stand_ins import attain, colocated, find_goodput
from tests.planner.test_attainment import a_run
from tests.planner.test_goodput import SHORT, a_trial


def test_a_little_less_than_the_goodput_meets_the_target_and_a_little_more_does_not() -> None:
    goodput = find_goodput(a_trial(), SHORT, 20.0, tolerance=0.05)
    assert attain(a_trial(), SHORT, goodput.rate * 0.85).share >= 0.9
    assert attain(a_trial(), SHORT, goodput.rate * 1.15).share < 0.9
    assert [point.rate for point in goodput.points] == sorted(point.rate for point in goodput.points)
    assert goodput.interval.low <= goodput.rate <= goodput.interval.high
    sure = [point.rate for point in goodput.points if point.rate <= goodput.rate and point.interval.low >= 0.9]
    assert goodput.interval.low >= max(sure, default=0.0)
    assert goodput.rate_per_device == goodput.rate / 2


def test_all_seeds_are_spent_near_the_goodput() -> None:
    goodput = find_goodput(a_trial(), SHORT, 20.0, tolerance=0.05)
    assert goodput.at_rate is not None
    assert goodput.at_rate.num_requests == 300
    assert goodput.at_rate.rate == pytest.approx(goodput.rate, rel=0.05)
    far = [point for point in goodput.points if abs(point.rate / goodput.rate - 1) > 0.2]
    assert far
    assert all(point.num_requests <= 150 for point in far)
    assert goodput.num_requests == sum(point.num_requests for point in goodput.points)


def test_between_two_rates_that_have_all_seeds_the_goodput_is_what_both_say() -> None:
    """By the first seed alone, misses would grow less with the rate."""
    trial, runner = replace(a_trial(), seeds=(2, 3)), Runner(SHORT)
    search = GoodputSearch(trial, 24.0, tolerance=0.2)
    for run in (Run(trial, rate, seed, True) for rate in (24.0, 34.0) for seed in trial.seeds):
        search.tell(run, runner.carry_out(run))
    low, high = search.goodput().points
    power = log((1 - high.share) / (1 - low.share)) / log(high.rate / low.rate)
    assert search.goodput().rate == pytest.approx(low.rate * (0.1 / (1 - low.share)) ** (1 / power), rel=1e-3)


def test_the_goodput_lies_between_two_rates_that_were_tried() -> None:
    goodput = find_goodput(replace(a_trial(), seeds=(0,)), SHORT, 20.0, tolerance=0.1)
    assert any(point.rate <= goodput.rate for point in goodput.points if point.meets(0.9))
    assert any(point.rate >= goodput.rate for point in goodput.points if not point.meets(0.9))


def test_where_only_the_first_seed_met_the_target_lower_rates_are_tried() -> None:
    trial = replace(a_trial(), seeds=(1, 2))
    goodput = find_goodput(trial, SHORT, 30.0, tolerance=0.06)
    (started_at,) = (point for point in goodput.points if point.rate == 30.0)
    assert not started_at.meets(0.9)
    assert attain(replace(trial, seeds=(1,)), SHORT, 30.0).meets(0.9)
    assert goodput.rate == pytest.approx(29.0, rel=0.05)
    assert any(point.meets(0.9) for point in goodput.points)


def test_a_rough_search_takes_one_run_and_goes_on_where_it_was_once_it_is_asked_to() -> None:
    search, runner = GoodputSearch(a_trial(), 26.0, 0.05, is_rough=True), Runner(SHORT)
    run_search(search, runner)
    rough = search.goodput()
    assert [(point.rate, point.num_requests) for point in rough.points] == [(26.0, 150)]
    assert rough.rate > 0
    search.settle()
    run_search(search, runner)
    settled = search.goodput()
    assert rough.points[0].rate in [point.rate for point in settled.points]
    assert settled == find_goodput(a_trial(), SHORT, 26.0, tolerance=0.05)
    assert settled.interval.high - settled.interval.low < rough.interval.high - rough.interval.low


@pytest.mark.parametrize(("start_rate", "is_met"), [(24.0, True), (26.0, False)], ids=["below", "above"])
def test_a_search_that_is_not_bracketed_ends_next_to_the_goodput_where_the_target_is_met(
    start_rate: float, *, is_met: bool
) -> None:
    trial = replace(a_trial(), seeds=(0,))
    search = GoodputSearch(trial, start_rate, 0.1, is_bracketed=False)
    run_search(search, Runner(SHORT))
    goodput, bracketed = search.goodput(), find_goodput(trial, SHORT, start_rate, tolerance=0.1)
    assert [point.meets(0.9) for point in goodput.points] == ([True] if is_met else [True, False])
    assert [point.meets(0.9) for point in bracketed.points] == [True, False]
    assert goodput.rate == pytest.approx(bracketed.rate, rel=0.1)


@pytest.mark.parametrize("is_bracketed", [False, True])
def test_where_too_many_miss_at_any_rate_the_goodput_is_zero(*, is_bracketed: bool) -> None:
    slo = SloConfig(ttft_seconds=1.0, tpot_seconds=0.1, attainment=0.9)
    search = GoodputSearch(a_trial(slo=slo, num_requests=1000), 10.0, 0.1, is_bracketed=is_bracketed)
    run_search(search, CurveRunner(lambda rate: max(0.17, 0.1 * rate**4), 0))
    assert search.goodput().rate == 0.0


def test_a_rough_search_goes_on_where_nearly_all_requests_meet_the_objectives() -> None:
    search = GoodputSearch(a_trial(), 4.0, 0.05, is_rough=True)
    run_search(search, Runner(SHORT))
    assert search.goodput().rate == pytest.approx(find_goodput(a_trial(), SHORT, 25.0).rate, rel=0.2)


def test_runs_may_end_in_any_order() -> None:
    search, runner = GoodputSearch(a_trial(), 25.0, 0.05), Runner(SHORT)
    num_together = 0
    while runs := search.ask():
        num_together = max(num_together, len(runs))
        for run in reversed(runs):
            search.tell(run, runner.carry_out(run))
    assert num_together > 1
    assert search.goodput() == find_goodput(a_trial(), SHORT, 25.0, tolerance=0.05)


@pytest.mark.parametrize("start_rate", [2.0, 1000.0])
def test_any_start_leads_to_about_the_same_rate(start_rate: float) -> None:
    near = find_goodput(a_trial(), SHORT, 30.0, tolerance=0.05)
    far = find_goodput(a_trial(), SHORT, start_rate, tolerance=0.05)
    assert far.rate == pytest.approx(near.rate, rel=0.1)


class CurveRunner(Runner):
    """In place of a cluster: at a rate of 10, a tenth of the requests miss, more or less of them with each seed."""

    def __init__(self, missed_share: Callable[[float], float], seed: int) -> None:
        super().__init__(SHORT)
        self._missed_share = missed_share
        self._seed = seed

    def carry_out(self, run: Run) -> Simulation:
        """Each request misses or not whatever the others do, at any rate by the same lot."""
        num_requests = run.trial.num_requests
        lots = np.random.default_rng((self._seed, run.seed)).random(num_requests)
        is_late = lots < self._missed_share(run.rate / 10)
        num_whole = num_requests
        if not run.is_whole and is_late.sum() > 0.2 * num_requests:
            num_whole = int(np.flatnonzero(is_late.cumsum() > 0.2 * num_requests)[0]) + 1
        simulation = a_run(np.where(is_late, 2.0, 0.5)[:num_whole].tolist(), [0.05] * num_whole)
        return replace(simulation, was_stopped=num_whole < num_requests)


CURVES = {
    "flat": lambda rate: 0.1 * rate**1.5,
    "usual": lambda rate: 0.1 * rate**4,
    "steep": lambda rate: 0.1 * rate**10,
    "cliff": lambda rate: 0.001 if rate < 1 else 8 * rate - 7.9,
    "ledge": lambda rate: 0.06 if rate < 1 else 8 * rate - 7.9,
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("is_rough", [False, True], ids=["settled", "rough at first"])
def test_on_a_curve_that_is_known_the_goodput_lies_in_its_interval(curve: str, *, is_rough: bool) -> None:
    slo = SloConfig(ttft_seconds=1.0, tpot_seconds=0.1, attainment=0.9)
    trial = a_trial(slo=slo, num_requests=1000)
    goodputs = []
    for seed, start_rate in enumerate(np.geomspace(3.0, 30.0, 40).tolist()):
        search, runner = GoodputSearch(trial, start_rate, 0.06, is_rough=is_rough), CurveRunner(CURVES[curve], seed)
        run_search(search, runner)
        search.settle()
        run_search(search, runner)
        goodputs.append(search.goodput())
    assert [goodput.rate for goodput in goodputs] == pytest.approx([10.0] * len(goodputs), rel=0.2)
    assert sum(goodput.interval.low <= 10.0 <= goodput.interval.high for goodput in goodputs) >= 0.9 * len(goodputs)
    assert np.median([goodput.interval.high - goodput.interval.low for goodput in goodputs]) < 3.0


@pytest.mark.parametrize("attainment", [0.999, 1.0])
def test_where_hardly_any_request_may_miss_the_search_looks_upwards(attainment: float) -> None:
    slo = SloConfig(ttft_seconds=1.0, tpot_seconds=0.1, attainment=attainment)
    search = GoodputSearch(a_trial(slo=slo, num_requests=400), 2.0, 0.06)
    run_search(search, CurveRunner(lambda rate: 0.0 if rate < 1 else 0.5, 0))
    assert search.goodput().rate == pytest.approx(10.0, rel=0.1)


def test_rates_that_are_hopeless_are_given_up_early() -> None:
    trial = replace(a_trial(num_requests=600), seeds=(0,))
    goodput = find_goodput(trial, SHORT, 60.0, tolerance=0.1)
    *_, given_up = goodput.points
    assert (given_up.rate, given_up.is_partial) == (60.0, True)
    assert goodput.interval.high <= min(point.rate for point in goodput.points if point.is_partial)
    assert given_up.num_requests < 600 / 2
    assert attain(trial, SHORT, 60.0).share <= given_up.share < 0.9


def test_what_was_seen_nearest_to_a_rate_ran_to_the_end() -> None:
    goodput = find_goodput(replace(a_trial(num_requests=600), seeds=(0,)), SHORT, 60.0, tolerance=0.1)
    seen = goodput.nearest(1000.0)
    assert seen is not None
    assert not seen.is_partial
    assert seen.rate == max(point.rate for point in goodput.points if not point.is_partial)


def test_an_slo_that_nothing_meets_has_no_goodput() -> None:
    goodput = find_goodput(a_trial(slo=SloConfig(ttft_seconds=1e-4, tpot_seconds=0.02)), SHORT, 10.0)
    assert goodput.rate == 0.0
    assert goodput.at_rate is None


def test_the_highest_rate_may_be_limited() -> None:
    goodput = find_goodput(a_trial(), SHORT, 4.0, max_rate=10.0)
    assert (goodput.rate, goodput.is_capped) == (10.0, True)


def test_an_slo_that_everything_meets_comes_to_an_end() -> None:
    """So few requests are served in time however fast they come."""
    goodput = find_goodput(a_trial(slo=SloConfig(ttft_seconds=1e3, tpot_seconds=1e3), num_requests=10), SHORT, 10.0)
    assert 10 < goodput.rate < 1e6


def test_the_same_arguments_give_the_same_answer() -> None:
    first, second = (find_goodput(a_trial(colocated()), SHORT, 30.0) for _ in range(2))
    assert first == second
