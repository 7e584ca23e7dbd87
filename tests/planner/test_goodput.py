from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest

from pdserve.contracts.deployment import SloConfig
from pdserve.planner.goodput import Trial, attain, find_goodput, slowed
from pdserve.planner.layout import Layout, Pool
from tests.planner.stand_ins import H100, LLAMA_3_8B, SLO, PoissonWorkload, colocated, disaggregated

SHORT = PoissonWorkload(1500, 20)


def a_trial(layout: Layout | None = None, slo: SloConfig = SLO, num_requests: int = 150) -> Trial:
    return Trial(model=LLAMA_3_8B, layout=layout or disaggregated(), slo=slo, num_requests=num_requests, seeds=(0, 1))


def test_the_goodput_meets_the_target_and_a_little_more_does_not() -> None:
    goodput = find_goodput(a_trial(), SHORT, 20.0, tolerance=0.05)
    assert goodput.at_rate is not None
    assert goodput.at_rate.share >= 0.9
    assert goodput.at_rate.num_requests == 300, "the answer is confirmed with all runs"
    assert [point.rate for point in goodput.points] == sorted(point.rate for point in goodput.points)
    above = [point for point in goodput.points if point.rate > goodput.rate]
    assert above
    assert not any(point.meets(0.9) for point in above)
    assert goodput.interval.low <= goodput.rate <= goodput.interval.high
    sure = [point.rate for point in goodput.points if point.interval.low >= 0.9]
    assert goodput.interval.low >= max(sure)
    assert goodput.rate_per_device == goodput.rate / 2
    assert goodput.requests_per_dollar(3.6) == pytest.approx(goodput.rate * 1000)


@pytest.mark.parametrize("start_rate", [2.0, 1000.0])
def test_any_start_leads_to_about_the_same_rate(start_rate: float) -> None:
    near = find_goodput(a_trial(), SHORT, 30.0, tolerance=0.05)
    far = find_goodput(a_trial(), SHORT, start_rate, tolerance=0.05)
    assert far.rate == pytest.approx(near.rate, rel=0.1)


def test_rates_that_are_too_high_are_given_up_early() -> None:
    whole = attain(a_trial(), SHORT, 100.0)
    given_up = attain(a_trial(), SHORT, 100.0, is_whole=False)
    assert (whole.is_partial, given_up.is_partial) == (False, True)
    assert given_up.num_requests < whole.num_requests / 2
    assert whole.share <= given_up.share < 0.9


def test_rates_that_are_clearly_met_are_passed_on_their_first_run() -> None:
    assert attain(a_trial(), SHORT, 5.0, is_whole=False).num_requests == 150


def test_an_slo_that_nothing_meets_has_no_goodput() -> None:
    goodput = find_goodput(a_trial(slo=SloConfig(ttft_seconds=1e-4, tpot_seconds=0.02)), SHORT, 10.0)
    assert goodput.rate == 0.0
    assert goodput.at_rate is None


def test_the_highest_rate_may_be_limited() -> None:
    goodput = find_goodput(a_trial(), SHORT, 4.0, max_rate=10.0)
    assert (goodput.rate, goodput.is_capped) == (10.0, True)


def test_an_slo_that_everything_meets_comes_to_an_end() -> None:
    """So few requests are served in time however fast they come."""
    goodput = find_goodput(a_trial(slo=SloConfig(ttft_seconds=1e3, tpot_seconds=1e3), num_requests=10), SHORT, 10.0)
    assert 10 < goodput.rate < 1e6


def test_finite_runs_take_each_objective_on_its_own() -> None:
    trial = replace(a_trial(colocated(2)), is_finite=True)
    judged = attain(trial, SHORT, 100.0)
    assert judged.num_counted == judged.num_requests
    assert judged.share == min(judged.ttft_share, judged.tpot_share)


def test_the_same_arguments_give_the_same_answer() -> None:
    first, second = (find_goodput(a_trial(colocated()), SHORT, 30.0) for _ in range(2))
    assert first == second


def test_a_slowed_cluster_is_one_of_slower_hardware() -> None:
    """Latencies of hardware that takes 1.25 times as long are those on a clock so much faster, times 1.25."""
    factor = 1.25
    slow = replace(
        H100,
        peak_flops=MappingProxyType({dtype: flops / factor for dtype, flops in H100.peak_flops.items()}),
        memory_bandwidth=H100.memory_bandwidth / factor,
        link_bandwidth=H100.link_bandwidth / factor,
        network_bandwidth=H100.network_bandwidth / factor,
        host_bandwidth=H100.host_bandwidth / factor,
        step_overhead_s=H100.step_overhead_s * factor,
        layer_overhead_s=H100.layer_overhead_s * factor,
    )

    def on_slow(pool: Pool | None) -> Pool | None:
        return None if pool is None else replace(pool, hardware=slow)

    trial = a_trial(num_requests=100)
    layout = trial.layout
    slow_layout = replace(layout, prefill=on_slow(layout.prefill), decode=on_slow(layout.decode))
    actual = attain(replace(trial, layout=slow_layout), SHORT, 30.0)
    predicted = attain(slowed(trial, factor), SHORT, 30.0 * factor)
    for percent in (10, 50, 90):
        assert actual.ttft.percentile(percent) == pytest.approx(predicted.ttft.percentile(percent) * factor, rel=0.02)
        assert actual.tpot.percentile(percent) == pytest.approx(predicted.tpot.percentile(percent) * factor, rel=0.02)
    assert actual.share == pytest.approx(predicted.share, abs=0.02)
