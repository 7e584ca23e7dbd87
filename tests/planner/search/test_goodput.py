from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pdserve.planner.layout import Layout
from pdserve.planner.search import goodput as goodput_module
from pdserve.planner.search.goodput import (
    LEAST_RUN,
    Goodput,
    Runner,
    Trial,
    answered,
    find_best,
    run_lengths,
    search_better,
)
from pdserve.planner.search.rates import bracketing, highest_rate
from pdserve.planner.simulate.attainment import Attainment, Interval, measure
from pdserve.planner.simulate.simulator import simulate
from tests.planner.search.searches import carried_out, find_goodput
from tests.planner.stand_ins import LLAMA_3_8B, SLO, PoissonWorkload, attain, disaggregated

SHORT = PoissonWorkload(1500, 20)


def a_trial(layout: Layout | None = None, num_requests: int = 150) -> Trial:
    return Trial(model=LLAMA_3_8B, layout=layout or disaggregated(), slo=SLO, num_requests=num_requests)


class CurveRunner(Runner):
    """In place of a cluster: a curve of attainment over the rate, for the scout, too."""

    def __init__(self, share: Callable[[float], float]) -> None:
        super().__init__(SHORT)
        self._share = share
        self.num_runs = 0

    def attainment(self, trial: Trial, rate: float) -> Attainment:
        self.num_runs += 1
        share = min(max(self._share(rate), 0.0), 1.0)
        return replace(
            attain(replace(trial, num_requests=2), SHORT, rate),
            share=share,
            interval=Interval(share - 0.01, share + 0.01),
            num_requests=trial.num_requests,
            is_saturated=False,
        )

    def scouted(self, trial: Trial, rate: float) -> Attainment:
        return self.attainment(trial, rate)


TRIAL = a_trial(num_requests=20_000)


def falling(middle: float, steepness: float = 8.0) -> Callable[[float], float]:
    """90 % at ``middle``."""
    return lambda rate: 1 / (1 + (rate / middle) ** steepness / 9)


@pytest.mark.parametrize("start_rate", [0.5, 9.0, 10.5, 400.0])
def test_the_goodput_is_the_highest_rate_that_surely_meets_the_target(start_rate: float) -> None:
    share = falling(10.0)
    goodput = find_goodput(CurveRunner(share), TRIAL, start_rate, tolerance=0.01)
    assert share(goodput.rate) >= 0.91
    assert share(goodput.rate * 1.01) < 0.91
    low, high = goodput.interval
    assert low == goodput.rate
    assert low < 10.0 < high
    assert share(high) == pytest.approx(0.89, abs=0.01)
    assert goodput.at_rate is not None
    assert goodput.at_rate.rate == goodput.rate
    assert [point.rate for point in goodput.points] == sorted(point.rate for point in goodput.points)


def test_the_interval_ends_where_the_target_is_surely_missed_however_flat_the_curve() -> None:
    share = falling(10.0, steepness=0.5)
    low, high = find_goodput(CurveRunner(share), TRIAL, 5.0).interval
    assert share(low) == pytest.approx(0.91, abs=0.002)
    assert share(high) == pytest.approx(0.89, abs=0.002)


def test_where_too_many_miss_at_any_rate_the_goodput_is_zero() -> None:
    goodput = find_goodput(CurveRunner(lambda rate: 0.83), TRIAL, 10.0)
    assert goodput.rate == 0.0
    assert goodput.at_rate is None
    assert goodput.points


def test_what_barely_meets_the_target_has_a_goodput_that_is_not_sure() -> None:
    goodput = find_goodput(CurveRunner(lambda rate: 0.905 if rate < 10 else 0.5), TRIAL, 30.0)
    assert goodput.rate == pytest.approx(10.0, rel=0.03)
    assert goodput.interval.low == 0.0
    assert goodput.is_met(CurveRunner(lambda rate: 0.9).attainment(TRIAL, 1.0))
    sure = find_goodput(CurveRunner(falling(10.0)), TRIAL, 30.0)
    assert not sure.is_met(CurveRunner(lambda rate: 0.9).attainment(TRIAL, 1.0))


def test_where_no_rate_misses_the_search_ends() -> None:
    goodput = find_goodput(CurveRunner(lambda rate: 1.0), TRIAL, 5.0)
    assert goodput.rate > 1000.0


def test_what_misses_at_the_goodput_of_another_is_not_searched() -> None:
    rival = find_goodput(CurveRunner(falling(10.0)), TRIAL, 9.0)
    for middle, is_better in ((9.5, False), (12.0, True)):
        runner = CurveRunner(falling(middle))
        found = carried_out(search_better(TRIAL, rival.rate, rival.is_met, tolerance=0.02), runner)
        assert isinstance(found, Goodput) is is_better
        if isinstance(found, Goodput):
            assert found.rate > 1.1 * rival.rate
            assert runner.num_runs == len(found.points)
        else:
            assert (found.rate, runner.num_runs) == (rival.rate, 1)


