from __future__ import annotations

from dataclasses import replace
from math import sqrt

from pdserve.contracts.deployment import SloConfig
from pdserve.planner.bounds import Bounds, Resource
from pdserve.planner.goodput import Runner, Trial, run_search, slowed
from pdserve.planner.goodput_search import GoodputSearch
from pdserve.planner.layout import Layout
from pdserve.planner.plan import Sensitivity
from pdserve.planner.ranking import Entry
from pdserve.planner.sensitivity import SensitivityAnalysis
from tests.planner.stand_ins import SLO, attain, disaggregated, find_goodput
from tests.planner.test_goodput import SHORT, a_trial

WINNER, LOSER = disaggregated(2, 1), disaggregated(1, 1)
RATE = 50.0


def a_finalist(layout: Layout, start_rate: float) -> Entry:
    entry = Entry(layout, Bounds(rate=100.0, estimate=start_rate, resource=Resource.LINK), 1.0)
    entry.screened = find_goodput(replace(a_trial(layout), seeds=(0,)), SHORT, start_rate, tolerance=0.15)
    entry.final = find_goodput(a_trial(layout), SHORT, start_rate, tolerance=0.05)
    return entry


def a_look(winner: Entry, losers: list[Entry], rate: float, short: Trial | None = None) -> SensitivityAnalysis:
    short = short or replace(a_trial(winner.layout), seeds=(0,))
    look = SensitivityAnalysis(winner, losers, rate, tolerance=0.05, short=short, long=replace(a_trial(), seeds=(0,)))
    for search in look.searches:
        run_search(search, Runner(SHORT))
    return look


def test_losers_are_looked_at_where_they_were_not_seen() -> None:
    winner, loser = a_finalist(WINNER, 60.0), a_finalist(LOSER, 30.0)
    assert loser.final is not None
    seen = loser.final.points[-1]
    look = a_look(winner, [loser], seen.rate * 1.04)
    assert look.losers_at_rate() == [seen]
    far = a_look(winner, [loser, winner], 2 * RATE)
    at_rate = far.losers_at_rate()
    assert len(far.searches) == len(look.searches) + 2
    assert at_rate == [attain(replace(a_trial(layout), seeds=(0,)), SHORT, 2 * RATE) for layout in (LOSER, WINNER)]


def test_ratios_of_short_runs_are_put_to_the_long_goodput() -> None:
    winner = a_finalist(WINNER, 60.0)
    assert winner.screened is not None
    assert winner.final is not None
    winner.final = replace(winner.final, rate=3 * winner.final.rate)
    look, short, short_rate = a_look(winner, [], RATE), replace(a_trial(WINNER), seeds=(0,)), winner.screened.rate

    def short_goodput(trial: Trial, start_rate: float) -> float:
        search = GoodputSearch(trial, start_rate, 0.1, is_bracketed=False)
        run_search(search, Runner(SHORT))
        return search.goodput().rate

    scale = winner.rate / short_goodput(short, short_rate)
    faster, slower = (
        Sensitivity(factor, scale * short_goodput(slowed(short, factor), short_rate / sqrt(factor)) / factor)
        for factor in (0.9, 1.1)
    )
    assert look.sensitivity() == (faster, slower)
    assert faster.rate > 1.05 * winner.rate
    assert slower.rate < 0.95 * winner.rate
    halved = replace(short, slo=replace(SLO, attainment=SLO.attainment / 2))
    assert look.saturation_rate() == scale * short_goodput(halved, 1.25 * short_rate) > 1.05 * winner.rate


def test_where_short_runs_meet_nothing_no_ratio_is_told() -> None:
    winner = a_finalist(WINNER, 60.0)
    hopeless = replace(a_trial(WINNER, SloConfig(ttft_seconds=1e-4, tpot_seconds=1e-4)), seeds=(0,))
    look = a_look(winner, [], RATE, hopeless)
    assert look.saturation_rate() is None
    assert look.sensitivity() == ()
