"""Lengths of answers, as learned from those that ended and those that run."""

from __future__ import annotations

import numpy as np
import pytest

from pdserve.router.requests.lengths import CHANGES_PER_COUNT, MAX_LENGTH, MIN_CHANGE, PRIOR_TOKENS, Lengths


def counted(lengths: Lengths, num_answers: int, num_tokens: int) -> None:
    """Count ``num_answers`` that run."""
    lengths.count([np.full(num_answers // 2, num_tokens), np.full(-(-num_answers // 2), num_tokens)])


def test_lengths_are_learned() -> None:
    lengths = Lengths()
    assert lengths.remaining[0] == pytest.approx(PRIOR_TOKENS, rel=0.02)
    for _ in range(2000):
        lengths.add(50)
        if lengths.is_due(0):
            counted(lengths, 0, 0)
    assert lengths.remaining[0] == pytest.approx(50, rel=0.1)
    assert lengths.remaining[40] == pytest.approx(10, rel=0.5)
    assert lengths.remaining[MAX_LENGTH] == 1.0


def test_the_chance_of_few_steps_is_that_of_short_answers() -> None:
    lengths = Lengths()
    for num_tokens in (1, 2, 5, 5) * 500:
        lengths.add(num_tokens)
    counted(lengths, 0, 0)
    chances = [lengths.chance_of_steps(most) for most in (0.9, 1.0, 3.9, 4.0, 1e9)]
    assert chances == pytest.approx([0.0, 0.25, 0.25, 0.75, 0.75], abs=0.02)


def test_the_chance_of_few_further_tokens_is_that_of_answers_as_long_as_those_so_far() -> None:
    lengths = Lengths()
    for num_tokens in (1, 2, 5, 5) * 500:
        lengths.add(num_tokens)
    counted(lengths, 0, 0)
    known, most = np.array([1, 1, 2, 2, MAX_LENGTH]), np.array([0.9, 1.0, 2.9, 3.0, 1e9])
    assert lengths.chances_to_end(known, most) == pytest.approx([0.0, 1 / 3, 0.0, 1.0, 1.0], abs=0.02)


def test_a_count_is_due_now_and_then() -> None:
    lengths = Lengths()
    due = [lengths.is_due(100) for _ in range(CHANGES_PER_COUNT)]
    assert due == [False] * (CHANGES_PER_COUNT - 1) + [True]
    counted(lengths, 0, 0)
    num_running = round(4 * CHANGES_PER_COUNT / MIN_CHANGE)
    due = [lengths.is_due(num_running) for _ in range(4 * CHANGES_PER_COUNT)]
    assert due == [False] * (4 * CHANGES_PER_COUNT - 1) + [True], "the more answers run, the fewer counts"


def test_answers_that_run_lengthen_what_is_expected() -> None:
    lengths = Lengths()
    counted(lengths, 1000, 400)
    assert lengths.remaining[0] > 400 + PRIOR_TOKENS / 2
    assert lengths.remaining[400] == pytest.approx(PRIOR_TOKENS, rel=0.1), "nothing is known of what follows"


def test_where_most_answers_are_longer_than_any_counted_so_is_the_median() -> None:
    lengths = Lengths()
    counted(lengths, 1000, MAX_LENGTH)
    assert lengths.median == MAX_LENGTH
