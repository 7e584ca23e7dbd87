from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdserve.bench.agreement import Agreement, figures_of
from pdserve.contracts.deployment import SloConfig
from pdserve.planner.arrays import FloatArray
from pdserve.planner.simulate.simulation import RequestTimes

SLO = SloConfig(ttft_seconds=0.1, tpot_seconds=0.01)
FIGURES = {"attainment": 0.9, "ttft_p50_s": 0.05, "ttft_p90_s": 0.1, "tpot_p50_s": 0.007, "tpot_p90_s": 0.008}


def some_times(ttft_s: FloatArray, tpot_s: FloatArray, num_tokens: int = 101) -> RequestTimes:
    arrived_s = np.linspace(0, 1, len(ttft_s))
    count = np.full(len(ttft_s), num_tokens)
    return RequestTimes(
        arrived_s=arrived_s,
        started_s=arrived_s,
        first_token_s=arrived_s + ttft_s,
        second_token_s=arrived_s + ttft_s,
        last_token_s=arrived_s + ttft_s + tpot_s * (num_tokens - 1),
        num_prompt_tokens=count,
        num_cached_tokens=0 * count,
        num_output_tokens=count,
        is_rejected=np.zeros(len(ttft_s), np.bool_),
    )


def test_requests_are_within_objectives_that_scale_unless_rejected() -> None:
    times = some_times(
        np.array([0.5, 1.5, 0.5, np.nan]) * SLO.ttft_seconds, np.array([0.5, 0.5, 1.5, 0.5]) * SLO.tpot_seconds
    )
    assert times.are_within(SLO).tolist() == [True, False, False, False]
    assert times.are_within(SLO, 2.0).tolist() == [True, True, True, False]
    rejected = replace(times, is_rejected=np.array([True, False, False, True]))
    assert rejected.are_within(SLO, 2.0).tolist() == [False, True, True, False]


def test_figures_of_known_arrays() -> None:
    ttft_s, tpot_s = np.linspace(0, 0.2, 101), np.linspace(0.02, 0, 101)
    figures = figures_of(some_times(ttft_s, tpot_s), SLO)
    assert figures["attainment"] == pytest.approx(1 / 101)  # only the one in the middle meets both
    assert (figures["ttft_p50_s"], figures["ttft_p90_s"]) == pytest.approx((0.1, 0.18))
    assert (figures["tpot_p50_s"], figures["tpot_p90_s"]) == pytest.approx((0.01, 0.018))


def test_what_never_ended_misses() -> None:
    figures = figures_of(some_times(np.array([0.05, 0.05, np.nan]), np.array([0.005, np.nan, np.nan])), SLO)
    assert figures["attainment"] == pytest.approx(1 / 3)
    assert figures["ttft_p90_s"] == pytest.approx(0.05)


def test_equal_figures_agree() -> None:
    assert Agreement(measured=FIGURES, simulated=FIGURES).failures() == []


@pytest.mark.parametrize("name", ["ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "tpot_p90_s"])
@pytest.mark.parametrize("factor", [0.94, 1.06])
def test_each_percentile_must_agree_but_past_saturation(name: str, factor: float) -> None:
    simulated = {**FIGURES, name: FIGURES[name] * factor}
    agreement = Agreement(measured=FIGURES, simulated=simulated)
    (failure,) = agreement.failures()
    assert failure.startswith(name.removesuffix("_s"))
    assert ("+" in failure) == (factor > 1)
    assert not agreement.failures(attainment_only=True)


@pytest.mark.parametrize(("attainment", "agrees"), [(0.92, True), (0.88, True), (0.925, False), (0.875, False)])
def test_attainment_must_agree_everywhere(attainment: float, agrees: bool) -> None:
    simulated = {**FIGURES, "attainment": attainment}
    agreement = Agreement(measured=FIGURES, simulated=simulated)
    assert (not agreement.failures()) == agrees
    assert (not agreement.failures(attainment_only=True)) == agrees


def test_what_was_not_measured_does_not_agree() -> None:
    measured = {**FIGURES, "tpot_p50_s": float("nan")}
    assert len(Agreement(measured=measured, simulated=FIGURES).failures()) == 1
