from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("numba", reason="the scout needs the planner's extra")

from pdserve.bench import plan_looks
from pdserve.bench.plan_looks import CASES, Scouted, decisions
from pdserve.planner.simulate.attainment import Attainment


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_looks, "_LONG", 5000)
    monkeypatch.setattr(plan_looks, "_LONG_SEEDS", range(1000, 1002))
    monkeypatch.setattr(plan_looks, "SHARES", (0.7, 0.97, 1.4))


def test_runs_that_end_early_decide_as_long_ones_do_away_from_the_goodput() -> None:
    found = decisions(CASES[0], num_seeds=2)
    assert found["num_right"] == 4
    assert "num_wrong" not in found
    assert sum(found.get(f"num_{outcome}_near", 0) for outcome in ("right", "wrong", "undecided")) == 2
    assert found["requests_per_run"] < 8000


def test_wrong_decisions_are_counted_with_their_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = Scouted.decided

    def opposite(self: Scouted, rate: float, residence_s: float, seed: int) -> tuple[Attainment, bool]:
        seen, is_sure = decided(self, rate, residence_s, seed)
        return replace(seen, interval=seen.interval._replace(low=1 - seen.interval.low)), is_sure

    monkeypatch.setattr(Scouted, "decided", opposite)
    found = decisions(CASES[0], num_seeds=1)
    assert found["num_wrong"] >= 1
    assert 0.7 in found["wrong_at"]
