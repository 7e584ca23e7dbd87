from __future__ import annotations

from pdserve.planner.bounds import Bounds, Resource
from pdserve.planner.final_round import FinalRound
from pdserve.planner.goodput import Runner, pursue
from pdserve.planner.goodput_search import GoodputSearch, find_goodput
from pdserve.planner.layout import Layout
from pdserve.planner.plan import Question, Supply
from pdserve.planner.ranking import Entry, Ranking
from tests.planner.stand_ins import H100, LLAMA_3_8B, SLO, disaggregated
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
    pursue(final, Runner(SHORT))
    assert worse.final is not None
    assert better.final == find_goodput(a_trial(better.layout), SHORT, 72.0, tolerance=TOLERANCE)
    assert [point.num_requests for point in worse.final.points] == [150]
    assert final.num_requests == worse.final.num_requests + better.final.num_requests
    assert len(heard) == sum(point.num_runs for goodput in (worse.final, better.final) for point in goodput.points)


def test_who_falls_behind_on_a_closer_look_leaves_it_to_the_next() -> None:
    """One run far beyond its goodput says too much of the first."""
    first, second = (a_finalist(disaggregated(1, 1), rate) for rate in (40.0, 30.0))
    at_first = []
    for start_rate in (40.0, 30.0):
        search = GoodputSearch(a_trial(), start_rate, TOLERANCE, is_rough=True)
        pursue(search, Runner(SHORT))
        at_first.append(search.goodput().rate)
    pursue(FinalRound(RANKING, [first, second], TOLERANCE, lambda: None), Runner(SHORT))
    assert first.final is not None
    assert at_first[0] > at_first[1] > first.final.rate
    assert second.final == find_goodput(a_trial(), SHORT, 30.0, tolerance=TOLERANCE)
