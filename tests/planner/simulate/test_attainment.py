from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner.simulate.attainment import NUM_LOOKS, Distribution, measure, seems_over, warm_up_s
from pdserve.planner.simulate.simulation import RequestTimes, Simulation, WorkerUse

SLO = SloConfig(ttft_seconds=1.0, tpot_seconds=0.1)


def a_run(
    ttft_s: list[float], tpot_s: list[float], *, gap_s: float = 10.0, is_rejected: list[bool] | None = None
) -> Simulation:
    """Answers of 11 tokens to requests ``gap_s`` apart; NaN is what never came."""
    arrived_s = gap_s * np.arange(len(ttft_s), dtype=np.float64)
    first_s = arrived_s + np.array(ttft_s)
    last_s = first_s + 10 * np.array(tpot_s)
    counts = np.full(len(ttft_s), 100)
    times = RequestTimes(
        arrived_s=arrived_s,
        started_s=arrived_s,
        first_token_s=first_s,
        second_token_s=first_s,
        last_token_s=last_s,
        num_prompt_tokens=counts,
        num_cached_tokens=0 * counts,
        num_output_tokens=counts // 9,
        is_rejected=np.array(is_rejected or [False] * len(ttft_s)),
    )
    worker = WorkerUse(
        worker_id="m",
        role=WorkerRole.MIXED,
        busy_s=5.0,
        held_block_s=125.0,
        num_steps=100,
        num_prefill_tokens=0,
        num_decode_tokens=250,
        num_preemptions=3,
        num_kv_blocks=10,
        num_pulls=8,
        num_network_pulls=2,
    )
    return Simulation(
        times=times, workers=[worker], gap_s=np.array([0.2, 0.1]), gap_weights=np.array([1.0, 3.0]), ended_s=50.0
    )


def test_both_objectives_count_jointly_and_each_on_its_own() -> None:
    run = a_run([0.5, 2.0, 0.5, 0.5, np.nan], [0.05, 0.05, 0.2, 0.05, np.nan])
    judged = measure(run, SLO, 0.1)
    # The first two arrived in the warm-up, 40 % of 40 s.
    assert judged.num_counted == 3
    assert judged.share == pytest.approx(1 / 3)
    assert judged.ttft_share == pytest.approx(2 / 3)
    assert judged.tpot_share == pytest.approx(1 / 3)
    assert judged.binding_slo == "tpot"


def test_what_is_rejected_or_never_ends_is_missed() -> None:
    run = a_run([0.5] * 4 + [np.nan], [0.05] * 4 + [np.nan], is_rejected=[False] * 4 + [True])
    judged = measure(run, SLO, 0.1)
    assert judged.share == pytest.approx(3 / 4), "the first arrived in the warm-up"
    assert judged.num_rejected == 1
    assert judged.ttft.percentile(100) == float("inf")


def test_the_warm_up_is_ten_residence_times_within_a_share_of_the_run() -> None:
    arrived_s = np.array([5.0, 1005.0])
    assert warm_up_s(arrived_s, 2.0) == pytest.approx(20.0)
    assert warm_up_s(arrived_s, 200.0) == pytest.approx(400.0)


def test_use_of_workers_is_told_by_role() -> None:
    run = a_run([0.5] * 4, [0.05] * 4)
    (use,) = measure(run, SLO, 0.1).pools
    assert (use.role, use.num_preemptions, use.network_share) == (WorkerRole.MIXED, 3, 0.25)
    assert use.busy_share == pytest.approx(5.0 / 50.0)
    assert use.mean_batch_size == pytest.approx(2.5)
    assert use.kv_share == pytest.approx(125.0 / (10 * 50.0))


def test_gaps_are_weighted() -> None:
    judged = measure(a_run([0.5] * 4, [0.05] * 4), SLO, 0.1)
    assert judged.itl.percentile(50) == 0.1
    assert judged.itl.percentile(90) == 0.2
    assert np.isnan(Distribution(()).percentile(50))


