from __future__ import annotations

import pytest

from pdserve.planner.attainment import Interval
from pdserve.planner.bounds import Bounds, Resource
from pdserve.planner.final_round import FinalRound, start_rate
from pdserve.planner.goodput import Goodput, Run, Runner, run_search
from pdserve.planner.goodput_search import GoodputSearch
from pdserve.planner.layout import Layout
from pdserve.planner.plan import Question, Supply
from pdserve.planner.ranking import Entry, Ranking
from tests.planner.stand_ins import H100, LLAMA_3_8B, SLO, disaggregated, find_goodput
from tests.planner.test_goodput import SHORT, a_trial

TOLERANCE = 0.05
RANKING = Ranking(Question(model=LLAMA_3_8B, slo=SLO, fleet=(Supply(hardware=H100),)))


def a_finalist(layout: Layout, start_rate: float) -> Entry:
    entry = Entry(layout, Bounds(rate=100.0, estimate=start_rate, resource=Resource.LINK), 1.0)
    entry.search = GoodputSearch(a_trial(layout), start_rate, TOLERANCE, is_rough=True)
    return entry


def test_the_best_is_looked_at_closely_and_the_others_once() -> None:
    worse, better = a_finalist(disaggregated(1, 1), 26.0), a_finalist(disaggregated(2, 1), 72.0)
    heard: list[None] = []
    final = FinalRound(RANKING, [worse, better], TOLERANCE, lambda: heard.append(None))
    run_search(final, Runner(SHORT))
    assert worse.final is not None
    assert better.final == find_goodput(a_trial(better.layout), SHORT, 72.0, tolerance=TOLERANCE)
    assert [point.num_requests for point in worse.final.points] == [150]
    assert final.num_requests == worse.final.num_requests + better.final.num_requests
    assert len(heard) == sum(point.num_runs for goodput in (worse.final, better.final) for point in goodput.points)


def test_who_falls_behind_on_a_sensitivity_leaves_it_to_the_next() -> None:
    """One run far beyond its goodput says too much of the first."""
    first, second = (a_finalist(disaggregated(1, 1), rate) for rate in (40.0, 30.0))
    at_first = []
    for rate in (40.0, 30.0):
        search = GoodputSearch(a_trial(), rate, TOLERANCE, is_rough=True)
        run_search(search, Runner(SHORT))
        at_first.append(search.goodput().rate)
    run_search(FinalRound(RANKING, [first, second], TOLERANCE, lambda: None), Runner(SHORT))
    assert first.final is not None
    assert at_first[0] > at_first[1] > first.final.rate
    assert second.final == find_goodput(a_trial(), SHORT, 30.0, tolerance=TOLERANCE)


class KnownSearch(GoodputSearch):
    """One that knows its goodput."""

    def ask(self) -> list[Run]:
        return []

    def goodput(self) -> Goodput:
        rate = self._start_rate
        return Goodput(rate=rate, interval=Interval(rate, rate), target=0.9, num_devices=2, points=(), num_requests=0)


@pytest.mark.parametrize(("rate", "is_near"), [(100.0, True), (98.0, True), (97.0, False)])
def test_who_is_as_good_but_for_half_of_the_tolerance_is_looked_at_closely(rate: float, *, is_near: bool) -> None:
    entries = [a_finalist(disaggregated(1, 1), each) for each in (100.0, rate)]
    for entry in entries:
        entry.search = KnownSearch(a_trial(entry.layout), entry.bounds.estimate, TOLERANCE, is_rough=True)
    assert not FinalRound(RANKING, entries, TOLERANCE, lambda: None).ask()
    assert [entry.is_settled for entry in entries] == [True, is_near]


@pytest.mark.parametrize(("guess", "start"), [(96.0, 100.0), (60.0, 55.0), (75.0, 75.0)])
def test_finalists_begin_at_the_nearer_of_the_rates_that_are_shared(guess: float, start: float) -> None:
    assert start_rate(guess, [100.0, 55.0], 0.15) == start
