from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.planner.report.curves import attainment_curves
from pdserve.planner.search.plan import Effort
from pdserve.planner.workload.traffic import fixed_traffic
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
        assert {point.num_requests for point in curve if point not in candidate.goodput.points} == {200}


@pytest.mark.parametrize("num_runs", [1, 2])
def test_a_run_is_as_long_as_one_of_those_that_the_search_judged_a_rate_by(num_runs: int) -> None:
    """Not all finalists are run with all seeds."""
    plan = a_plan()
    candidate, workload = plan.best, fixed_traffic(200, 3, max_model_len=MODEL.max_model_len).workload
    assert candidate.is_final
    assert candidate.goodput is not None
    points = tuple(replace(point, num_runs=num_runs) for point in candidate.goodput.points)
    judged = replace(candidate, goodput=replace(candidate.goodput, points=points))
    question = replace(plan.question, effort=Effort(seeds=(3, 4)))
    (curve,) = attainment_curves(question, [judged], workload, num_processes=1)
    assert {point.num_requests for point in curve if point not in points} == {200 // num_runs}