def test_a_longer_run_narrows_the_interval() -> None:
    random = np.random.default_rng(0)

    def width(num_requests: int) -> float:
        ttft_s = np.where(random.random(num_requests) < 0.9, 0.5, 2.0)
        low, high = measure(a_run(list(ttft_s), [0.05] * num_requests), SLO, 0.1).interval
        return high - low

    assert width(1600) < 0.6 * width(200)


@settings(max_examples=50)
@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_the_interval_holds_the_share_and_is_never_a_point(met: list[bool]) -> None:
    run = a_run([0.5 if each else 2.0 for each in met], [0.05] * len(met))
    judged = measure(run, SLO, 0.1)
    assert 0.0 <= judged.interval.low <= judged.share <= judged.interval.high <= 1.0
    assert judged.interval.low < judged.interval.high


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    random = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        run = a_run(list(np.where(random.random(400) < 0.9, 0.5, 2.0)), [0.05] * 400)
        interval = measure(run, SLO, 0.1).interval
        held += interval.low <= 0.9 <= interval.high
    assert held >= 180


def growing(growth_s: float, num_requests: int = 900) -> Simulation:
    """Requests 10 s apart, each of which takes ``growth_s`` longer than the one before."""
    return a_run([1.0 + growth_s * n for n in range(num_requests)], [0.01] * num_requests)


def test_a_run_whose_latencies_grow_is_saturated_whatever_it_attains() -> None:
    patient = SloConfig(ttft_seconds=1000.0, tpot_seconds=1.0)
    steady, drifting = (measure(growing(growth_s), patient, 0.1) for growth_s in (0.0, 0.02))
    assert (steady.share, drifting.share) == (1.0, 1.0)
    assert (steady.is_saturated, drifting.is_saturated) == (False, True)
    assert steady.meets(0.9)
    assert not drifting.meets(0.9)
    assert not drifting.surely_meets(0.9)


def test_a_run_whose_answers_lag_behind_is_saturated() -> None:
    """Every tenth answer of the second half never comes."""
    ttft_s = [np.nan if n > 450 and n % 10 == 0 else 1.0 for n in range(900)]
    assert measure(a_run(ttft_s, [0.01] * 900), SLO, 0.1).is_saturated


def test_a_run_too_short_for_a_steady_state_is_not_called_saturated() -> None:
    assert not measure(growing(20.0, 20), SLO, 0.1).is_saturated


def test_several_looks_at_a_run_are_stricter_than_one() -> None:
    random = np.random.default_rng(0)
    run = a_run(list(np.where(np.repeat(random.random(40) < 0.7, 10), 0.5, 2.0)), [0.05] * 400)
    one, several = (measure(run, SLO, 0.1, num_looks=num).interval for num in (1, NUM_LOOKS))
    assert (one.high - one.low) * 2.685 / 2.262 == pytest.approx(several.high - several.low, rel=0.01)


@pytest.mark.parametrize(
    ("met_share", "unknown_share", "is_over"),
    [(1.0, 0.2, True), (0.3, 0.2, True), (0.9, 0.2, False), (1.0, 0.7, True)],
)
def test_a_run_seems_over_by_the_requests_that_ended(met_share: float, unknown_share: float, is_over: bool) -> None:
    """Those in flight, which have token 0 but not the last one, say nothing."""
    random = np.random.default_rng(2)
    times = a_run(list(np.where(random.random(900) < met_share, 0.5, 2.0)), [0.05] * 900).times
    in_flight = random.random(900) < unknown_share
    unknown = replace(times, last_token_s=np.where(in_flight, np.nan, times.last_token_s))
    assert seems_over(unknown, float(times.arrived_s[-1]), SLO) is is_over


def test_a_run_seems_missed_while_prompts_wait_for_longer_than_they_may() -> None:
    times = a_run([0.5] * 100 + [np.nan] * 800, [0.05] * 900).times
    assert seems_over(times, float(times.arrived_s[-1]), SLO)


def test_a_run_seems_over_that_would_not_be_sure_if_it_were_longer() -> None:
    random = np.random.default_rng(2)
    times = a_run(list(np.where(random.random(900) < 0.92, 0.5, 2.0)), [0.05] * 900).times
    now_s = float(times.arrived_s[-1])
    assert [seems_over(times, now_s, SLO, growth=growth) for growth in (1.5, 100.0)] == [True, False]
