from __future__ import annotations

import pytest

pytest.importorskip("numba", reason="the scout needs the planner's extra")

from pdserve.bench import plan_looks
from pdserve.bench.plan_looks import CASES, Scouted, row
from pdserve.planner.search.goodput import Goodput
from pdserve.planner.simulate.attainment import Interval


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_looks, "_LONG", 5000)
    monkeypatch.setattr(plan_looks, "_LONG_SEEDS", range(1000, 1002))


def test_a_search_states_the_rate_of_long_runs() -> None:
    found = row(CASES[0], range(1))
    assert (found["num_searches"], found["num_low"], found["num_high"]) == (1, 0, 0)
    assert found["requests_per_search"] > 4000


@pytest.mark.parametrize(("factor", "field"), [(0.9, "num_low"), (1.1, "num_high")])
def test_rates_that_are_stated_too_low_or_too_high_are_counted(
    factor: float, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def searched(self: Scouted, goodput: float, residence_s: float, seed: int) -> Goodput:
        rate = factor * goodput
        return Goodput(rate=rate, interval=Interval(rate, rate), target=0.9, num_devices=4, points=())

    monkeypatch.setattr(Scouted, "searched", searched)
    monkeypatch.setattr(Scouted, "goodput", lambda self: (80.0, 5.0))
    assert row(CASES[0], range(1))[field] == 1
