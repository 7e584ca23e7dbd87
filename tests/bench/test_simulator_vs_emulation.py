from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdserve.bench import simulator_vs_emulation
from pdserve.bench.cluster import RunningCluster
from pdserve.bench.policies import Setting
from pdserve.bench.simulator_vs_emulation import (
    LOGNORMAL,
    MODEL,
    SLO,
    Comparison,
    emulated_times,
    interpolated_goodput,
    invalid_reasons,
    slowed_layout,
    slowed_request,
)
from pdserve.contracts.deployment import DEFAULT_POLICY, SloConfig
from pdserve.loadgen.load import GeneratorHealth, Measurement
from pdserve.planner.simulate.simulator import NO_OVERHEADS, simulate
from pdserve.planner.workload.requests import SimulatedRequest
from tests.bench.test_agreement import some_times
from tests.planner.stand_ins import disaggregated

HEALTHY = GeneratorHealth(cpu_share=0.1, send_late_p99_s=0.001, send_late_max_s=0.002, loop_late_p99_s=0.001)


def test_measurements_that_do_not_count() -> None:
    times = some_times(np.full(3, 0.05), np.full(3, 0.005))
    good = Measurement(times=times, gap_s=np.zeros(1), errors=Counter(), ended_s=1.0, health=HEALTHY)
    assert invalid_reasons(good, 0.69, 0.49, 1.0) == []
    assert len(invalid_reasons(good, 0.71, 0.1, 1.0)) == 1
    assert len(invalid_reasons(good, 0.1, 0.51, 1.0)) == 1
    assert len(invalid_reasons(replace(good, errors=Counter({"gone": 2})), 0.1, 0.1, 1.0)) == 1
    assert len(invalid_reasons(replace(good, health=replace(HEALTHY, cpu_share=0.71)), 0.1, 0.1, 1.0)) == 1
    late = replace(good, health=replace(HEALTHY, loop_late_p99_s=0.02))
    assert len(invalid_reasons(late, 0.1, 0.1, 1.0)) == 1
    assert invalid_reasons(late, 0.1, 0.1, 10.0) == []


def test_goodput_is_where_attainment_last_falls_below_the_objective() -> None:
    def goodput(*attainments: float) -> float | None:
        results = [
            {"rate": 10.0 * (index + 1), "agreement": {"measured": {"attainment": attainment}}}
            for index, attainment in enumerate(attainments)
        ]
        return interpolated_goodput(results, "measured")

    assert goodput(1.0, 0.95, 0.85, 0.5) == pytest.approx(25.0)
    assert goodput(0.8, 0.92, 0.88) == pytest.approx(25.0)
    assert goodput(0.8, 0.7) is None
    assert goodput(1.0, 0.99) is None


def test_requests_are_slowed_and_their_times_emulated() -> None:
    """What a slowed cluster serves after other requests is as long, in its own seconds, as at full speed: by a policy
    that learns nothing from the other requests."""
    layout, scale, from_s = disaggregated(), 10.0, 700.0
    requests = LOGNORMAL.draw(40, max_model_len=MODEL.max_model_len).at_rate(30.0)
    requests[-1] = replace(requests[-1], follow_up=SimulatedRequest(0.5, 3000, 8))
    expected = simulate(MODEL, layout, requests, slo=SLO, overheads=NO_OVERHEADS, policy="least-time").times
    slow_slo = replace(SLO, ttft_seconds=SLO.ttft_seconds * scale, tpot_seconds=SLO.tpot_seconds * scale)
    before = [SimulatedRequest(0.0, 500, 5)]
    slow = simulate(
        MODEL,
        slowed_layout(layout, scale),
        before + [slowed_request(request, scale, from_s) for request in requests],
        slo=slow_slo,
        overheads=NO_OVERHEADS,
        policy="least-time",
    ).times
    found = emulated_times(slow, scale, from_s)
    assert len(found.ttft_s) == 41
    for name in ("arrived_s", "first_token_s", "last_token_s"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name))
    assert (found.num_output_tokens == expected.num_output_tokens).all()


def test_a_simulation_knows_what_the_cluster_has_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a cluster that is the simulator itself, which never starts anew, nothing differs."""
    scale = 10.0
    setting = Setting(workload=LOGNORMAL, layout=disaggregated(), ttft_s=0.15, tpot_s=0.01, rate=70.0, model=MODEL)
    served: list[SimulatedRequest] = []

    def serve(url: str, requests: list[SimulatedRequest], *, vocab_size: int, time_scale: float) -> Measurement:
        begins_s = served[-1].arrived_s + 100.0 if served else 0.0
        served.extend(slowed_request(request, time_scale, begins_s) for request in requests)
        slo = SloConfig(ttft_seconds=1.5, tpot_seconds=0.1)
        layout = slowed_layout(setting.layout, time_scale)
        slow = simulate(MODEL, layout, served, slo=slo, overheads=NO_OVERHEADS, policy=DEFAULT_POLICY).times
        times = emulated_times(slow, time_scale, begins_s)
        ended_s = float(times.last_token_s.max())
        return Measurement(times=times, gap_s=np.zeros(1), errors=Counter(), ended_s=ended_s, health=HEALTHY)

    monkeypatch.setattr(simulator_vs_emulation, "measure_load", serve)
    comparison = Comparison(RunningCluster(url="", admin_url="", pid=0, log=Path()), setting, scale)
    for seed in (1, 2):
        requests = LOGNORMAL.draw(60, seed, max_model_len=MODEL.max_model_len).at_rate(setting.rate)
        measured = comparison._measure(requests)
    simulated = comparison._simulate(NO_OVERHEADS)
    assert simulated.ttft_s == pytest.approx(measured.times.ttft_s)
    assert simulated.tpot_s == pytest.approx(measured.times.tpot_s)
    moved = comparison._simulate(replace(NO_OVERHEADS, arrival_s=1e-3), seed=1)
    assert 5e-4 < np.abs(moved.arrived_s - simulated.arrived_s).max() <= 1e-3
