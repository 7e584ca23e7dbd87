"""Causes of missed objectives."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pdserve.router.requests.journey import Journey, Span, tpot_cause, tpot_parts_s, ttft_cause


def spent(phases_s: Mapping[str, float], num_retries: int = 0) -> Journey:
    return Journey([Span(phase, 0.0, seconds) for phase, seconds in phases_s.items()], num_retries=num_retries)


@pytest.mark.parametrize(
    ("journey", "cause"),
    [
        (spent({"queue": 0.6, "prefill_queue": 0.2, "prefill": 0.1}), "queue"),
        (spent({"queue": 0.1, "prefill_queue": 0.5, "prefill": 0.4, "decode": 9.0}), "prefill_queue"),
        (spent({"prefill_queue": 0.1, "prefill": 0.8}), "prefill"),
        (spent({"queue": 0.01, "prefill": 0.2}), "wire"),
        (spent({"queue": 0.01, "prefill": 0.2}, num_retries=1), "failover"),
    ],
)
def test_ttft_is_missed_by_its_longest_part(journey: Journey, cause: str) -> None:
    assert ttft_cause([journey], 1.0) == cause


def test_the_slowest_of_several_prompts_counts() -> None:
    fast, slow = spent({"queue": 0.1}), spent({"prefill": 0.9})
    assert ttft_cause([fast, slow], 1.0) == "prefill"


def test_the_parts_of_an_answer_are_all_of_it() -> None:
    journey = Journey(stall_s=0.2, preempted_s=0.3, lost_s=0.1, first_s=1.0, last_s=2.5)
    parts_s = tpot_parts_s(journey, write_s=0.05)
    assert parts_s == pytest.approx(
        {"failover": 0.1, "handoff": 0.2, "preemption": 0.3, "client": 0.05, "decode": 0.85}
    )
    journey.last_s = 1.4
    assert tpot_parts_s(journey, write_s=9.0)["decode"] == 0


@pytest.mark.parametrize(
    ("journey", "write_s", "cause"),
    [
        (Journey(lost_s=0.9, stall_s=0.3), 0.0, "failover"),
        (Journey(stall_s=0.3, preempted_s=0.2), 0.0, "handoff"),
        (Journey(stall_s=0.1, preempted_s=0.3), 0.0, "preemption"),
        (Journey(stall_s=0.1), 0.5, "client"),
        (Journey(stall_s=0.1), 0.0, "decode"),
    ],
)
def test_tpot_is_missed_by_the_largest_part_that_is_enough(journey: Journey, write_s: float, cause: str) -> None:
    """10 gaps of 0.12 s on average, of which 0.1 s would be met."""
    journey.last_s = 1.2
    assert tpot_cause(tpot_parts_s(journey, write_s), 10, slo_s=0.1) == cause
