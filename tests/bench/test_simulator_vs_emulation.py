from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdserve.bench import simulator_vs_emulation
from pdserve.bench.cluster import RunningCluster
from pdserve.bench.policies import Setting
from pdserve.bench.simulator_vs_emulation import (
    LOGNORMAL,
    MODEL,
    SLO,
    Comparison,
    Observed,
    compared,
    emulated_times,
    failures,
    figures_of,
    interpolated_goodput,
    invalid_reasons,
    overheads_between,
    pipelined_overheads,
    saturation,
    slowed_request,
)
from pdserve.contracts.deployment import DEFAULT_POLICY, SloConfig
from pdserve.loadgen.load import GeneratorHealth, Measurement
from pdserve.planner.arrays import FloatArray
from pdserve.planner.simulate.simulation import RequestTimes
from pdserve.planner.simulate.simulator import NO_OVERHEADS, Overheads, simulate
from pdserve.planner.workload.requests import SimulatedRequest
from tests.planner.stand_ins import disaggregated

HEALTHY = GeneratorHealth(cpu_share=0.1, send_late_p99_s=0.001, send_late_max_s=0.002, loop_late_p99_s=0.001)

OBJECTIVES = SloConfig(ttft_seconds=0.1, tpot_seconds=0.01)
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
        np.array([0.5, 1.5, 0.5, np.nan]) * OBJECTIVES.ttft_seconds,
        np.array([0.5, 0.5, 1.5, 0.5]) * OBJECTIVES.tpot_seconds,
    )
    assert times.are_within(OBJECTIVES).tolist() == [True, False, False, False]
    assert times.are_within(OBJECTIVES, 2.0).tolist() == [True, True, True, False]
    rejected = replace(times, is_rejected=np.array([True, False, False, True]))
    assert rejected.are_within(OBJECTIVES, 2.0).tolist() == [False, True, True, False]


def test_figures_of_known_arrays() -> None:
    ttft_s, tpot_s = np.linspace(0, 0.2, 101), np.linspace(0.02, 0, 101)
    figures = figures_of(some_times(ttft_s, tpot_s), OBJECTIVES)
    assert figures["attainment"] == pytest.approx(1 / 101)  # only the one in the middle meets both
    assert (figures["ttft_p50_s"], figures["ttft_p90_s"]) == pytest.approx((0.1, 0.18))
    assert (figures["tpot_p50_s"], figures["tpot_p90_s"]) == pytest.approx((0.01, 0.018))


def test_what_never_ended_misses() -> None:
    figures = figures_of(some_times(np.array([0.05, 0.05, np.nan]), np.array([0.005, np.nan, np.nan])), OBJECTIVES)
    assert figures["attainment"] == pytest.approx(1 / 3)
    assert figures["ttft_p90_s"] == pytest.approx(0.05)


def test_equal_figures_agree() -> None:
    assert failures(compared(FIGURES, FIGURES)) == []


