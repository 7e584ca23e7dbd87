from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pdserve.bench import hybrids
from pdserve.planner.search.goodput import Trial

CAPACITY = {"4 x M(TP1)": 80.0, "2 x P(TP1) + 2 x D(TP1)": 100.0}


class CurveRunner:
    """A simulator by which layouts serve all requests up to their capacity, colocated ones half as many with chunks of
    other lengths than 512."""

    def __init__(self, workload: Any) -> None:
        pass

    def attainment(self, trial: Trial, rate: float) -> Any:
        capacity = CAPACITY.get(str(trial.layout), 60.0)
        if trial.layout.is_colocated and trial.layout.decode_pool.max_batch_tokens != 512:
            capacity /= 2
        return SimpleNamespace(share=1.0 if rate <= capacity else 0.4)


def compared(at_rate: float = 0.0) -> dict[str, Any]:
    return hybrids.compare("chat", 1.0, 100, at_rate, Console(quiet=True))


@pytest.fixture(autouse=True)
def _without_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrids, "Runner", CurveRunner)


def test_the_best_of_each_kind_is_found_and_hybrids_are_tried_at_the_best_rate_of_all() -> None:
    found = compared()
    assert found["colocated"]["layout"] == "4 x M(TP1), 512"
    assert found["colocated"]["rate"] == pytest.approx(80, rel=0.04)
    assert found["disaggregated"]["layout"] == "2 x P(TP1) + 2 x D(TP1), 512"
    assert found["disaggregated"]["rate"] <= 100 <= found["disaggregated"]["to"]
    assert found["hybrid"]["layout"] == "none"
    assert [*found["hybrid"]["attained"].values()] == [[0.4]] * 6


def test_a_better_hybrid_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CAPACITY, "1 x D(TP1) + 3 x M(TP1)", 130.0)
    found = compared()["hybrid"]
    assert (found["layout"], found["rate"]) == ("1 x D(TP1) + 3 x M(TP1), 512", pytest.approx(130, rel=0.04))


def test_at_a_rate_each_layout_is_served_with_both_draws() -> None:
    found = compared(at_rate=90.0)
    assert found["disaggregated"]["attained"] == {
        "3 x P(TP1) + 1 x D(TP1), 2048": [0.4, 0.4],
        "2 x P(TP1) + 2 x D(TP1), 2048": [1.0, 1.0],
        "1 x P(TP1) + 3 x D(TP1), 2048": [0.4, 0.4],
    }
    assert len(found["colocated"]["attained"]) == 3
