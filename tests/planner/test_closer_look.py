from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.contracts.deployment import SloConfig
from pdserve.planner.bounds import Bounds, Resource
from pdserve.planner.closer_look import CloserLook
from pdserve.planner.goodput import Runner, Trial, attain, pursue, slowed
from pdserve.planner.goodput_search import find_goodput
from pdserve.planner.layout import Layout
from pdserve.planner.ranking import Entry
from tests.planner.stand_ins import SLO, disaggregated
from tests.planner.test_goodput import SHORT, a_trial

WINNER, LOSER = disaggregated(2, 1), disaggregated(1, 1)
RATE = 50.0


def a_finalist(layout: Layout, start_rate: float, slo: SloConfig = SLO) -> Entry:
    entry = Entry(layout, Bounds(rate=100.0, estimate=start_rate, resource=Resource.LINK), 1.0)
    entry.screened = find_goodput(replace(a_trial(layout, slo), seeds=(0,)), SHORT, start_rate, tolerance=0.15)
    entry.final = find_goodput(a_trial(layout, slo), SHORT, start_rate, tolerance=0.05)
    return entry


def a_look(winner: Entry, losers: list[Entry], rate: float, short: Trial | None = None) -> CloserLook:
    short = short or replace(a_trial(winner.layout), seeds=(0,))
    look = CloserLook(winner, losers, rate, tolerance=0.05, short=short, long=replace(a_trial(), seeds=(0,)))
    for pursuit in look.pursuits:
        pursue(pursuit, Runner(SHORT))
    return look


def test_losers_are_looked_at_where_they_were_not_seen() -> None:
    winner, loser = a_finalist(WINNER, 60.0), a_finalist(LOSER, 30.0)
    assert loser.final is not None
    seen = loser.final.points[-1]
    look = a_look(winner, [loser], seen.rate * 1.04)
    assert look.losers_at_rate() == [seen]
    far = a_look(winner, [loser, winner], 2 * RATE)
    at_rate = far.losers_at_rate()
    assert len(far.pursuits) == len(look.pursuits) + 2
    assert at_rate == [attain(replace(a_trial(layout), seeds=(0,)), SHORT, 2 * RATE) for layout in (LOSER, WINNER)]


def test_ratios_of_short_runs_are_put_to_the_long_goodput() -> None:
    winner = a_finalist(WINNER, 60.0)
    look, short = a_look(winner, [], RATE), replace(a_trial(WINNER), seeds=(0,))
    as_predicted = find_goodput(short, SHORT, 60.0, tolerance=0.02).rate
    for factor, sensitivity in zip((0.9, 1.1), look.sensitivity(), strict=True):
        actual = find_goodput(slowed(short, factor), SHORT, 60.0, tolerance=0.02).rate / factor
        assert sensitivity.time_factor == factor
        assert sensitivity.rate == pytest.approx(winner.rate * actual / as_predicted, rel=0.1)
    halved = replace(short, slo=replace(SLO, attainment=SLO.attainment / 2))
    cliff_rate = look.cliff_rate()
    assert cliff_rate is not None
    assert cliff_rate > winner.rate
    at_cliff = find_goodput(halved, SHORT, 60.0, tolerance=0.02).rate
    assert cliff_rate == pytest.approx(winner.rate * at_cliff / as_predicted, rel=0.1)


def test_where_short_runs_meet_nothing_no_ratio_is_told() -> None:
    winner = a_finalist(WINNER, 60.0)
    hopeless = replace(a_trial(WINNER, SloConfig(ttft_seconds=1e-4, tpot_seconds=1e-4)), seeds=(0,))
    look = a_look(winner, [], RATE, hopeless)
    assert look.cliff_rate() is None
    assert look.sensitivity() == ()
