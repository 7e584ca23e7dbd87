from __future__ import annotations

import json
from collections import Counter
from math import nan

import numpy as np
import pytest

from pdserve.loadgen.figures import (
    parse_metrics,
    parse_objectives,
    parse_percentiles,
    result_lines,
    serving_result,
)
from pdserve.loadgen.load import GeneratorHealth, Measurement
from pdserve.planner.simulate.simulation import RequestTimes

OBJECTIVES = {"ttft": 200.0, "tpot": 20.0}
METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 99)
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


def result_of(measured: Measurement, **objectives: float) -> dict[str, object]:
    return serving_result(measured, objectives or OBJECTIVES, METRICS, PERCENTILES)


def test_throughput_and_goodput_by_vllms_names() -> None:
    result = result_of(a_measurement([0.1, 0.3, 0.1, 0.3], [0.01, 0.01, 0.03, 0.03]))
    assert result["attainment"] == {"ttft": 0.5, "tpot": 0.5, "joint": 0.25}
    assert result["duration"] == pytest.approx(3.6)
    assert (result["completed"], result["failed"], result["num_prompts"]) == (4, 0, 4)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (400, 44)
    assert result["request_throughput"] == pytest.approx(4 / 3.6, abs=1e-4)
    assert result["request_goodput"] == pytest.approx(1 / 3.6, abs=1e-4)
    assert result["output_throughput"] == pytest.approx(44 / 3.6, abs=1e-4)
    assert result["total_token_throughput"] == pytest.approx(444 / 3.6, abs=1e-4)
    assert result["offered_rate"] == pytest.approx(1.0)


def test_interactivity_counts_from_arrival_to_the_last_token() -> None:
    # Of the ten answers with 0.2 s in all for 11 tokens, one waits 1 s more, and is beyond p90.
    result = result_of(a_measurement([0.1] * 10 + [1.1], [0.01] * 11))
    assert result["interactivity"] == pytest.approx(11 / 0.2, abs=1e-2)
    worse = result_of(a_measurement([0.1] * 10 + [1.1] * 2, [0.01] * 12))
    assert worse["interactivity"] == pytest.approx(11 / 1.2, abs=1e-2)
    assert result_of(a_measurement([nan], [nan]))["interactivity"] is None


def test_end_to_end_latency_can_be_an_objective() -> None:
    measured = a_measurement([0.1, 0.3], [0.01, 0.01])
    result = result_of(measured, e2el=250.0)
    assert result["attainment"] == {"e2el": 0.5, "joint": 0.5}
    assert result["mean_e2el_ms"] == pytest.approx(300)


def test_unfinished_requests_meet_nothing_and_count() -> None:
    measured = a_measurement([0.1, 0.1, nan], [0.01, nan, nan], is_rejected=[False, False, True])
    result = result_of(measured)
    assert (result["completed"], result["failed"], result["rejected"]) == (1, 2, 1)
    assert result["attainment"] == pytest.approx({"joint": 1 / 3, "ttft": 2 / 3, "tpot": 1 / 3})
    assert result["total_output_tokens"] == 11
    assert serving_result(measured, {}, METRICS, PERCENTILES)["attainment"] == pytest.approx({"joint": 1 / 3})


def test_answers_of_one_token_are_judged_on_ttft_alone() -> None:
    result = result_of(a_measurement([0.1, 0.3], [0.5, 0.5], num_tokens=1))
    assert result["attainment"] == {"ttft": 0.5, "tpot": 1.0, "joint": 0.5}
    assert result["mean_tpot_ms"] is None


def test_latencies_in_milliseconds() -> None:
    result = result_of(a_measurement([0.001 * (number + 1) for number in range(101)], [0.01] * 101))
    expected = {"mean": 51, "median": 51, "p50": 51, "p90": 91, "p99": 100, "std": 29.155}
    assert {key: result[f"{key}_ttft_ms"] for key in expected} == pytest.approx(expected, abs=1e-3)
    assert (result["mean_tpot_ms"], result["std_tpot_ms"]) == pytest.approx((10, 0))
    assert (result["mean_itl_ms"], result["p99_itl_ms"]) == pytest.approx((20, 29.8))
    assert result["median_e2el_ms"] == pytest.approx(151)


def test_only_the_chosen_metrics_and_percentiles() -> None:
    result = serving_result(a_measurement([0.1], [0.01]), {}, ["tpot"], [99.9])
    assert "p99.9_tpot_ms" in result
    assert not [key for key in result if "ttft" in key or "itl" in key or "p99_" in key]
    lines = result_lines(result, ["tpot"], [99.9])
    assert any(line.startswith("P99.9 TPOT (ms):") for line in lines)
    assert not any("TTFT" in line for line in lines)


def test_the_result_is_json_even_where_nothing_was_measured() -> None:
    measured = a_measurement([0.1, nan], [nan, nan], is_rejected=[False, True])
    result = json.loads(json.dumps(result_of(measured), allow_nan=False))
    assert result["p50_tpot_ms"] is None
    assert result["request_throughput"] == 0
    assert result["attainment"]["joint"] == 0


def test_the_block_is_vllms() -> None:
    result = result_of(a_measurement([0.1, 0.1], [0.01, nan]))
    lines = result_lines({**result, "max_concurrency": 4, "request_rate": 2.0}, METRICS, PERCENTILES)
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == "Successful requests:                     1"
    assert lines[2] == "Failed requests:                         1"
    assert "Request rate configured (RPS):           2.00" in lines
    assert "Maximum request concurrency:             4" in lines
    assert "---------------Time to First Token----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "Mean TTFT (ms):                          100.00" in lines
    assert "P99 ITL (ms):                            29.80" in lines
    assert lines[-2:] == ["=" * 50, "failed 1 x: gone"]


def test_objectives_are_pairs_of_metric_and_milliseconds() -> None:
    assert parse_objectives(["ttft:250", "tpot:50"]) == parse_objectives(["ttft:250 tpot:50"])
    assert parse_objectives(["e2el:1e3"]) == {"e2el": 1000.0}
    for wrong in ("ttft", "ttft:", "ttft:0", "ttft:inf", "ttft:nan", "itl:5", "ttft:-1"):
        with pytest.raises(ValueError, match="ttft:250 tpot:50"):
            parse_objectives([wrong])


def test_metrics_and_percentiles_are_lists() -> None:
    assert parse_metrics("ttft, e2el") == ["ttft", "e2el"]
    assert parse_percentiles("25,99.9") == [25.0, 99.9]
    with pytest.raises(ValueError, match="some of ttft, tpot, itl, e2el"):
        parse_metrics("ttft,tbt")
    for wrong in ("", "101", "-1", "p99"):
        with pytest.raises(ValueError, match="from 0 to 100"):
            parse_percentiles(wrong)
