from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pdserve.contracts.deployment import SloConfig
from pdserve.planner.layout import Layout
from pdserve.planner.search.goodput import Runner, Trial, confirmed, find_best, find_goodput
from pdserve.planner.simulate.attainment import Attainment, Interval
from tests.planner.stand_ins import LLAMA_3_8B, SLO, PoissonWorkload, attain, disaggregated

SHORT = PoissonWorkload(1500, 20)


def a_trial(layout: Layout | None = None, slo: SloConfig = SLO, num_requests: int = 150) -> Trial:
    return Trial(model=LLAMA_3_8B, layout=layout or disaggregated(), slo=slo, num_requests=num_requests, seeds=(0, 1))


class CurveRunner(Runner):
    """In place of a cluster: a curve of attainment over the rate, and more or less of it with each seed."""

    def __init__(self, share: Callable[[float], float], spread: float = 0.0) -> None:
        super().__init__(SHORT)
        self._share = share
        self._spread = spread
        self.num_runs = 0

    def attainment(self, trial: Trial, rate: float, *, num_seeds: int = 0) -> Attainment:
        num_seeds = num_seeds or len(trial.seeds)
        self.num_runs += num_seeds
        shares = [self._share(rate) + self._spread * seed for seed in trial.seeds[:num_seeds]]
        share = min(max(sum(shares) / num_seeds, 0.0), 1.0)
        return replace(
            attain(replace(trial, num_requests=2), SHORT, rate),
            share=share,
            interval=Interval(share - 0.005, share + 0.005),
            of_further_run=Interval(share - 0.01, share + 0.01),
            num_requests=trial.num_requests * num_seeds,
            num_runs=num_seeds,
            is_saturated=False,
        )


def falling(middle: float, steepness: float = 8.0) -> Callable[[float], float]:
    """90 % at ``middle``."""
    return lambda rate: 1 / (1 + (rate / middle) ** steepness / 9)


@pytest.mark.parametrize("start_rate", [0.5, 9.0, 10.5, 400.0])
@pytest.mark.parametrize(("seeds", "least_share"), [((0,), 0.9), ((0, 1, 2), 0.91)], ids=str)
def test_the_goodput_is_the_highest_rate_that_one_run_meets_or_several_surely_meet(
    start_rate: float, seeds: tuple[int, ...], least_share: float
) -> None:
    share = falling(10.0)
    goodput = find_goodput(CurveRunner(share), replace(a_trial(), seeds=seeds), start_rate, tolerance=0.01)
    assert share(goodput.rate) >= least_share
    assert share(goodput.rate * 1.01) < least_share
    low, high = goodput.interval
    assert low == goodput.rate
    assert low < 10.0 < high
    assert share(high) == pytest.approx(0.89, abs=0.01)
    assert goodput.at_rate is not None
    assert goodput.at_rate.rate == goodput.rate
    assert goodput.at_rate.num_runs == len(seeds)
    assert [point.rate for point in goodput.points] == sorted(point.rate for point in goodput.points)


def test_the_interval_ends_where_a_further_run_misses_however_flat_the_curve() -> None:
    share = falling(10.0, steepness=0.5)
    low, high = find_goodput(CurveRunner(share), a_trial(), 5.0).interval
    assert share(low) == pytest.approx(0.91, abs=0.001)
    assert share(high) == pytest.approx(0.89, abs=0.001)


def test_all_seeds_are_spent_near_the_goodput_only() -> None:
    trial, runner = replace(a_trial(), seeds=(0, 1, 2, 3)), CurveRunner(falling(10.0))
    goodput = find_goodput(runner, trial, 2.0)
    far = [point for point in goodput.points if abs(point.rate / goodput.rate - 1) > 0.15]
    assert far
    assert all(point.num_runs == 1 for point in far)
    assert goodput.num_requests == runner.num_runs * trial.num_requests


def test_where_the_first_seed_alone_was_lucky_the_others_lower_the_goodput() -> None:
    trial = replace(a_trial(), seeds=(0, 1, 2))
    lucky = find_goodput(CurveRunner(falling(10.0), spread=-0.02), trial, 10.0)
    assert lucky.rate < 0.98 * find_goodput(CurveRunner(falling(10.0)), trial, 10.0).rate


def test_where_too_many_miss_at_any_rate_the_goodput_is_zero() -> None:
    goodput = find_goodput(CurveRunner(lambda rate: 0.83), a_trial(), 10.0)
    assert goodput.rate == 0.0
    assert goodput.at_rate is None


