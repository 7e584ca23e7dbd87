from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from pdserve.bench.load import GeneratorHealth, Measurement
from pdserve.bench.simulator_vs_emulation import interpolated_goodput, invalid_reasons
from tests.bench.test_agreement import some_times

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
