from __future__ import annotations

import json
from collections import Counter
from math import nan

import numpy as np
import pytest

from pdserve.bench.load import GeneratorHealth, Measurement
from pdserve.bench.serving_report import ServingReport
from pdserve.contracts.deployment import SloConfig
from pdserve.planner.simulation import RequestTimes

SLO = SloConfig(ttft_seconds=0.2, tpot_seconds=0.02)
HEALTHY = GeneratorHealth(cpu_share=0.1, send_late_p99_s=0.001, send_late_max_s=0.002, loop_late_p99_s=0.001)


def a_measurement(
    ttft_s: list[float], tpot_s: list[float], *, is_rejected: list[bool] | None = None, num_tokens: int = 11
) -> Measurement:
    """Requests a second apart; a NaN in ``tpot_s`` is an answer that did not end."""
    arrived_s = np.arange(len(ttft_s), dtype=np.float64)
    first_token_s = arrived_s + ttft_s
    last_token_s = first_token_s + np.array(tpot_s) * (num_tokens - 1)
    times = RequestTimes(
        arrived_s=arrived_s,
        started_s=np.full(len(ttft_s), nan),
        first_token_s=first_token_s,
        second_token_s=first_token_s + tpot_s,
        last_token_s=last_token_s,
        num_prompt_tokens=np.full(len(ttft_s), 100),
        num_cached_tokens=np.zeros(len(ttft_s), np.int64),
        num_output_tokens=np.full(len(ttft_s), num_tokens),
        is_rejected=np.array(is_rejected or [False] * len(ttft_s)),
    )
    return Measurement(
        times=times,
        gap_s=np.array([0.01, 0.03]),
        errors=Counter({"gone": 1} if np.isnan(tpot_s).any() and not is_rejected else {}),
        ended_s=0.0 if np.isnan(last_token_s).all() else float(np.nanmax(last_token_s)),
        health=HEALTHY,
    )


def test_a_request_must_meet_both_objectives() -> None:
    report = ServingReport.of(a_measurement([0.1, 0.3, 0.1, 0.3], [0.01, 0.01, 0.03, 0.03]), SLO)
    assert (report.ttft_share, report.tpot_share, report.joint_share) == (0.5, 0.5, 0.25)
    assert report.duration_s == pytest.approx(3.6)
    assert report.goodput == pytest.approx(1 / 3.6)
    assert report.request_throughput == pytest.approx(4 / 3.6)
    assert report.offered_rate == pytest.approx(1.0)
    assert report.output_tokens == 44


def test_what_did_not_finish_meets_nothing_and_counts() -> None:
    report = ServingReport.of(a_measurement([0.1, 0.1, nan], [0.01, nan, nan], is_rejected=[False, False, True]), SLO)
    assert (report.num_finished, report.num_rejected, report.num_failed) == (1, 1, 1)
    assert report.joint_share == pytest.approx(1 / 3)
    assert report.ttft_share == pytest.approx(2 / 3)
    assert report.output_tokens == 11


def test_answers_of_one_token_are_judged_on_ttft_alone() -> None:
    report = ServingReport.of(a_measurement([0.1, 0.3], [0.5, 0.5], num_tokens=1), SLO)
    assert (report.joint_share, report.tpot_share) == (0.5, 1.0)
    assert np.isnan(report.tpot.mean_s)


def test_percentiles_are_those_of_the_requests() -> None:
    ttft_s = [0.001 * (number + 1) for number in range(101)]
    report = ServingReport.of(a_measurement(ttft_s, [0.01] * 101), SLO)
    assert report.ttft.percentiles_s == pytest.approx({50: 0.051, 90: 0.091, 99: 0.1})
    assert report.ttft.mean_s == pytest.approx(0.051)
    assert report.itl.mean_s == pytest.approx(0.02)


def test_the_report_is_json_even_where_nothing_was_measured() -> None:
    measured = a_measurement([0.1, nan], [nan, nan], is_rejected=[False, True])
    report = json.loads(json.dumps(ServingReport.of(measured, SLO).as_dict(), allow_nan=False))
    assert report["tpot"]["p50_s"] is None
    assert report["ttft"]["p50_s"] == pytest.approx(0.1)
    assert report["attainment"]["joint"] == 0


def test_people_read_milliseconds_and_errors() -> None:
    lines = ServingReport.of(a_measurement([0.1, 0.1], [0.01, nan]), SLO).lines()
    assert any(line.startswith("TTFT (ms)") and "p50 100.00" in line for line in lines)
    assert any("1 finished, 0 rejected, 1 failed" in line for line in lines)
    assert lines[-1] == "failed 1 x: gone"
