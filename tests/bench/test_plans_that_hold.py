from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

pytest.importorskip("numba", reason="the search needs the planner's extra")

from pdserve.bench.models import DEEPSEEK_V3, GEMMA_3_27B
from pdserve.bench.plans_that_hold import CASES, judged, updated, what_holds
from pdserve.contracts.deployment import SloConfig
from pdserve.model.config.shape import ModelShape
from pdserve.planner.layout import PlannedModel
from pdserve.planner.simulate.attainment import Attainment, Interval, measure
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.requests import SimulatedRequest
from pdserve.planner.workload.traffic import fixed_traffic
from tests.model import planned_configs
from tests.planner.plans import MODEL, a_plan
from tests.planner.stand_ins import LLAMA_3_8B, colocated

RATE, HIGH, CLIFF = 10.0, 12.0, 15.0
STEADY = {10.0: 0.95, 12.0: 0.85, CLIFF / 1.05: 0.5, CLIFF * 1.05: 0.4}
"""Attainment by rate where all hold, for a target of 0.9."""


@cache
def an_attainment() -> Attainment:
    run = simulate(LLAMA_3_8B, colocated(), [SimulatedRequest(1.0, 10, 2)], slo=SloConfig())
    return measure(run, SloConfig(), 1.0)


def held(shares: dict[float, float], *, odd: tuple[float, float] = (0.0, 0.0), saturated: float = 0.0) -> list[bool]:
    """What holds of five seeds with equal shares but for the first seed's at the rate ``odd[0]``, which is ``odd[1]``;
    one run at the rate ``saturated`` is."""
    runs = {
        (rate, seed): replace(
            an_attainment(),
            share=odd[1] if (rate, seed) == (odd[0], 0) else share,
            is_saturated=(rate, seed) == (saturated, 0),
        )
        for rate, share in shares.items()
        for seed in range(5)
    }
    return list(what_holds(runs, RATE, Interval(RATE, HIGH), CLIFF, 0.9).values())


def test_a_plan_holds_if_four_of_five_seeds_meet_the_target() -> None:
    assert held(STEADY) == [True, True, True]
    assert held(STEADY, odd=(RATE, 0.8)) == [True, True, True]
    assert held({**STEADY, RATE: 0.89}) == [False, False, True]
    assert held(STEADY, saturated=RATE) == [True, False, True], "four of five, but the low end has no steady state"


def test_an_interval_holds_if_its_ends_enclose_the_target() -> None:
    assert held({**STEADY, HIGH: 0.91}) == [True, False, True]
    assert held({**STEADY, HIGH: 0.91}, saturated=HIGH) == [True, True, True]


@pytest.mark.parametrize(("factor", "share"), [(1 / 1.05, 0.44), (1.05, 0.46)])
def test_a_cliff_is_where_attainment_halves(factor: float, share: float) -> None:
    assert held({**STEADY, CLIFF * factor: share}) == [True, True, False]


def test_the_judge_serves_the_winner_at_each_rate_with_each_seed() -> None:
    traffic = fixed_traffic(200, 3, max_model_len=MODEL.max_model_len)
    few, many = (judged(run, plan=a_plan(), traffic=traffic, num_requests=100) for run in ((1.0, 3), (400.0, 3)))
    assert (few.num_requests, few.share, few.rate) == (100, 1.0, 1.0)
    assert many.ttft.percentile(90) > few.ttft.percentile(90)
    assert judged((400.0, 4), plan=a_plan(), traffic=traffic, num_requests=100) != many


def test_cases_are_named_and_differ() -> None:
    names = [str(case) for case in CASES]
    assert len(set(names)) == len(CASES) >= 20
    assert "Llama-3-8B on 8 x l40s, chat, fewest-devices for 20/s" in names


def test_a_result_keeps_the_rows_of_cases_that_did_not_run_again() -> None:
    def row(case: str, *, holds: bool) -> dict[str, object]:
        return {"case": case, "holds": holds, "interval_holds": True, "cliff_holds": False}

    earlier = [row("2 chat", holds=False), row("10 code", holds=True)]
    result = updated(earlier, [row("2 chat on L40S", holds=True), row("1 agent", holds=False)])
    assert [each["case"] for each in result["cases"]] == ["1 agent", "2 chat on L40S", "10 code"]
    assert {name: value for name, value in result.items() if name != "cases"} == {
        "num_holds": 2,
        "num_interval_holds": 3,
        "num_cliff_holds": 0,
        "num_cases": 3,
    }


@pytest.mark.parametrize(
    ("model", "config"), [(GEMMA_3_27B, planned_configs.GEMMA_3_27B), (DEEPSEEK_V3, planned_configs.DEEPSEEK_V3)]
)
def test_models_have_the_shapes_of_their_published_configs(model: PlannedModel, config: dict[str, Any]) -> None:
    assert model.shape == ModelShape.from_hf_config(config)
