"""Numbers of workers of a running cluster, compared by short runs."""

from __future__ import annotations

import pytest

from pdserve.contracts.deployment import SloConfig
from pdserve.planner.layout import Layout
from pdserve.planner.live.numbers import best_numbers
from pdserve.planner.search.plan import Effort, Plan, Question, Space, Supply
from tests.planner.plans import MODEL
from tests.planner.stand_ins import H100, PoissonWorkload, disaggregated

SHORT_ANSWERS = PoissonWorkload(2000, 8, spread=0.3)
"""Prefill workers have almost all of the work."""


def plan(running: Layout, said: list[str], ttft_s: float = 1.0) -> Plan:
    question = Question(
        model=MODEL,
        slo=SloConfig(ttft_seconds=ttft_s, tpot_seconds=0.05),
        fleet=(Supply(hardware=H100, devices_per_node=running.num_devices),),
        space=Space(running=tuple(running.pools), keeps_pools=True),
        effort=Effort(final_requests=60, tolerance=0.1),
    )
    return best_numbers(
        question, SHORT_ANSWERS, running, num_processes=1, progress=lambda share, text: said.append(text)
    )


def test_what_runs_is_compared_with_the_two_best_by_estimate() -> None:
    said: list[str] = []
    running = disaggregated(1, 4, num_kv_blocks=5000)
    found = plan(running, said)
    simulated = [each for each in found.candidates if each.goodput is not None]
    assert len(simulated) == 3
    assert running in [each.layout for each in simulated]
    assert found.screening.num_layouts == 4
    assert all(pool.num_kv_blocks == 5000 for each in simulated for pool in each.layout.pools), "workers keep theirs"
    assert said[0] == "listing numbers of workers"
    assert len(said) > len(simulated)


def test_objectives_that_no_number_of_workers_meets_are_an_error() -> None:
    with pytest.raises(ValueError, match="the SLO is out of reach"):
        plan(disaggregated(1, 1), [], ttft_s=0.001)
