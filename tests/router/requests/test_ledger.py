"""Ledgers of the goodput policy: prompts in the order of workers, and the harm done to answers that decode."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.requests.ledger import GRID_S, GRID_TOKENS, TPOT_SPREAD, Answers, Prompts
from pdserve.router.requests.lengths import Lengths
from pdserve.router.requests.worker_table import WorkerColumns

ROW = np.array([3])
STEP_S, ADDED_S, TOKEN_S = 0.010, 1e-5, 4e-8
"""A step, what one more answer adds to it, and what each token of its context does."""


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 99), st.sampled_from(["a", "b", None]))))
def test_the_queue_of_a_worker_equals_a_recount(prompts: list[tuple[int, int, str | None]]) -> None:
    queue, held = Prompts(), dict[int, tuple[float, int, str | None]]()
    for number, (due_s, num_tokens, share) in enumerate(prompts):
        queue.add(number % 9, ROW[0], due_s, num_tokens, share, num_tokens / 7)
        held[number % 9] = float(due_s), num_tokens, share
        if number % 4 == 3:
            queue.remove(number % 5)
            held.pop(number % 5, None)
        for limit_s in range(6):
            after = sum(num for due_s, num, _ in held.values() if due_s > limit_s)
            assert queue.num_tokens_after(ROW, np.array([float(limit_s)])) == after
        for each in "ab":
            seconds = sum(num / 7 for _, num, share in held.values() if share == each)
            assert queue.seconds(each, ROW) == pytest.approx(seconds, abs=1e-4)
    for number in range(9):
        queue.remove(number)
    assert not queue._prompts
    assert not queue._shares
    assert queue.num_tokens_after(ROW, np.array([-1.0])) == 0


def workers(num_rows: int, num_steps: int, stepped_s: float) -> WorkerColumns:
    """Equal ones."""
    columns = WorkerColumns(*np.zeros((len(WorkerColumns._fields), num_rows)))
    return columns._replace(
        num_steps=columns.role + num_steps,
        stepped_s=columns.role + stepped_s,
        step_s=columns.role + STEP_S,
        next_step_s=columns.role + STEP_S + ADDED_S,
        token_s=columns.role + TOKEN_S,
    )


def misses(answers: list[tuple[float, int, float]], lengths: Lengths, added_s: float, delay_s: float) -> float:
    """Expected ones, answer by answer, if steps take ``added_s`` more and all are ``delay_s`` late."""
    total = 0.0
    for late_s, num_tokens, tpot_s in answers:
        remaining = lengths.remaining(num_tokens)
        length = num_tokens + remaining
        met = [
            1
            / (
                1
                + exp(
                    min(
                        50,
                        (max(0.0, num_tokens * tpot_s + late_s) + more + remaining * step_s - length * tpot_s) / scale,
                    )
                )
            )
            for step_s, more in ((STEP_S, 0.0), (STEP_S + added_s, delay_s))
            for scale in [TPOT_SPREAD * tpot_s * length]
        ]
        total += met[0] - met[1]
    return total


@given(
    st.lists(st.tuples(st.floats(-0.5, 0.5), st.integers(1, 3000), st.floats(0.01, 0.05)), min_size=1, max_size=20),
    st.sampled_from(GRID_TOKENS.tolist()),
    st.sampled_from(GRID_S.tolist()),
)
def test_harm_is_that_of_every_answer(
    answers: list[tuple[float, int, float]], num_tokens: float, delay_s: float
) -> None:
    """Between the points of the grids it is interpolated."""
    ledger, lengths, now_s, rows = Answers(), Lengths(), 100.0, np.array([3, 4])
    ledger.reserve(9)
    for request_id, (late_s, tokens, tpot_s) in enumerate(answers):
        ledger.add(request_id, 3 + request_id % 2, now_s - tokens * tpot_s - late_s, tokens - 500, tpot_s, 1.0)
    ledger.update(rows, workers(2, 500, now_s), lengths)
    held = answers[::2], answers[1::2]
    harm = [misses(each, lengths, ADDED_S + num_tokens * TOKEN_S, 0.0) for each in held]
    assert ledger.harm(rows, int(num_tokens)) == pytest.approx(harm, abs=1e-9)
    delay_harm = [misses(each, lengths, 0.0, delay_s) for each in held]
    assert ledger.delay_harm(rows, np.array([delay_s, delay_s])) == pytest.approx(delay_harm, abs=1e-9)
    between = ledger.harm(rows, 700)
    assert (between >= ledger.harm(rows, 512) - 1e-9).all()
    assert (between <= ledger.harm(rows, 1024) + 1e-9).all()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9), st.booleans()), max_size=60))
def test_answers_equal_a_recount(events: list[tuple[int, int, bool]]) -> None:
    ledger, held = Answers(), dict[int, tuple[int, int]]()
    for request_id, row, is_over in events:
        if is_over:
            ledger.remove(request_id)
            held.pop(request_id, None)
        else:
            ledger.reserve(row + 1)
            ledger.add(request_id, row, 0.0, request_id, 0.05, 1.0)
            held[request_id] = row, request_id
        num_steps = np.arange(len(ledger._harm), dtype=np.float64)
        tokens = sorted(max(1, row + base) for row, base in held.values())
        assert sorted(ledger.num_tokens(num_steps).tolist()) == tokens
        assert len(ledger) == len(held)
