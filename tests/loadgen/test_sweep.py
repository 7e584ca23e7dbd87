from __future__ import annotations

import csv
import re
from collections import Counter
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from pdserve.contracts.codec import from_json, to_json
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.metrics import PHASES
from pdserve.loadgen.load import GeneratorHealth, Measurement
from pdserve.loadgen.page import PHASE_NAMES, sweep_html
from pdserve.loadgen.sweep import Sweep, Sweeper, SweepPoint, sweep_csv
from pdserve.planner.simulate.simulation import RequestTimes

SLO = SloConfig(ttft_seconds=0.2, tpot_seconds=0.05, attainment=0.9)
CAPACITY = 10.0
NUM_REQUESTS = 400


def a_queue(
    rate: float, *, cpu_share: float = 0.1, num_requests: int = NUM_REQUESTS, capacity: float = CAPACITY
) -> Measurement:
    """One server that answers ``capacity`` requests/s, first come first served, at random arrivals."""
    random = np.random.default_rng(3)
    arrived_s = np.cumsum(random.exponential(1 / rate, num_requests))
    first_s, free_s = np.zeros(num_requests), 0.0
    for row, at_s in enumerate(arrived_s):
        free_s = first_s[row] = max(free_s, at_s) + 1 / capacity
    ones = np.ones(num_requests, np.int64)
    times = RequestTimes(
        arrived_s=arrived_s,
        started_s=np.full(num_requests, np.nan),
        first_token_s=first_s,
        second_token_s=first_s + 0.02,
        last_token_s=first_s + 0.1,
        num_prompt_tokens=10 * ones,
        num_cached_tokens=0 * ones,
        num_output_tokens=6 * ones,
        is_rejected=np.zeros(num_requests, np.bool_),
    )
    health = GeneratorHealth(cpu_share=cpu_share, send_late_p99_s=0.0, send_late_max_s=0.0, loop_late_p99_s=0.0)
    gap_s = np.full(5 * num_requests, 0.02)
    return Measurement(times=times, gap_s=gap_s, errors=Counter(), ended_s=float(first_s[-1]) + 0.1, health=health)


def a_sweep(*rates: float, label: str = "pdserve") -> Sweep:
    totals = iter(range(100))

    def phases() -> dict[str, float]:
        count = next(totals)
        return {"prefill": 8.0 * count, "decode": 40.0 * count} if count else {}

    sweeper = Sweeper(a_queue, SLO, phases=phases)
    sweeper.rates(rates)
    return sweeper.result(label, "http://127.0.0.1:8000", "2026-01-01T00:00:00+00:00", "chat")


def test_the_search_brackets_the_goodput() -> None:
    reported: list[SweepPoint] = []
    sweeper = Sweeper(a_queue, SLO, report=reported.append)
    sweeper.search(1.0, 0.05)
    found = sweeper.result("pdserve", "", "", "")
    rates = [point.rate for point in found.points]
    assert rates == sorted({point.rate for point in reported})
    above = min(rate for rate in rates if rate > found.goodput)
    assert above <= 1.05 * found.goodput
    by_rate = {point.rate: point for point in found.points}
    assert by_rate[found.goodput].share >= 0.9 > by_rate[above].share
    assert found.surely_missed is not None
    assert 0 < found.surely_met <= found.goodput < found.surely_missed
    assert 0.3 * CAPACITY < found.goodput < 0.9 * CAPACITY


def test_a_rate_that_is_asked_twice_is_measured_once() -> None:
    measured = []

    def load(rate: float) -> Measurement:
        measured.append(rate)
        return a_queue(rate)

    Sweeper(load, SLO).rates([2, 3, 2])
    assert measured == [2, 3]


def test_no_rate_meets_the_objectives() -> None:
    found = a_sweep(20.0, 30.0)
    assert (found.goodput, found.surely_met) == (0, 0)
    assert found.verdict == "no measured rate meets it, surely not 20.0"


def test_phases_are_means_of_each_run() -> None:
    slow, fast = a_sweep(2.0, 3.0).points
    assert slow.phases_ms == pytest.approx({"prefill": 20.0, "decode": 100.0})
    assert fast.phases_ms == slow.phases_ms


def test_the_budget_has_the_phases_of_the_router_in_order() -> None:
    assert [phase for phase in PHASES if phase not in ("first_write", "decode_queue")] == list(PHASE_NAMES)


def test_a_generator_that_was_too_busy_is_named_with_the_rate() -> None:
    sweeper = Sweeper(lambda rate: a_queue(rate, cpu_share=0.9), SLO)
    sweeper.rates([2.5])
    assert sweeper.problems == ["at 2.5/s the load generator used 90% of a core; lower the rate"]


@pytest.mark.parametrize(
    ("num_requests", "cpu_share", "verdict"),
    [
        (10, 0.1, "at least 4.00, not sure"),
        (
            10,
            0.9,
            "at least 4.00, not sure, these figures do not count: at 4/s the load generator used 90% of a core; lower "
            "the rate",
        ),
        (400, 0.1, "at least 4.00, surely 4.00"),
    ],
)
def test_the_verdict_stands_in_every_file(num_requests: int, cpu_share: float, verdict: str) -> None:
    sweeper = Sweeper(lambda rate: a_queue(rate, cpu_share=cpu_share, num_requests=num_requests, capacity=1e3), SLO)
    sweeper.rates([4.0])
    found = sweeper.result("pdserve", "", "", "")
    assert found.verdict == verdict
    assert (found.surely_met, found.surely_missed) == (4.0 if "surely 4" in verdict else 0.0, None)
    (row,) = csv.DictReader(sweep_csv(found).splitlines())
    assert row["goodput"] == verdict
    assert ("90% of a core" in row["problems"]) == (cpu_share > 0.5)
    assert verdict in to_json(found)
    assert unescape(sweep_html([found])).count(verdict) == 1


def test_json_reads_back() -> None:
    found = a_sweep(2.0, 11.0)
    assert from_json(Sweep, to_json(found), "sweep.json") == found


def test_csv_has_a_line_for_each_rate() -> None:
    rows = list(csv.DictReader(sweep_csv(a_sweep(2.0, 11.0)).splitlines()))
    assert [row["request_rate"] for row in rows] == ["2.0", "11.0"]
    assert [row["saturated"] for row in rows] == ["False", "True"]
    assert float(rows[0]["p99_tpot_ms"]) == pytest.approx(20.0)
    assert float(rows[0]["mean_decode_phase_ms"]) == pytest.approx(100.0)


def test_the_page_shows_sweeps_side_by_side() -> None:
    other = replace(a_sweep(2.0, 4.0, label="<other>"), goodput=0.0)
    html = sweep_html([a_sweep(2.0, 11.0), other])
    assert "<other>" not in html
    assert html.count("&lt;other&gt;") > 3
    assert not re.search(r"#[ab]0000\d|https?://(?!127)", html)
    assert html.count("<svg") == 7
    assert {"saturated", "Where the time goes: pdserve"} <= set(re.findall(r">([^<]+)<", html))
