"""What follows from the record of a request."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from pdserve.contracts.deployment import Tier
from pdserve.contracts.request import Outcome
from pdserve.router import record as router_record
from tests.router.records import answer_record, new_record

SLO = Tier(ttft_seconds=0.25, tpot_seconds=0.05)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Instants at which tokens are handed over, to be filled by the test."""
    instants: list[float] = []
    monkeypatch.setattr(router_record, "time", SimpleNamespace(monotonic=lambda: instants.pop(0)))
    yield instants
    assert not instants


def test_times_are_those_of_the_slowest_choice(clock: list[float]) -> None:
    record = new_record(num_choices=2)
    assert record.ttft_s is record.tpot_s is None
    clock += [10.1, 10.2, 10.15, 10.5, 10.2]
    gaps_s = [record.token(choice) for choice in (0, 1, 0, 1, 0)]
    assert gaps_s == [None, None, pytest.approx(0.05), pytest.approx(0.3), pytest.approx(0.05)]
    assert (record.ttft_s, record.tpot_s, record.answer_s) == pytest.approx((0.2, 0.3, 0.5))
    assert record.num_tokens == 5
    assert max(each.longest_gap_s for each in record.journeys) == pytest.approx(0.3)


def test_only_writes_after_token_0_wait_for_the_client(clock: list[float]) -> None:
    record = new_record()
    record.wrote(1.0)
    clock += [10.1]
    record.token(0)
    record.wrote(0.5)
    assert record.write_s == 0.5


def test_the_wait_for_the_first_write_is_a_phase_of_each_prompt() -> None:
    record = new_record(num_choices=2, num_prompts=2)
    for number, journey in enumerate(record.journeys):
        journey.token_s, journey.first_s = 10.0, 10.0 + number
    record.answered()
    spans = [[(span.phase, span.end_s, span.seconds) for span in journey.spans] for journey in record.journeys]
    assert spans == [[("first_write", 10.0, 0.0)], [], [("first_write", 12.0, 2.0)], []]


def test_each_objective_is_missed_for_a_cause() -> None:
    bounded = Tier(ttft_seconds=0.25, tpot_seconds=0.05, max_gap_seconds=0.1)
    assert answer_record(0.25, [0.04]).misses(SLO) == answer_record(0.25).misses(SLO) == {}
    assert answer_record(0.3, [0.01] * 9 + [0.2]).misses(SLO) == {"ttft": "wire"}
    assert answer_record(0.1, [0.01] * 9 + [0.2]).misses(bounded) == {"tpot": "gap"}
    slow = answer_record(0.1, [0.1, 0.2])
    assert slow.misses(bounded) == {"tpot": "decode"}
    slow.journeys[0].preempted_s = 0.25
    assert slow.misses(bounded) == {"tpot": "preemption"}


def test_the_cause_is_that_of_the_slowest_prompt() -> None:
    record = new_record(num_prompts=2)
    for journey, gap_s in zip(record.journeys, (0.01, 0.2), strict=True):
        journey.first_s, journey.last_s, journey.num_gaps = 10.1, 10.1 + gap_s, 1
        journey.stall_s = gap_s
    record.journeys[0].preempted_s = 1.0
    assert record.misses(SLO) == {"tpot": "handoff"}


def test_retries_are_those_of_all_choices_as_workers_are() -> None:
    record = new_record(num_choices=2, num_prompts=2)
    for number, journey in enumerate(record.journeys):
        journey.num_retries = number
    assert record.line()["retries"] == 6


@pytest.mark.parametrize(
    ("status", "outcome", "is_good"),
    [
        (499, Outcome.CANCELLED, None),
        (400, Outcome.REJECTED, None),
        (429, None, False),
        (503, None, False),
        (200, Outcome.FAILED, False),
    ],
)
def test_what_its_sender_caused_is_neither_good_nor_bad(
    status: int, outcome: Outcome | None, is_good: bool | None
) -> None:
    record = new_record()
    record.answers[0].outcome = outcome
    record.ended(status)
    assert record.is_good(SLO) is is_good
    record.answers = ()
    assert record.is_good(SLO) is None


def test_a_complete_answer_is_as_good_as_its_times() -> None:
    for ttft_s, is_good in ((0.1, True), (0.3, False)):
        record = answer_record(ttft_s)
        record.answered()
        record.ended(200)
        assert record.is_good(SLO) is is_good
