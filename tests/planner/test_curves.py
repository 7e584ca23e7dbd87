from __future__ import annotations

from dataclasses import replace

from pdserve.planner.curves import attainment_curves
from pdserve.planner.plan import Effort
from pdserve.planner.traffic import fixed_traffic
from tests.planner.plans import MODEL, a_plan


def test_curves_go_from_well_below_the_goodput_to_above_it_and_run_to_their_end() -> None:
    plan = a_plan()
    question = replace(plan.question, effort=Effort(seeds=(3, 4)))
    candidates = plan.candidates[:2]
    workload = fixed_traffic(200, 3, max_model_len=MODEL.max_model_len).workload
    curves = attainment_curves(question, candidates, workload, num_processes=1)
    for candidate, curve in zip(candidates, curves, strict=True):
        rates = [point.rate for point in curve]
        assert rates == sorted(rates)
        assert rates[0] <= candidate.rate / 2
        assert rates[-1] > candidate.rate
        assert candidate.goodput is not None
        assert set(candidate.goodput.points) <= set(curve), "what the search saw with all seeds"
        # A run is as long as one of the two that the search judged a rate by.
        others = {(point.num_requests, point.is_partial) for point in curve if point not in candidate.goodput.points}
        assert others == {(100, False)}
