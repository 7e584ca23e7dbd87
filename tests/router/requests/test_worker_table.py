"""What the table learns about steps from the snapshots of a worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.placement import WorkerRole
from pdserve.router.requests.policy import WorkerSnapshot
from pdserve.router.requests.worker_table import WorkerTable
from tests.router.requests.test_policy import COST, COSTS, worker

NUM_ANSWERS, NUM_CONTEXT_TOKENS = 30, 20_000
STEP_S = COST.decode_s(NUM_ANSWERS, NUM_CONTEXT_TOKENS)


def decoder(num_steps: int, stepped_s: float, correction: float = 1.0) -> WorkerSnapshot:
    return worker(
        "decode-0",
        WorkerRole.DECODE,
        num_decoding=NUM_ANSWERS,
        num_context_tokens=NUM_CONTEXT_TOKENS,
        decode_correction=correction,
        num_steps=num_steps,
        stepped_s=stepped_s,
    )


def predicted_s(table: WorkerTable, snapshot: WorkerSnapshot) -> float:
    """Seconds of a step, after ``snapshot``."""
    return float(table.columns(table.rows([snapshot])).step_s[0])


@given(st.floats(0.5, 2.0), st.lists(st.integers(0, 20), max_size=20))
def test_steps_that_were_seen_correct_what_the_worker_reports(correction: float, steps: list[int]) -> None:
    """However many end between two snapshots."""
    table, num_steps = WorkerTable(COSTS), 0
    assert predicted_s(table, decoder(0, 0.0, correction)) == pytest.approx(STEP_S * correction)
    table.answer_began(0, 0)
    for num_new in [*steps, *[7, 0] * 200]:
        num_steps += num_new
        now_s = (num_steps + 0.5 * (num_new == 0)) * STEP_S  # what was sent changes between two steps
        seen_s = predicted_s(table, decoder(num_steps, now_s, correction))
    assert seen_s == pytest.approx(STEP_S, rel=0.03)


def test_time_without_answers_is_no_part_of_a_step() -> None:
    table, num_steps, now_s = WorkerTable(COSTS), 0, 0.0
    for _ in range(50):
        for has_answer in (False, True, True, False):
            if has_answer:
                table.answer_began(0, num_steps)
            for _ in range(3):
                num_steps, now_s = num_steps + 1, now_s + STEP_S
                assert predicted_s(table, decoder(num_steps, now_s)) == pytest.approx(STEP_S)
            if has_answer:
                table.answer_left(0, was_last=True)
            now_s += 10.0
            assert predicted_s(table, decoder(num_steps, now_s - 10.0)) == pytest.approx(STEP_S)


def test_prompts_computed_beside_answers_are_no_part_of_a_step() -> None:
    table, now_s = WorkerTable(COSTS), 0.0
    table.rows([decoder(0, 0.0)])
    table.answer_began(0, 0)
    for num_steps in range(1, 1000):
        now_s += STEP_S
        if num_steps % 10 == 5:
            table.prefills(0, 0.1)
            now_s += 0.1
        seen_s = predicted_s(table, decoder(num_steps, now_s))
    assert seen_s == pytest.approx(STEP_S)


def test_a_worker_that_starts_anew_counts_its_steps_from_0() -> None:
    table = WorkerTable(COSTS)
    table.rows([decoder(500, 5.0)])
    table.answer_began(0, 500)
    for num_steps, stepped_s in ((501, 5.1), (3, 20.0)):
        assert predicted_s(table, decoder(num_steps, stepped_s)) == pytest.approx(STEP_S)