def test_where_no_rate_misses_the_search_ends() -> None:
    goodput = find_goodput(CurveRunner(lambda rate: 1.0), a_trial(), 5.0)
    assert goodput.rate > 1000.0


@pytest.mark.parametrize("start_rate", [3.0, 30.0])
def test_the_goodput_ends_below_saturation_and_its_interval_at_it(start_rate: float) -> None:
    class Saturating(CurveRunner):
        def attainment(self, trial: Trial, rate: float, *, num_seeds: int = 0) -> Attainment:
            return replace(super().attainment(trial, rate, num_seeds=num_seeds), is_saturated=rate > 9.0)

    goodput = find_goodput(Saturating(falling(10.0)), a_trial(), start_rate)
    low, high = goodput.interval
    assert low == goodput.rate
    assert 9.0 / 1.02 <= low <= 9.0 < high <= low * 1.02


@pytest.mark.parametrize("first", [0, 2, 4])
def test_the_best_of_neighbouring_trials_is_climbed_to(first: int) -> None:
    trials = [a_trial(num_requests=100 * peak) for peak in (3, 4, 6, 5, 1)]

    class Hill(CurveRunner):
        def attainment(self, trial: Trial, rate: float, *, num_seeds: int = 0) -> Attainment:
            seen = super().attainment(trial, rate * 1000 / trial.num_requests, num_seeds=num_seeds)
            return replace(seen, rate=rate)

    best, goodput = find_best(Hill(falling(10.0)), trials, first, 5.0, 0.02)
    assert best == 2
    assert goodput.rate == pytest.approx(6.0, rel=0.05)


def test_known_results_are_not_simulated_again() -> None:
    runner, trial = CurveRunner(falling(10.0)), replace(a_trial(), seeds=(0,))
    known = runner.attainment(trial, 9.0)
    runner.num_runs = 0
    goodput = find_goodput(runner, trial, 9.0, step=1.05, known=[known])
    assert known in goodput.points
    assert runner.num_runs == len(goodput.points) - 1


class JudgeRunner(CurveRunner):
    """The judge's attainment at ``factor`` times a rate is the scout's at the rate."""

    def __init__(self, factor: float) -> None:
        super().__init__(falling(10.0))
        self._factor = factor
        self.num_judged = 0

    def attainment(self, trial: Trial, rate: float, *, num_seeds: int = 0) -> Attainment:
        self.num_judged += not trial.is_scouted
        seen = super().attainment(trial, rate if trial.is_scouted else rate / self._factor, num_seeds=num_seeds)
        return replace(seen, rate=rate)


@pytest.mark.parametrize(("factor", "rate"), [(0.8, 8.0), (1.0, 9.8), (1.2, 9.8)])
def test_the_judge_lowers_a_goodput_and_never_raises_one(factor: float, rate: float) -> None:
    trial, runner = a_trial(), JudgeRunner(factor)
    scouted = find_goodput(runner, replace(trial, is_scouted=True), 5.0)
    goodput = confirmed(runner, replace(trial, seeds=(9,)), scouted).goodput
    assert goodput.rate == pytest.approx(rate, rel=0.03)
    assert goodput.is_scouted is (factor >= 1)
    assert goodput.at_rate is not None
    assert goodput.at_rate.num_runs == 1
    assert goodput.at_rate.share >= 0.9
    assert 10.0 * factor < goodput.interval.high < 11.0 * max(1.0, factor)


@pytest.mark.parametrize(("factor", "num_judged"), [(0.99, 1), (1.0, 1), (1.2, 2)])
def test_the_judge_runs_again_only_where_it_attains_more_than_the_scout(factor: float, num_judged: int) -> None:
    trial, runner = replace(a_trial(), seeds=(0,)), JudgeRunner(factor)
    scouted = find_goodput(runner, replace(trial, is_scouted=True), 5.0)
    scouted = replace(scouted, rate=scouted.rate * 0.98)
    confirmed(runner, trial, scouted)
    assert runner.num_judged == num_judged


def test_the_judge_attains_the_same_at_the_goodput_that_the_scout_finds() -> None:
    pytest.importorskip("numba", reason="the scout needs the planner's extra")
    trial, runner = replace(a_trial(num_requests=1500), seeds=(0,)), Runner(SHORT)
    scouted = find_goodput(runner, replace(trial, is_scouted=True), 25.0)
    assert scouted.is_scouted
    assert scouted.at_rate is not None
    assert runner.attainment(trial, scouted.rate).share == pytest.approx(scouted.at_rate.share, abs=0.02)
