from __future__ import annotations

import pytest

from pdserve.bench.kernels.plot import bars
from tests.bench.kernels.test_report import result


def test_bars_stand_at_the_shapes_that_a_contender_ran() -> None:
    results = [
        result("gate", "1", pdserve=2e-3, torch=4e-3),
        result("gate", "64", pdserve=1e-3),
        result("gate", "256", pdserve=4e-3, torch=8e-3),
    ]
    assert bars(results, "pdserve").rows == [0, 1, 2]
    assert bars(results, "torch").rows == [0, 2]
    assert bars(results, "torch").percents == [pytest.approx(25), pytest.approx(12.5)]
