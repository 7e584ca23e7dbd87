from __future__ import annotations

from dataclasses import replace

from pdserve.planner.search.estimates import Estimate, Resource
from pdserve.planner.search.goodput import Runner, Trial
from pdserve.planner.search.infeasible import nothing_met, too_slow
from pdserve.planner.search.plan import Objective, Question, Supply
from pdserve.planner.search.ranking import Entry
from tests.planner.search.searches import find_goodput
from tests.planner.stand_ins import H100, LLAMA_3_8B, SLO, PoissonWorkload, colocated

QUESTION = Question(
    model=LLAMA_3_8B, slo=SLO, fleet=(Supply(hardware=H100),), objective=Objective.FEWEST_DEVICES, rate=80.0
)


def test_the_best_that_was_seen_is_named() -> None:
    slo = replace(SLO, ttft_seconds=0.03)
    trial = Trial(model=LLAMA_3_8B, layout=colocated(), slo=slo, num_requests=60)
    goodput = find_goodput(Runner(PoissonWorkload(1500, 20)), trial, 10.0)
    assert goodput.rate == 0
    estimate = Estimate(rate=10.0, resource=Resource.LINK)
    entry = Entry(trial.layout, estimate, None, estimate.rate, goodput=goodput)
    text = str(nothing_met(replace(QUESTION, slo=slo), [entry]))
    best = max(goodput.points, key=lambda point: point.share)
    assert text.startswith(
        "the SLO is out of reach: no layout meets TTFT 30 ms and TPOT 20 ms for 90 % of these requests"
    )
    assert f"{best.share * 100:.1f}".removesuffix(".0") in text
    assert "by 1 x M(TP1)" in text
    assert "\n" not in text


def test_the_most_that_the_fleet_serves_is_named() -> None:
    entries = [
        Entry(colocated(n), Estimate(rate=rate, resource=Resource.LINK), None, rate)
        for n, rate in ((1, 20.0), (2, 50.0))
    ]
    assert str(too_slow(QUESTION, entries)) == (
        "the fleet serves at most 50.0 requests/s within the SLO, with 2 x M(TP1), not the required 80.0 requests/s: "
        "add devices, or loosen the SLO"
    )
