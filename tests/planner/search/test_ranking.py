from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.planner.layout import Layout
from pdserve.planner.search.estimates import Estimate, Resource
from pdserve.planner.search.goodput import Goodput
from pdserve.planner.search.plan import Objective, Question, Supply
from pdserve.planner.search.ranking import Entry, Ranking, of_both_kinds
from pdserve.planner.simulate.attainment import Interval
from tests.planner.stand_ins import H100, LLAMA_3_8B, SLO, colocated, disaggregated


def an_entry(layout: Layout, rate: float, dollars_per_hour: float = 1.0) -> Entry:
    return Entry(layout, Estimate(rate=rate, resource=Resource.LINK), dollars_per_hour, rate)


FAST = an_entry(colocated(4), 10.0, 9.0)
LEAN = an_entry(colocated(1), 4.0, 5.0)
CHEAP = an_entry(disaggregated(1, 2), 6.0, 3.0)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (Objective.RATE, [FAST, CHEAP, LEAN]),
        (Objective.RATE_PER_DEVICE, [LEAN, FAST, CHEAP]),
        (Objective.FEWEST_DEVICES, [CHEAP, FAST, LEAN]),
        (Objective.LEAST_COST, [CHEAP, FAST, LEAN]),
    ],
)
def test_each_objective_has_its_order(objective: Objective, expected: list[Entry]) -> None:
    question = Question(model=LLAMA_3_8B, slo=SLO, fleet=(Supply(hardware=H100),), objective=objective, rate=5.0)
    ranking = Ranking(question)
    assert ranking.ranked([LEAN, FAST, CHEAP]) == expected
    assert ranking.serves(4.0) is not objective.has_rate


def test_optimism_may_make_a_layout_serve_what_is_asked() -> None:
    question = Question(
        model=LLAMA_3_8B,
        slo=SLO,
        fleet=(Supply(hardware=H100),),
        objective=Objective.FEWEST_DEVICES,
        rate=5.0,
    )
    assert Ranking(question).ranked([FAST, LEAN], 1.3)[0] is LEAN


def test_a_choice_has_some_of_both_kinds() -> None:
    together = [an_entry(colocated(n), float(n)) for n in range(1, 9)]
    apart = [an_entry(disaggregated(n, n), n / 100) for n in range(1, 9)]
    chosen = of_both_kinds(together + apart, 8)
    assert chosen == together[:4] + apart[:4]
    assert of_both_kinds(together, 3) == together[:3]
    assert of_both_kinds(apart[:1], 3) == apart[:1]


def test_what_may_beat_the_best_of_its_kind_is_near_it() -> None:
    best, close, far = (an_entry(colocated(4), rate) for rate in (10.0, 8.5, 7.5))
    apart = an_entry(disaggregated(2, 2), 1.0)
    question = Question(model=LLAMA_3_8B, slo=SLO, fleet=(Supply(hardware=H100),))
    assert Ranking(question).may_beat([far, close, apart], [best], 1.25) == [close, apart]
    asked = replace(question, objective=Objective.FEWEST_DEVICES, rate=5.0)
    fewer, too_few = an_entry(colocated(2), 4.5), an_entry(colocated(1), 2.0)
    assert Ranking(asked).may_beat([far, fewer, too_few], [best], 1.25) == [fewer]


def test_a_rival_is_the_best_of_the_kind_and_its_rate_is_that_of_as_many_devices() -> None:
    goodput = Goodput(rate=8.0, interval=Interval(8.0, 9.0), target=0.9, num_devices=4, points=())
    finalist, entry = an_entry(colocated(4), 10.0), an_entry(colocated(2), 4.0)
    finalist.goodput = goodput
    question = Question(model=LLAMA_3_8B, slo=SLO, fleet=(Supply(hardware=H100),))
    assert Ranking(question).rival(entry, [finalist]) == (goodput, 8.0)
    assert Ranking(question).rival(CHEAP, [finalist]) is None
    per_device = Ranking(replace(question, objective=Objective.RATE_PER_DEVICE))
    assert per_device.rival(entry, [finalist]) == (goodput, 4.0)
    asked = Ranking(replace(question, objective=Objective.FEWEST_DEVICES, rate=5.0))
    assert asked.rival(entry, [finalist]) is None
