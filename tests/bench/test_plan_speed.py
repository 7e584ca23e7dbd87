from __future__ import annotations

from pdserve.bench.plan_speed import measure
from pdserve.planner.search.plan import Effort


def test_a_plan_is_timed_and_counted() -> None:
    effort = Effort(screen_requests=200, final_requests=200, num_screened=2, num_finalists=1)
    result = measure(1, 1, "humaneval-synthetic", effort, devices_per_node=4)
    assert result["devices"] == 4
    assert result["simulated_layouts"] >= 1
    assert result["simulated_requests"] > 0
    assert result["elapsed_s"] > 0
    assert result["requests_per_s"] > 0
