"""A worker in the eyes of the goodput policy: prompts in order, steps, and what more work would do to its answers."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware, slowed
from pdserve.router.requests.goodput_rules import TPOT_SPREAD
from pdserve.router.requests.least_time import predict_ttft_s
from pdserve.router.requests.lengths import Lengths
from pdserve.router.requests.placement import WorkerSnapshot
from pdserve.router.requests.worker_view import Answers, Prompts, WorkerView
from tests.router.requests.test_least_time import COST, COSTS, SHAPE, worker

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


def began(view: WorkerView, num_steps: int) -> None:
    """An answer decodes on the worker."""
    view.answer_began(1, 0.0, 0.0, 1.0, 1.0, num_steps)


def step_s(view: WorkerView, snapshot: WorkerSnapshot) -> float:
    """Predicted seconds of a step, after ``snapshot``."""
    view.update(snapshot)
    return view.step_s


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 99), st.sampled_from(["a", "b", None]))))
def test_the_queue_of_a_worker_equals_a_recount(prompts: list[tuple[int, int, str | None]]) -> None:
    queue, held = Prompts(), dict[int, tuple[float, int, str | None]]()
    for number, (due_s, num_tokens, share) in enumerate(prompts):
        queue.remove(number % 9)
        queue.add(number % 9, due_s, num_tokens, num_tokens / 7, share)
        held[number % 9] = float(due_s), num_tokens, share
        if number % 4 == 3:
            queue.remove(number % 5)
            held.pop(number % 5, None)
        assert len(queue) == len(held)
        for limit_s in range(-1, 6):
            assert queue.num_tokens_after(limit_s) == sum(num for due_s, num, _ in held.values() if due_s > limit_s)
        for each in "ab":
            of_share = [(due_s, num / 7) for due_s, num, share in held.values() if share == each]
            seconds, last_due_s = queue.share_s(each)
            assert seconds == pytest.approx(sum(num for _, num in of_share))
            assert last_due_s >= max((due_s for due_s, _ in of_share), default=last_due_s)
    for number in range(9):
        queue.remove(number)
    assert queue.num_tokens_after(-1.0) == 0
    assert queue.share_s("a") == queue.share_s("b") == (0.0, -float("inf"))


@given(st.lists(st.tuples(st.integers(0, 70), st.booleans()), max_size=200))
def test_answers_equal_a_recount(events: list[tuple[int, bool]]) -> None:
    answers, held = Answers(), set[int]()
    for request_id, is_over in events:
        if request_id in held:
            answers.remove(request_id)
            held.discard(request_id)
        if not is_over:
            answers.add(request_id, 0.0, request_id, 0.05, 1.0)
            held.add(request_id)
        assert sorted(answers.num_tokens(3).tolist()) == sorted(request_id + 3 for request_id in held)
        assert len(answers) == len(held)


def misses(answers: list[tuple[float, int, float, float]], lengths: Lengths, step_s: float) -> float:
    """Expected ones, times weight, answer by answer, if steps take ``step_s``."""
    total = 0.0
    for late_s, num_tokens, tpot_s, weight in answers:
        remaining = lengths.remaining[max(1, num_tokens)]
        objective_s = (max(1, num_tokens) + remaining) * tpot_s
        needs_s = max(0.0, num_tokens * tpot_s + late_s) + remaining * step_s
        total += weight / (1 + exp(min(50, (objective_s - needs_s) / (TPOT_SPREAD * objective_s))))
    return total


@given(
    st.lists(
        st.tuples(st.floats(-0.5, 0.5), st.integers(-1, 3000), st.floats(0.01, 0.05), st.floats(0, 1)),
        min_size=1,
        max_size=40,
    ),
    st.floats(0, 0.01),
    st.floats(0, 0.01),
)
def test_misses_are_those_of_every_answer(
    answers: list[tuple[float, int, float, float]], before_s: float, more_s: float
) -> None:
    view, lengths, now_s = WorkerView(decoder(500, 100.0), COSTS), Lengths(), 100.0
    assert view.misses_of_steps(0.0, 1.0, lengths) == view.misses_of_delay(1.0, lengths) == 0.0
    for request_id, (late_s, tokens, tpot_s, weight) in enumerate(answers):
        view.answer_began(request_id, now_s - tokens * tpot_s - late_s, tokens - 500, tpot_s, weight, 500)
    before, after = (misses(answers, lengths, view.step_s + each) for each in (before_s, before_s + more_s))
    assert view.misses_of_steps(before_s, before_s + more_s, lengths) == pytest.approx(after - before, abs=1e-9)


@pytest.mark.parametrize(
    ("num_tokens", "num_behind", "share"),
    [(1, 2.5, 0), (1, 3.5, 0.5), (1, 2000, 1), (9, 3.5, 0), (9, 900, 0), (9, 999, 1)],
)
def test_a_delay_is_missed_by_answers_too_short_to_make_up_for_it(
    num_tokens: int, num_behind: float, share: float
) -> None:
    """Half of them end after 4 tokens, so that a mean one would make up for much more."""
    view, lengths = WorkerView(decoder(0, 0.0), COSTS), Lengths()
    for number in range(4000):
        lengths.add(4 if number % 2 else 1000)
    lengths.count([])
    view.answer_began(1, 0.0, num_tokens, 2 * STEP_S, 0.7, 0)
    assert view.misses_of_delay((num_behind + 2 * num_tokens) * STEP_S, lengths) == pytest.approx(0.7 * share, abs=0.02)


def test_a_step_that_was_seen_and_an_answer_that_came_or_went_change_what_more_would_cost() -> None:
    view, lengths = WorkerView(decoder(0, 0.0), COSTS), Lengths()
    for request_id in range(2):
        view.answer_began(request_id, 0.0, 1.0, 1.5 * STEP_S, 1.0, 0)
    first = view.misses_of_delay(2.0, lengths)
    view.answer_began(2, 0.0, 1.0, 1.5 * STEP_S, 1.0, 0)
    assert view.misses_of_delay(2.0, lengths) == pytest.approx(1.5 * first)
    view.answer_left(0)
    assert view.misses_of_delay(2.0, lengths) == pytest.approx(first)
    view.update(decoder(1, 1.0))
    assert view.misses_of_delay(2.0, lengths) != pytest.approx(first)


def test_prompts_behind_do_not_delay_but_those_in_flight() -> None:
    snapshot = worker("prefill-0", num_waiting_tokens=9000, num_tokens_in_flight=2000)
    view = WorkerView(snapshot, COSTS)
    for num_behind, num_ahead in ((0, 9000), (3000, 6000), (8000, 2000)):
        expected = predict_ttft_s(snapshot._replace(num_waiting_tokens=num_ahead), 500, 100, COST)
        assert view.ttft_s(500, 100, num_behind=num_behind) == expected


def test_answers_from_before_it_became_a_prefill_worker_delay_prompts() -> None:
    snapshot = decoder(0, 0.0)._replace(role=WorkerRole.PREFILL)
    view = WorkerView(snapshot, COSTS)
    assert view.ttft_s(500, 100) == predict_ttft_s(snapshot._replace(num_decoding=0), 500, 100, COST)
    for request_id in range(NUM_ANSWERS):
        view.answer_began(request_id, 0.0, 1.0, 1.0, 1.0, 0)
    assert view.ttft_s(500, 100) == predict_ttft_s(decoder(0, 0.0), 500, 100, COST) > 0


@given(st.floats(0.5, 2.0), st.lists(st.integers(0, 20), max_size=20))
def test_steps_that_were_seen_correct_what_the_worker_reports(correction: float, steps: list[int]) -> None:
    """However many end between two snapshots."""
    view, num_steps = WorkerView(decoder(0, 0.0, correction), COSTS), 0
    assert view.step_s == pytest.approx(STEP_S * correction)
    began(view, 0)
    for num_new in [*steps, *[7, 0] * 200]:
        num_steps += num_new
        now_s = (num_steps + 0.5 * (num_new == 0)) * STEP_S  # what was sent changes between two steps
        seen_s = step_s(view, decoder(num_steps, now_s, correction))
    assert seen_s == pytest.approx(STEP_S, rel=0.03)


def test_time_without_answers_is_no_part_of_a_step() -> None:
    view, num_steps, now_s = WorkerView(decoder(0, 0.0), COSTS), 0, 0.0
    for _ in range(50):
        for has_answer in (False, True, True, False):
            if has_answer:
                began(view, num_steps)
            for _ in range(3):
                num_steps, now_s = num_steps + 1, now_s + STEP_S
                assert step_s(view, decoder(num_steps, now_s)) == pytest.approx(STEP_S)
            if has_answer:
                view.answer_left(1)
            now_s += 10.0
            assert step_s(view, decoder(num_steps, now_s - 10.0)) == pytest.approx(STEP_S)


def test_prompts_computed_beside_answers_are_no_part_of_a_step() -> None:
    view, now_s = WorkerView(decoder(0, 0.0), COSTS), 0.0
    began(view, 0)
    for num_steps in range(1, 1000):
        now_s += STEP_S
        if num_steps % 10 == 5:
            view.prefill_beside(0.1, now_s, 1.0)
            now_s += 0.1
        seen_s = step_s(view, decoder(num_steps, now_s))
    assert seen_s == pytest.approx(STEP_S)


def test_a_worker_that_starts_anew_counts_its_steps_from_0() -> None:
    view = WorkerView(decoder(500, 5.0), COSTS)
    began(view, 500)
    for num_steps, stepped_s in ((501, 5.1), (3, 20.0)):
        assert step_s(view, decoder(num_steps, stepped_s)) == pytest.approx(STEP_S)


def test_prefills_beside_answers_are_forgotten() -> None:
    view = WorkerView(decoder(0, 0.0), COSTS)
    view.prefill_beside(1.0, 0.0, 5.0)
    view.prefill_beside(1.0, 5.0, 5.0)
    assert view.recent_prefill_s(10.0, 5.0) == pytest.approx(exp(-1) + exp(-2))


def test_a_worker_with_another_role_is_predicted_by_its_costs() -> None:
    slow = CostModel(SHAPE, slowed(hardware("h100-sxm"), 2.0), Precision(dtype="bfloat16"), transport="nccl")
    view = WorkerView(decoder(0, 0.0), {WorkerRole.DECODE: COST, WorkerRole.PREFILL: slow})
    assert view.prefill_s(1000, 0) == COST.prompt_s(1000, 0, view.snapshot.max_batch_tokens)
    view.update(decoder(0, 0.0)._replace(role=WorkerRole.PREFILL))
    assert view.role is WorkerRole.PREFILL
    assert view.prefill_s(1000, 0) == slow.prompt_s(1000, 0, view.snapshot.max_batch_tokens)


def test_a_new_prefill_worker_is_watched_while_answers_decode_there() -> None:
    view = WorkerView(decoder(0, 0.0), COSTS)
    began(view, 0)
    for num_steps in range(1, 1000):
        seen_s = step_s(view, decoder(num_steps, 2 * num_steps * STEP_S)._replace(role=WorkerRole.PREFILL))
    assert seen_s == pytest.approx(2 * STEP_S, rel=0.05), "its steps take longer than predicted"
    assert view.misses_of_delay(1e4, Lengths()) > 0
    view.answer_left(1)
    view.update(decoder(2000, 0.0)._replace(role=WorkerRole.PREFILL))
    assert view.step_s == seen_s, "nothing that decodes there is expected"
