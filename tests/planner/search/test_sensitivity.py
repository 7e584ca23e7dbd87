from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import slowed
from pdserve.planner.layout import Layout
from pdserve.planner.search.goodput import Runner, find_goodput
from pdserve.planner.search.sensitivity import SensitivityAnalysis
from tests.planner.search.test_goodput import SHORT, a_trial
from tests.planner.stand_ins import H100, a_pool


def test_figures_are_ratios_of_runs_of_one_seed() -> None:
    trial, runner = a_trial(), Runner(SHORT)
    one = replace(trial, seeds=trial.seeds[:1])
    rate = find_goodput(runner, trial, 30.0).rate
    analysis = SensitivityAnalysis(trial, rate)
    saturation_rate, sensitivity = analysis.results([job(runner) for job in analysis.jobs])
    assert saturation_rate is not None
    assert runner.attainment(trial, saturation_rate).share >= trial.slo.attainment / 2
    assert runner.attainment(trial, 1.05 * saturation_rate).share < trial.slo.attainment / 2
    faster, slower = sensitivity
    assert (faster.time_factor, slower.time_factor) == (0.9, 1.1)
    assert faster.rate > 1.05 * rate
    assert slower.rate < 0.95 * rate
    slow = Layout(
        prefill=replace(a_pool(WorkerRole.PREFILL), hardware=slowed(H100, 1.1)),
        decode=replace(a_pool(WorkerRole.DECODE), hardware=slowed(H100, 1.1)),
    )
    by_hand = find_goodput(runner, replace(one, layout=slow), 30.0).rate / find_goodput(runner, one, 30.0).rate * rate
    assert slower.rate == pytest.approx(by_hand, rel=0.05)


def test_a_winner_that_one_seed_never_meets_has_no_figures() -> None:
    hopeless = a_trial(slo=SloConfig(ttft_seconds=1e-4, tpot_seconds=1e-4))
    analysis = SensitivityAnalysis(hopeless, 30.0)
    assert analysis.results([job(Runner(SHORT)) for job in analysis.jobs]) == (None, ())
