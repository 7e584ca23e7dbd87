from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pdserve.planner.report.run_tables import print_run, run_json
from pdserve.planner.simulate.simulated_run import Run, RunResult, carry_out
from pdserve.planner.workload.traffic import fixed_traffic
from tests.planner.plans import APART, MODEL, SLO, TOGETHER

RUN = Run(
    model=MODEL,
    layout=APART,
    traffic=fixed_traffic(500, 20, max_model_len=MODEL.max_model_len),
    slo=SLO,
    num_requests=200,
    rate=10.0,
)


def printed(result: RunResult) -> list[str]:
    out = StringIO()
    print_run(result, Console(file=out, width=100), "fixed lengths", ("A note.",))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_an_open_loop_has_the_rate_that_was_offered() -> None:
    result = carry_out(RUN)
    assert result.attainment.rate == 10.0
    assert result.attainment.num_requests == 200
    assert result.requests_per_s == pytest.approx(10.0, rel=0.2)


def test_a_closed_loop_has_the_rate_that_comes_about() -> None:
    one, many = (carry_out(replace(RUN, rate=0.0, concurrency=each)) for each in (1, 8))
    assert one.attainment.rate == pytest.approx(1 / one.attainment.mean_residence_s, rel=0.01)
    assert many.attainment.rate > 2 * one.attainment.rate


def test_equal_runs_are_equal_and_seeds_differ() -> None:
    bursty = replace(RUN, traffic=RUN.traffic.bursty(2.0))
    first, again, other = carry_out(bursty), carry_out(bursty), carry_out(replace(bursty, seed=1))
    assert first.attainment == again.attainment
    assert first.attainment != other.attainment


def test_the_table_says_what_was_met_and_how_workers_were_used() -> None:
    result = carry_out(RUN)
    lines = printed(result)
    assert lines[0] == "Llama-3-8B <i>, bfloat16: 1 x P(TP1) + 1 x D(TP1) (prefill on h100-sxm, decode on h100-sxm)"
    assert lines[1] == "fixed lengths; 10.0 requests/s"
    (ttft,) = (line for line in lines if line.startswith("TTFT"))
    assert ttft.endswith("250 ms 100 %")
    assert any("the target of 90 % is met." in line for line in lines)
    assert [line.split()[0] for line in lines if line.startswith(("prefill ", "decode "))] == ["prefill", "decode"]
    assert "A note." in lines


def test_a_run_on_several_hosts_says_how_much_crosses_the_network() -> None:
    # Too little TPOT for a decode worker to compute a prompt: the one that there is pulls all.
    hasty = replace(SLO, tpot_seconds=1e-4)
    result = carry_out(replace(RUN, layout=replace(APART, hosts=(((0,),), ((1,),))), slo=hasty))
    said = "On 2 hosts, by devices: 1 with 1 prefill, 1 with 1 decode; 100 % of the pulls cross the network."
    assert printed(result)[1] == said
    assert [pool.network_share for pool in result.attainment.pools] == [0.0, 1.0]


def test_a_target_that_is_missed_and_rejections_are_said() -> None:
    result = carry_out(replace(RUN, layout=TOGETHER, rate=500.0, max_in_flight=4))
    lines = printed(result)
    (missed,) = (line for line in lines if "is missed; 90 % have a TTFT of " in line)
    assert missed.endswith(" or less.")
    assert any(f"{result.attainment.num_rejected} requests were rejected." in line for line in lines)


def test_an_overloaded_cluster_generates_no_more_than_it_can() -> None:
    asked, more = (carry_out(replace(RUN, rate=rate, num_requests=400)) for rate in (300.0, 3000.0))
    for result in (asked, more):
        assert result.attainment.output_tokens_per_s == pytest.approx(20 * result.requests_per_s)
    assert more.attainment.output_tokens_per_s < 1.2 * asked.attainment.output_tokens_per_s


def test_json_has_the_same_figures() -> None:
    result = carry_out(replace(RUN, rate=0.0, concurrency=4))
    written: dict[str, Any] = json.loads(json.dumps(run_json(result, "fixed", ("A note.",)), allow_nan=False))
    assert written["steady_state"]["ttft_s"]["p50"] == result.attainment.ttft.percentile(50)
    times = result.simulation.times
    assert written["mean_ttft_ms"] == pytest.approx(1e3 * times.ttft_s.mean(), rel=1e-3)
    assert written["p99_tpot_ms"] == pytest.approx(1e3 * np.percentile(times.tpot_s, 99), rel=1e-3)
    # Between steps there is only the handoff, before token 1.
    handoff_s = (times.second_token_s - times.first_token_s).sum() - len(times.arrived_s) * 1e-3 * written[
        "mean_itl_ms"
    ]
    num_gaps, decode_s = (times.num_output_tokens - 1).sum(), (times.last_token_s - times.first_token_s).sum()
    assert written["mean_itl_ms"] == pytest.approx(1e3 * (decode_s - handoff_s) / num_gaps, rel=0.02)
    assert written["layout"]["prefill"]["replicas"] == 1
    assert (written["concurrency"], written["notes"], written["traffic"]) == (4, ["A note."], "fixed")
