from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import slowed
from pdserve.planner.layout import Layout
from pdserve.planner.search.goodput import Trial
from pdserve.planner.search.sensitivity import TIME_FACTORS, search_saturation, search_sensitivity
from pdserve.planner.simulate.attainment import Attainment
from tests.planner.search.searches import carried_out, find_goodput
from tests.planner.search.test_goodput import TRIAL, CurveRunner, falling
from tests.planner.stand_ins import H100, LLAMA_3_8B, a_pool, disaggregated


class SlowedRunner(CurveRunner):
    """Attains in proportion to the speed of the decode workers."""

    def attainment(self, trial: Trial, rate: float) -> Attainment:
        usual_s, step_s = (
            layout.decode_pool.cost(LLAMA_3_8B).decode_s(1, 1000) for layout in (TRIAL.layout, trial.layout)
        )
        return replace(super().attainment(trial, rate * step_s / usual_s), rate=rate)


def test_a_winner_saturates_where_half_is_attained_and_serves_more_the_faster_it_is() -> None:
    share = falling(10.0)
    runner = SlowedRunner(share)
    goodput = find_goodput(runner, TRIAL, 9.0)
    saturation_rate = carried_out(search_saturation(TRIAL, goodput), runner)
    num_runs = runner.num_runs
    assert share(saturation_rate / 1.05) > 0.45 > share(1.05 * saturation_rate)
    assert carried_out(search_saturation(TRIAL, goodput), runner) == saturation_rate
    assert runner.num_runs - num_runs <= 3
    faster, slower = (carried_out(search_sensitivity(TRIAL, goodput, each), runner) for each in TIME_FACTORS)
    assert (faster.time_factor, slower.time_factor) == (0.9, 1.1)
    assert faster.rate == pytest.approx(goodput.rate / 0.9, rel=0.05)
    assert slower.rate == pytest.approx(goodput.rate / 1.1, rel=0.05)


def test_every_device_of_a_slower_layout_is_slower() -> None:
    slow = Layout(
        prefill=replace(a_pool(WorkerRole.PREFILL), hardware=slowed(H100, 1.1)),
        decode=replace(a_pool(WorkerRole.DECODE), hardware=slowed(H100, 1.1)),
    )
    assert disaggregated().slowed(1.1) == slow