def test_a_rate_that_is_too_high_to_be_stated_ends_the_search() -> None:
    trial, runner = replace(TRIAL, run_s=20_000 / 6 / LEAST_RUN), CurveRunner(falling(10.0))
    goodput = find_goodput(runner, trial, 5.0)
    assert trial.most_rate < goodput.rate < 1.2 * trial.most_rate
    assert runner.num_runs == len(goodput.points) <= 3
    assert find_goodput(runner, trial, 3.0).rate > trial.most_rate
    assert find_goodput(CurveRunner(falling(5.0)), trial, 3.0).rate < 5.0 < trial.most_rate


@pytest.mark.parametrize("start_rate", [3.0, 30.0])
def test_the_goodput_ends_below_saturation_and_its_interval_at_it(start_rate: float) -> None:
    class Saturating(CurveRunner):
        def attainment(self, trial: Trial, rate: float) -> Attainment:
            return replace(super().attainment(trial, rate), is_saturated=rate > 9.0)

    goodput = find_goodput(Saturating(falling(10.0)), TRIAL, start_rate)
    low, high = goodput.interval
    assert low == goodput.rate
    assert 9.0 / 1.02 <= low <= 9.0 < high <= low * 1.02


@pytest.mark.parametrize("first", [0, 2, 4])
def test_the_best_of_neighbouring_trials_is_climbed_to(first: int) -> None:
    trials = [a_trial(num_requests=100 * peak) for peak in (3, 4, 6, 5, 1)]

    class Hill(CurveRunner):
        def attainment(self, trial: Trial, rate: float) -> Attainment:
            return replace(super().attainment(trial, rate * 1000 / trial.num_requests), rate=rate)

    runner = Hill(falling(10.0))
    best, screened = find_best(runner, trials, first, 5.0, 0.02)
    assert best == 2
    assert screened.rate == pytest.approx(6.0, rel=0.05)
    assert screened.num_requests >= 600
    assert screened.mean_residence_s > 0


def test_known_results_are_not_simulated_again() -> None:
    runner, known = CurveRunner(falling(10.0)), dict[float, Attainment]()
    for _ in range(2):
        search = answered(bracketing(9.0, 1.05, 1.02), TRIAL, lambda seen: seen.meets(0.9), known)
        rate = carried_out(search, runner)
    assert rate == max(each for each in known if each <= 10.0)
    assert runner.num_runs == len(known)


def test_a_run_has_its_usual_length_and_lasts_twice_as_long_at_most() -> None:
    trial, requests = a_trial(num_requests=20_000), SHORT.draw(20_000, 0).at_rate(100.0)
    assert run_lengths(replace(trial, run_s=90.0), requests) == pytest.approx([9000, 18_000], rel=0.1)
    assert run_lengths(replace(trial, run_s=1.0), requests) == [8000, 16_000]
    assert run_lengths(replace(trial, run_s=90.0), requests[:5000]) == [5000, 5000]
    assert run_lengths(trial, requests[:200]) == [200, 200]


@pytest.mark.parametrize(("rate", "num_requests"), [(20.0, 400), (48.0, 400), (61.0, 800), (150.0, 400)])
def test_a_run_lasts_longer_only_where_that_may_decide(
    monkeypatch: pytest.MonkeyPatch, rate: float, num_requests: int
) -> None:
    """What ends early is what a run of that length is."""
    monkeypatch.setattr(goodput_module, "LEAST_REQUESTS", 400)
    trial = replace(a_trial(num_requests=2000), run_s=1.0)
    seen = Runner(SHORT).attainment(trial, rate)
    assert seen.num_requests == num_requests
    assert (seen.surely_meets(0.9), seen.surely_misses(0.9)) == (rate == 20, rate >= 61)
    requests = SHORT.draw(2000, 0).at_rate(rate)[:num_requests]
    shorter = simulate(trial.model, trial.layout, requests, slo=SLO)
    assert measure(shorter, SLO, rate).share == seen.share


@pytest.mark.parametrize(("start_rate", "num_most"), [(10.0, 4), (9.3, 4), (4.0, 12), (40.0, 12)])
def test_rates_are_asked_one_by_one_and_each_may_decide(start_rate: float, num_most: int) -> None:
    asked: list[float] = []

    def meets(rate: float) -> bool:
        assert all((rate > each) is (each <= 10.0) for each in asked)
        asked.append(rate)
        return rate <= 10.0

    found = highest_rate(meets, start_rate, 1.1, 1.04)
    assert found <= 10.0 < min(each for each in asked if each > 10.0) <= 1.04 * found
    assert len(asked) <= num_most


def test_the_policy_of_a_trial_is_the_routers() -> None:
    runner, trial = Runner(SHORT), a_trial(disaggregated(2, 2), num_requests=300)
    attained = {runner.attainment(replace(trial, policy=policy), 60.0) for policy in ("goodput", "round-robin")}
    assert len({each.share for each in attained}) == 2
