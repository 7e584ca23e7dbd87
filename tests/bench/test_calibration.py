from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdserve.bench import simulator_vs_emulation
from pdserve.bench.calibration import overheads_between, pipelined_overheads, saturation
from pdserve.bench.simulator_vs_emulation import LOGNORMAL, MODEL
from pdserve.planner.simulate.simulation import RequestTimes
from pdserve.planner.simulate.simulator import NO_OVERHEADS, Overheads, simulate
from pdserve.planner.workload.requests import SimulatedRequest
from tests.planner.stand_ins import disaggregated

LAYOUT = disaggregated()
SLO = replace(simulator_vs_emulation.SLO, tpot_seconds=0.0)
"""Every prompt is handed off: its pull delays no answer too much."""
PROBES = [SimulatedRequest(0.15 * number, 100 + 80 * number, 3) for number in range(10)]


@pytest.fixture(scope="module")
def saturating() -> float:
    """A rate that the layout just serves."""
    return saturation(MODEL, LAYOUT, LOGNORMAL, SLO)


def test_overheads_explain_what_simulated_requests_lack() -> None:
    """Measured here is another simulation, so that the truth is known."""
    bare = simulate(MODEL, LAYOUT, PROBES, slo=SLO, overheads=NO_OVERHEADS).times
    late = replace(
        bare,
        **{
            name: getattr(bare, name) + delay_s
            for name, delay_s in (("first_token_s", 0.006), ("second_token_s", 0.016), ("last_token_s", 0.016))
        },
    )
    found = overheads_between(late, bare)
    assert (found.arrival_s, found.message_s, found.answer_s) == pytest.approx((0.004, 0.001, 0.001))
    assert found.pull_s == pytest.approx(0.01)
    again = simulate(MODEL, LAYOUT, PROBES, slo=SLO, overheads=found).times
    assert again.ttft_s == pytest.approx(late.ttft_s)
    assert np.median(again.second_token_s - late.second_token_s) == pytest.approx(0, abs=0.002)


def test_turns_are_told_from_prompts_that_waited_for_a_step(saturating: float) -> None:
    probes = LOGNORMAL.draw(150).at_rate(0.4 * saturating)

    def simulated(overheads: Overheads) -> RequestTimes:
        return simulate(MODEL, LAYOUT, probes, slo=SLO, overheads=overheads).times

    truth = Overheads(arrival_s=4e-4, message_s=1e-4, answer_s=1e-4, pull_s=2e-4, turn_s=1e-3)
    found = pipelined_overheads(simulated(truth), simulated)
    assert (found.arrival_s, found.turn_s) == pytest.approx((truth.arrival_s, truth.turn_s), rel=0.1)
    assert pipelined_overheads(simulated(replace(truth, turn_s=0.0)), simulated).turn_s < 2e-5


def test_turns_cannot_be_told_where_nobody_waits() -> None:
    def simulated(overheads: Overheads) -> RequestTimes:
        return simulate(MODEL, LAYOUT, PROBES, slo=SLO, overheads=overheads).times

    with pytest.raises(ValueError, match="rate"):
        pipelined_overheads(simulated(NO_OVERHEADS), simulated)


def test_a_cluster_keeps_up_below_saturation_and_not_beyond(saturating: float) -> None:
    sample = LOGNORMAL.draw(900)
    for share, keeps_up in ((0.9, True), (1.2, False)):
        times = simulate(MODEL, LAYOUT, sample.at_rate(share * saturating), slo=SLO).times
        residence_s = times.last_token_s - times.arrived_s
        early, late = np.median(residence_s[200:400]), np.median(residence_s[-200:])
        assert (late < 1.2 * early) == keeps_up