@pytest.mark.parametrize("name", ["ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "tpot_p90_s"])
@pytest.mark.parametrize("factor", [0.94, 1.06])
def test_each_percentile_must_agree_but_past_saturation(name: str, factor: float) -> None:
    simulated = {**FIGURES, name: FIGURES[name] * factor}
    agreement = compared(FIGURES, simulated)
    (failure,) = failures(agreement)
    assert failure.startswith(name.removesuffix("_s"))
    assert ("+" in failure) == (factor > 1)
    assert not failures(agreement, attainment_only=True)


@pytest.mark.parametrize(("attainment", "agrees"), [(0.92, True), (0.88, True), (0.925, False), (0.875, False)])
def test_attainment_must_agree_everywhere(attainment: float, agrees: bool) -> None:
    simulated = {**FIGURES, "attainment": attainment}
    agreement = compared(FIGURES, simulated)
    assert (not failures(agreement)) == agrees
    assert (not failures(agreement, attainment_only=True)) == agrees


def test_what_was_not_measured_does_not_agree() -> None:
    measured = {**FIGURES, "tpot_p50_s": float("nan")}
    assert len(failures(compared(measured, FIGURES))) == 1


LAYOUT = disaggregated()
HANDED_OFF = replace(SLO, tpot_seconds=0.0)
"""Every prompt is handed off: its pull delays no answer too much."""
PROBES = [SimulatedRequest(0.15 * number, 100 + 80 * number, 3) for number in range(10)]


@pytest.fixture(scope="module")
def saturating() -> float:
    """A rate that the layout just serves."""
    return saturation(MODEL, LAYOUT, LOGNORMAL, HANDED_OFF)


def test_overheads_explain_what_simulated_requests_lack() -> None:
    """Measured here is another simulation, so that the truth is known."""
    bare = simulate(MODEL, LAYOUT, PROBES, slo=HANDED_OFF, overheads=NO_OVERHEADS).times
    late = replace(
        bare,
        **{
            name: getattr(bare, name) + delay_s
            for name, delay_s in (("first_token_s", 0.006), ("second_token_s", 0.016), ("last_token_s", 0.016))
        },
    )
    found = overheads_between(late, bare)
    assert (found.arrival_s, found.message_s, found.answer_s) == pytest.approx((0.004, 0.001, 0.001))
    assert found.pull_s == pytest.approx(0.01)
    again = simulate(MODEL, LAYOUT, PROBES, slo=HANDED_OFF, overheads=found).times
    assert again.ttft_s == pytest.approx(late.ttft_s)
    assert np.median(again.second_token_s - late.second_token_s) == pytest.approx(0, abs=0.002)


def test_turns_are_told_from_prompts_that_waited_for_a_step(saturating: float) -> None:
    probes = LOGNORMAL.draw(150).at_rate(0.4 * saturating)

    def simulated(overheads: Overheads) -> RequestTimes:
        return simulate(MODEL, LAYOUT, probes, slo=HANDED_OFF, overheads=overheads).times

    truth = Overheads(arrival_s=4e-4, message_s=1e-4, answer_s=1e-4, pull_s=2e-4, turn_s=1e-3)
    found = pipelined_overheads(simulated(truth), simulated)
    assert (found.arrival_s, found.turn_s) == pytest.approx((truth.arrival_s, truth.turn_s), rel=0.1)
    assert pipelined_overheads(simulated(replace(truth, turn_s=0.0)), simulated).turn_s < 2e-5


def test_turns_cannot_be_told_where_nobody_waits() -> None:
    def simulated(overheads: Overheads) -> RequestTimes:
        return simulate(MODEL, LAYOUT, PROBES, slo=HANDED_OFF, overheads=overheads).times

    with pytest.raises(ValueError, match="rate"):
        pipelined_overheads(simulated(NO_OVERHEADS), simulated)


def test_a_cluster_keeps_up_below_saturation_and_not_beyond(saturating: float) -> None:
    sample = LOGNORMAL.draw(900)
    for share, keeps_up in ((0.9, True), (1.2, False)):
        times = simulate(MODEL, LAYOUT, sample.at_rate(share * saturating), slo=HANDED_OFF).times
        residence_s = times.last_token_s - times.arrived_s
        early, late = np.median(residence_s[200:400]), np.median(residence_s[-200:])
        assert (late < 1.2 * early) == keeps_up


def test_measurements_that_do_not_count() -> None:
    times = some_times(np.full(3, 0.05), np.full(3, 0.005))
    good = Measurement(times=times, gap_s=np.zeros(1), errors=Counter(), ended_s=1.0, health=HEALTHY)
    assert invalid_reasons(good, 0.69, 0.49, 1.0) == []
    assert len(invalid_reasons(good, 0.71, 0.1, 1.0)) == 1
    assert len(invalid_reasons(good, 0.1, 0.51, 1.0)) == 1
    assert len(invalid_reasons(replace(good, errors=Counter({"gone": 2})), 0.1, 0.1, 1.0)) == 1
    assert len(invalid_reasons(replace(good, health=replace(HEALTHY, cpu_share=0.71)), 0.1, 0.1, 1.0)) == 1
    late = replace(good, health=replace(HEALTHY, loop_late_p99_s=0.02))
    assert len(invalid_reasons(late, 0.1, 0.1, 1.0)) == 1
    assert invalid_reasons(late, 0.1, 0.1, 10.0) == []


def test_goodput_is_where_attainment_last_falls_below_the_objective() -> None:
    def goodput(*attainments: float) -> float | None:
        results = [
            {"rate": 10.0 * (index + 1), "agreement": {"measured": {"attainment": attainment}}}
            for index, attainment in enumerate(attainments)
        ]
        return interpolated_goodput(results, "measured")

    assert goodput(1.0, 0.95, 0.85, 0.5) == pytest.approx(25.0)
    assert goodput(0.8, 0.92, 0.88) == pytest.approx(25.0)
    assert goodput(0.8, 0.7) is None
    assert goodput(1.0, 0.99) is None


def test_requests_are_slowed_and_their_times_emulated() -> None:
    """What a slowed cluster serves after other requests is as long, in its own seconds, as at full speed: by a policy
    that learns nothing from the other requests."""
    layout, scale, from_s = disaggregated(), 10.0, 700.0
    requests = LOGNORMAL.draw(40, max_model_len=MODEL.max_model_len).at_rate(30.0)
    requests[-1] = replace(requests[-1], follow_up=SimulatedRequest(0.5, 3000, 8))
    expected = simulate(MODEL, layout, requests, slo=SLO, overheads=NO_OVERHEADS, policy="least-time").times
    slow_slo = replace(SLO, ttft_seconds=SLO.ttft_seconds * scale, tpot_seconds=SLO.tpot_seconds * scale)
    before = [SimulatedRequest(0.0, 500, 5)]
    slow = simulate(
        MODEL,
        layout.slowed(scale),
        before + [slowed_request(request, scale, from_s) for request in requests],
        slo=slow_slo,
        overheads=NO_OVERHEADS,
        policy="least-time",
    ).times
    found = emulated_times(slow, scale, from_s)
    assert len(found.ttft_s) == 41
    for name in ("arrived_s", "first_token_s", "last_token_s"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name))
    assert (found.num_output_tokens == expected.num_output_tokens).all()


def test_a_simulation_knows_what_the_cluster_has_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a cluster that is the simulator itself, which never starts anew, nothing differs."""
    scale = 10.0
    setting = Setting(workload=LOGNORMAL, layout=disaggregated(), ttft_s=0.15, tpot_s=0.01, rate=70.0, model=MODEL)
    served: list[SimulatedRequest] = []

    def serve(
        cluster: RunningCluster, requests: list[SimulatedRequest], *, vocab_size: int, time_scale: float
    ) -> Observed:
        begins_s = served[-1].arrived_s + 100.0 if served else 0.0
        served.extend(slowed_request(request, time_scale, begins_s) for request in requests)
        slo = SloConfig(ttft_seconds=1.5, tpot_seconds=0.1)
        layout = setting.layout.slowed(time_scale)
        slow = simulate(MODEL, layout, served, slo=slo, overheads=NO_OVERHEADS, policy=DEFAULT_POLICY).times
        times = emulated_times(slow, time_scale, begins_s)
        ended_s = float(times.last_token_s.max())
        measured = Measurement(times=times, gap_s=np.zeros(1), errors=Counter(), ended_s=ended_s, health=HEALTHY)
        return Observed(measured, {}, [])

    monkeypatch.setattr(simulator_vs_emulation, "observe", serve)
    comparison = Comparison(RunningCluster(url="", admin_url="", pid=0, log=Path()), setting, scale)
    for seed in (1, 2):
        requests = LOGNORMAL.draw(60, seed, max_model_len=MODEL.max_model_len).at_rate(setting.rate)
        measured = comparison._observe(requests).measured
    simulated = comparison._simulate(NO_OVERHEADS)
    assert simulated.ttft_s == pytest.approx(measured.times.ttft_s)
    assert simulated.tpot_s == pytest.approx(measured.times.tpot_s)
    moved = comparison._simulate(replace(NO_OVERHEADS, arrival_s=1e-3), seed=1)
    assert 5e-4 < np.abs(moved.arrived_s - simulated.arrived_s).max() <= 1e-3
