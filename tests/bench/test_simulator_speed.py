from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.bench.simulator_speed import Case, cases, measure


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_case_is_one_that_its_layout_can_serve(case: Case) -> None:
    """A simulator that only rejects would be fast."""
    result = measure(replace(case, num_requests=60), num_runs=2)
    assert result["num_requests"] == 60
    assert result["attainment"] > 0.9
    assert len(result["cpu_s"]) == 2
    assert result["simulated_requests_per_s"] == pytest.approx(60 / min(result["cpu_s"]), rel=0.1)
