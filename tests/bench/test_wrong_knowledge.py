from __future__ import annotations

from pdserve.bench.policies import SETTINGS
from pdserve.bench.wrong_knowledge import CASES, attainment


def test_only_the_judged_requests_count() -> None:
    """Long answers before them do not."""
    setting = next(setting for setting in SETTINGS if setting.workload.name == "uniform")
    assert attainment(setting, "goodput", CASES["long"], 20, 0, num_first=30) == 1.0
