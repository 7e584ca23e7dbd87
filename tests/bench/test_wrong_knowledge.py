from __future__ import annotations

from pdserve.bench.policies import SETTINGS
from pdserve.bench.wrong_knowledge import Case, attainment


def test_only_the_judged_requests_count() -> None:
    """Those before them do not: here they are longer than the model takes."""
    setting = next(setting for setting in SETTINGS if setting.workload.name == "uniform")
    assert attainment(setting, "goodput", Case(length_factor=1000.0), 20, 0, num_first=30) == 1.0
