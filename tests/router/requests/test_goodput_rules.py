"""Rules of the goodput policy that need no worker, one by one."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.requests.goodput_rules import (
    COST_MEMORY_S,
    LATE_S,
    MAX_RETRY_AFTER_S,
    TPOT_SPREAD,
    TURN,
    HeldTurns,
    Joining,
    PrefillCost,
    Pulls,
    RetryTimes,
    chance,
    handoff_score,
    slack_misses,
    tpot_chance,
)
from pdserve.router.requests.placement import Arrival, PromptBlocks

BLOCKS = PromptBlocks(range(10), 4)


def held(now_s: float, weight: float = 1.0) -> Arrival:
    """A request that waits from second 0."""
    return Arrival(1, BLOCKS, now_s, 0.0, weight=weight)


def test_chances_are_even_at_the_objective_and_grow_with_the_margin() -> None:
    assert chance(0.0) == tpot_chance(1.0) == 0.5
    assert chance(1.0) == pytest.approx(0.731, abs=1e-3)
    assert tpot_chance(1 - TPOT_SPREAD) == pytest.approx(chance(1.0))
    assert (chance(-inf), chance(inf)) == (0.0, 1.0)


def test_misses_caused_by_decoding_remain_if_ttft_is_missed() -> None:
    assert handoff_score(0.25, 0.8) == 0.2
    assert handoff_score(0.25, -0.8) == -0.8


def test_waiting_counts_for_requests_of_no_weight_too() -> None:
    assert slack_misses(0.0, 0.5) == slack_misses(1.0, 0.5) > slack_misses(0.5, 0.5) > 0


def test_those_that_join_are_divided_among_workers() -> None:
    joining = Joining()
    joining.add(1, 100)
    joining.add(2, 300)
    assert joining.part_of(4) == (0.5, 100.0)
    joining.remove(1)
    joining.remove(1)
    assert (len(joining), joining.part_of(1)) == (1, (1, 300))
    assert joining.part_of(0) == (0.0, 0.0)


def test_pulls_wait_on_the_link_that_has_most_to_carry() -> None:
    pulls = Pulls()
    pulls.add(1, "prefill-0", 100)
    pulls.add(2, "prefill-1", 300)
    assert (pulls.num_tokens("prefill-0", 2, 0), pulls.num_tokens("prefill-1", 2, 0)) == (200, 300)
    assert [pulls.num_tokens("prefill-1", 2, num_after) for num_after in (100, 400)] == [pytest.approx(200), 0]
    pulls.remove(2)
    pulls.remove(2)
    assert (pulls.num_tokens("prefill-0", 2, 0), pulls.num_tokens("prefill-1", 2, 0)) == (100, 50)


def test_pulls_that_are_pending_together_may_wait_for_each_other() -> None:
    pulls, are_shared = Pulls(), list[bool]()
    pulls.add(0, "prefill-1.0", 100)
    for request_id in (1, 2):
        pulls.add(request_id, "prefill-0.1", 100)
        are_shared.append(pulls.are_shared("prefill-0"))
    for request_id in (1, 2):
        are_shared.append(pulls.are_shared("prefill-0"))
        pulls.remove(request_id)
    pulls.add(3, "prefill-0.1", 100)
    assert [*are_shared, pulls.are_shared("prefill-0")] == [False, True, True, True, False]
    assert not pulls.are_shared("prefill-1")


def test_prefill_costs_what_it_has_cost_of_late() -> None:
    cost = PrefillCost()
    assert cost.misses_per_s(5.0) == 0.0
    cost.add(3.0)
    cost.add(1.0)
    assert cost.misses_per_s(5.0) == 4.0 / COST_MEMORY_S
    assert cost.misses_per_s(5.0 + COST_MEMORY_S) == pytest.approx(4.0 / COST_MEMORY_S * 0.3679, rel=1e-3)


def test_a_held_request_has_a_turn_in_time_whatever_else_is_placed() -> None:
    turns = HeldTurns()
    assert not turns.is_due(held(LATE_S - 1))
    assert turns.is_due(held(LATE_S))
    assert not turns.is_due(held(LATE_S, weight=0.0))
    turns.placed(held(LATE_S), is_late=True)
    assert not turns.is_due(held(2 * LATE_S - 1))
    assert turns.is_due(held(2 * LATE_S)), "though nothing else moves"
    for number in range(TURN):
        assert not turns.is_due(held(LATE_S + 1)), number
        turns.placed(held(LATE_S + 1), is_late=False)
    assert turns.is_due(held(LATE_S + 1))


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 100)), min_size=1, max_size=30))
def test_refused_ones_are_asked_back_one_after_the_other(refused: list[tuple[float, float]]) -> None:
    times, now_s, last_s = RetryTimes(), 0.0, 0.0
    times.placed(2.0)
    for gap_s, backlog_s in refused:
        now_s += gap_s
        retry_after_s = times.retry_after_s(now_s, backlog_s, 0.1, 4, 10.0)
        at_s = now_s + retry_after_s
        assert at_s == pytest.approx(min(max(last_s, now_s + backlog_s) + 0.1, now_s + MAX_RETRY_AFTER_S))
        last_s = at_s


def test_refused_ones_are_asked_back_as_fast_as_prompts_are_computed_and_answers_end() -> None:
    assert RetryTimes().retry_after_s(0.0, 1.0, 0.4, 4, 100.0) == pytest.approx(1.1)
    assert RetryTimes().retry_after_s(0.0, 1.0, 0.4, 4, 5.0) == pytest.approx(1.2)
    assert RetryTimes().retry_after_s(0.0, 1.0, 0.4, 4, 0.0) == pytest.approx(1.1)
