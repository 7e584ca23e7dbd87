"""The cost model's corrections by observed step times."""

from __future__ import annotations

import pytest

from pdserve.contracts.precision import Precision
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import BlockCopy, StepBatch, StepRow
from pdserve.engine.worker.step_times import StepTimes
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware

SHAPE = ModelShape(
    num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512
)
COST = CostModel(SHAPE, hardware("h100-sxm"), Precision(dtype="bfloat16"))


def a_batch(*rows: tuple[int, int]) -> StepBatch:
    """Rows of (new tokens, cached tokens)."""
    return StepBatch(
        step_id=1,
        rows=[
            StepRow(
                sequence_id=n, tokens=[1] * num_new, cached_length=num_cached, block_table=[], sample=SamplingParams()
            )
            for n, (num_new, num_cached) in enumerate(rows)
        ],
    )


@pytest.mark.parametrize("rows", [[(1, 100), (1, 7), (1, 31)], [(1, 100), (40, 0), (24, 16)]])
def test_a_step_is_predicted_by_the_cost_model(rows: list[tuple[int, int]]) -> None:
    assert StepTimes(COST).predict(a_batch(*rows)).predicted_s == pytest.approx(COST.step_s(rows))


def test_prefill_and_decode_are_corrected_apart() -> None:
    times = StepTimes(COST)
    decode, prefill = (
        times.predict(batch)._replace(predicted_s=0.1) for batch in (a_batch((1, 100)), a_batch((1, 100), (40, 0)))
    )
    for _ in range(100):
        times.observe(decode, 2 * decode.predicted_s)
        times.observe(prefill, prefill.predicted_s / 2)
    assert times.decode.factor == pytest.approx(2, rel=0.01)
    assert times.prefill.factor == pytest.approx(0.5, rel=0.01)
    assert times.corrected_s(decode) == pytest.approx(2 * decode.predicted_s, rel=0.01)


def test_steps_with_guesses_are_corrected_beside_others_of_as_many_tokens() -> None:
    times, batch = StepTimes(COST), a_batch((1, 100), (1, 50))
    plain = times.predict(batch)
    more = [(1, 100), (1, 50), *[(1, 0)] * 60]
    assert COST.guesses_s(2, 60) == pytest.approx(COST.step_s(more) - plain.predicted_s, rel=1e-4)
    with_guesses_s = plain.predicted_s + COST.guesses_s(2, 60)
    assert times.by_guesses(batch)(0, 1) == plain.predicted_s
    assert times.by_guesses(batch)(60, 1) == with_guesses_s
    for _ in range(100):
        times.observe(plain, 2 * plain.predicted_s)
    assert times.by_guesses(batch)(60, 1) == pytest.approx(2 * with_guesses_s), "others are not known yet"
    for number in range(200):
        times.observe(plain, 3 * with_guesses_s * (1.1 if number % 2 else 0.9), guesses=[60])
    assert times.by_guesses(batch)(0, 1) == pytest.approx(2 * plain.predicted_s)
    assert times.by_guesses(batch)(60, 1) == pytest.approx(3 * with_guesses_s, rel=0.02)
    assert times.by_guesses(batch)(59, 1) == pytest.approx(times.by_guesses(batch)(60, 1), rel=0.03), "about as many"
    corrected = times.decode.factor
    times.observe(plain, 1000 * with_guesses_s, guesses=[60])
    assert times.by_guesses(batch)(60, 1) < 3.3 * with_guesses_s, "a stall says little"
    assert times.decode.factor == corrected


def test_the_first_step_of_as_many_tokens_may_have_been_stalled_too() -> None:
    times, batch = StepTimes(COST), a_batch((1, 100), (1, 50))
    plain, seconds = times.predict(batch), times.by_guesses(batch)
    times.observe(plain, plain.predicted_s)
    expected_s = seconds(4, 4)
    times.observe(plain, 1000 * expected_s, guesses=[4])
    assert seconds(4, 4) <= 2 * expected_s


def test_the_time_of_a_draft_model_is_learned_by_guesses_of_a_row() -> None:
    times, batch = StepTimes(COST, COST), a_batch((1, 100), (1, 50))
    plain, drafted_s = times.predict(batch), COST.decode_s(2, 0)
    assert times.by_guesses(batch)(4, 3) == pytest.approx(StepTimes(COST).by_guesses(batch)(4, 3) + 3 * drafted_s)
    for _ in range(100):
        times.observe(plain, plain.predicted_s + COST.guesses_s(2, 4), [3, 1], 3 * 1.5 * drafted_s)
    with_one, with_three = (times.by_guesses(batch)(4, depth) for depth in (1, 3))
    assert with_three - with_one == pytest.approx(2 * 1.5 * drafted_s, rel=0.01)


def test_guesses_are_chosen_though_steps_take_no_time() -> None:
    times, batch = StepTimes(COST), a_batch((1, 100))
    times.observe(times.predict(batch), 0.0)
    assert times.by_guesses(batch)(0, 1) > 0


def test_steps_that_do_more_than_compute_tokens_say_nothing_of_others() -> None:
    times = StepTimes(COST)
    prompt_logprobs = a_batch((1, 100), (40, 0))
    prompt_logprobs.rows[1].prompt_targets = [1] * 39
    copies_only = StepBatch(step_id=1, rows=[], swap_outs=[BlockCopy(0, 0)])
    both = a_batch((1, 100))
    both.swap_ins.append(BlockCopy(0, 0))
    for batch in (copies_only, both, prompt_logprobs):
        times.observe(times.predict(batch), 1.0)
    assert times.decode.factor == times.prefill.factor == 1
