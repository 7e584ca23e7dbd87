from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from pdserve.bench.load import GeneratorHealth, Measurement
from pdserve.bench.simulator_vs_emulation import (
    LOGNORMAL,
    MODEL,
    SLO,
    emulated_times,
    interpolated_goodput,
    invalid_reasons,
    slowed_layout,
    slowed_request,
)
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
    """What a slowed cluster serves after other requests is as long, in its own seconds, as at full speed."""
    layout, scale, from_s = disaggregated(), 10.0, 700.0
    requests = LOGNORMAL.draw(40, max_model_len=MODEL.max_model_len).at_rate(30.0)
    requests[-1] = replace(requests[-1], follow_up=SimulatedRequest(0.5, 3000, 8))
    expected = simulate(MODEL, layout, requests, slo=SLO, overheads=NO_OVERHEADS).times
    slow_slo = replace(SLO, ttft_seconds=SLO.ttft_seconds * scale, tpot_seconds=SLO.tpot_seconds * scale)
    before = [SimulatedRequest(0.0, 500, 5)]
    slow = simulate(
        MODEL,
        slowed_layout(layout, scale),
        before + [slowed_request(request, scale, from_s) for request in requests],
        slo=slow_slo,
        overheads=NO_OVERHEADS,
    ).times
    found = emulated_times(slow, scale, from_s)
    assert len(found.ttft_s) == 41
    for name in ("arrived_s", "first_token_s", "last_token_s"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name))
    assert (found.num_output_tokens == expected.num_output_tokens).all()
