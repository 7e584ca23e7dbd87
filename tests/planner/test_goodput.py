from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest

from pdserve.contracts.deployment import SloConfig
from pdserve.planner.goodput import Trial, slowed
from pdserve.planner.layout import Layout, Pool
from tests.planner.stand_ins import H100, LLAMA_3_8B, SLO, PoissonWorkload, attain, colocated, disaggregated

SHORT = PoissonWorkload(1500, 20)


def a_trial(layout: Layout | None = None, slo: SloConfig = SLO, num_requests: int = 150) -> Trial:
    return Trial(model=LLAMA_3_8B, layout=layout or disaggregated(), slo=slo, num_requests=num_requests, seeds=(0, 1))


def test_finite_runs_take_each_objective_on_its_own() -> None:
    trial = replace(a_trial(colocated(2)), is_finite=True)
    judged = attain(trial, SHORT, 100.0)
    assert judged.num_counted == judged.num_requests
    assert judged.share == min(judged.ttft_share, judged.tpot_share)


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
