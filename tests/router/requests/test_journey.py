"""Causes of missed objectives."""

from __future__ import annotations

import pytest

from pdserve.router.requests.journey import Journey, tpot_cause, ttft_cause


@pytest.mark.parametrize(
    ("journey", "cause"),
    [
        (Journey(phases_s={"queue": 0.6, "prefill_queue": 0.2, "prefill": 0.1}), "queue"),
        (Journey(phases_s={"queue": 0.1, "prefill_queue": 0.5, "prefill": 0.4, "decode": 9.0}), "prefill_queue"),
        (Journey(phases_s={"prefill_queue": 0.1, "prefill": 0.8}), "prefill"),
        (Journey(phases_s={"queue": 0.01, "prefill": 0.2}), "edge"),
        (Journey(phases_s={"queue": 0.01, "prefill": 0.2}, num_retries=1), "failover"),
    ],
)
def test_ttft_is_missed_by_its_longest_part(journey: Journey, cause: str) -> None:
    assert ttft_cause([journey], 1.0) == cause


def test_the_slowest_of_several_prompts_counts() -> None:
    fast, slow = Journey(phases_s={"queue": 0.1}), Journey(phases_s={"prefill": 0.9})
    assert ttft_cause([fast, slow], 1.0) == "prefill"
    assert ttft_cause([], 1.0) == "edge"


@pytest.mark.parametrize(
    ("journey", "cause"),
    [
        (Journey(num_retries=1, stall_s=2.0, num_preemptions=1), "failover"),
        (Journey(stall_s=0.9, num_preemptions=1), "handoff"),  # 10 gaps of 0.12 s, of which one is 0.9 s
        (Journey(stall_s=0.2, num_preemptions=1), "preemption"),
        (Journey(stall_s=0.2), "decode"),
    ],
)
def test_tpot_is_missed_by_what_lengthened_it(journey: Journey, cause: str) -> None:
    assert tpot_cause([journey], 0.12, 10, slo_s=0.1) == cause
