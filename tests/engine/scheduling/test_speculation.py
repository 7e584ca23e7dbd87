from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from pdserve.contracts.events import RequestKey
from pdserve.contracts.request import GenerationRequest, Grammar, GrammarKind, SamplingParams
from pdserve.contracts.step import ModelLimits, SampledToken, StepOutput
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.speculation import MAX_GUESSES, STEPS_BETWEEN_TRIALS, Choice, Speculation
from pdserve.engine.scheduling.table import PlannedStep, SequenceTable
from pdserve.kv_transfer.block_pool import BlockPool

BLOCK_SIZE = 4


def a_step(*samplings: SamplingParams, acceptance: float = 0.5, max_gap_s: float = 0.0) -> PlannedStep:
    """A decode row for each sampling, of a prompt of 7 tokens of which the last is not computed."""
    limits = ModelLimits(max_model_len=200, vocab_size=100, eos_token_ids=(2,))
    table = SequenceTable(BlockPool(64, BLOCK_SIZE), limits)
    step = table.begin_step()
    for number, sampling in enumerate(samplings):
        request = GenerationRequest(
            request_id=number, prompt_tokens=tuple(range(10, 17)), sampling=sampling, max_gap_s=max_gap_s
        )
        sequence = table.open(RequestKey(0, number, 0), request, 0.0, is_handoff=False)
        assert sequence is not None
        sequence.start_at([], table.pool.allocate(4))
        sequence.num_computed = 6
        sequence.acceptance = acceptance
        step.add_decode(sequence)
    return step


def share_of(sequence: Sequence) -> float:
    assert sequence.acceptance is not None
    return sequence.acceptance


def linear(step_s: float, guess_s: float) -> Speculation:
    seconds: Callable[[int, int], float] = lambda num_guesses, depth: step_s + guess_s * num_guesses  # noqa: E731
    return Speculation(lambda batch: seconds)


LONG = SamplingParams(max_tokens=100)


@pytest.mark.parametrize(
    ("acceptance", "guess_s", "num_guesses"),
    [
        (0.9, 0.0, MAX_GUESSES),
        (0.5, 0.0, 4),  # the fifth is right once in 32 times, and not considered
        (0.9, 0.1, 8),
        (0.7, 0.1, 4),  # 0.7 + 0.49 + 0.343 + 0.24 in 1.4 s: 1.98 tokens/s, and 0.168 of the fifth is below 0.198
        (0.5, 0.1, 2),
        (0.2, 0.1, 1),
        (0.2, 0.3, 0),
        (0.9, 1.0, 0),
    ],
)
def test_guesses_are_made_while_they_raise_tokens_per_second(
    acceptance: float, guess_s: float, num_guesses: int
) -> None:
    choices = linear(1.0, guess_s).choose(a_step(LONG, acceptance=acceptance), 100)
    assert choices == ([Choice(0, num_guesses)] if num_guesses else [])


def test_a_price_that_jumps_is_paid_where_what_follows_is_worth_it() -> None:
    jump = Speculation(lambda batch: lambda num_guesses, depth: 1.0 if not num_guesses else 2.0)
    assert jump.choose(a_step(LONG, acceptance=0.9), 100) == [Choice(0, 8)]
    assert jump.choose(a_step(LONG, acceptance=0.4), 100) == []


def test_a_draft_model_guesses_for_all_rows_at_the_price_of_one() -> None:
    """1.4 tokens in 1.41 s do not pay, 19.2 in 1.52 s do."""
    drafting = Speculation(lambda batch: lambda num_guesses, depth: 1.0 + 0.01 * num_guesses + 0.4 * depth)
    assert drafting.choose(a_step(LONG, acceptance=0.4), 100) == []
    assert drafting.choose(a_step(*[LONG] * 12, acceptance=0.6), 100) == [Choice(row, 1) for row in range(12)]
    two = Speculation(lambda batch: lambda num_guesses, depth: 1.0 + 0.2 * depth)
    assert two.choose(a_step(*[LONG] * 12, acceptance=0.6), 100) == [Choice(row, 2) for row in range(12)]


def test_the_sequences_with_the_most_right_guesses_get_them_first() -> None:
    step = a_step(LONG, LONG, acceptance=0.9)
    step.sequences[0].acceptance = 0.5
    assert linear(1.0, 0.0).choose(step, 3) == [Choice(1, 3)]
    assert linear(1.0, 0.0).choose(step, 7) == [Choice(0, 1), Choice(1, 6)]


@pytest.mark.parametrize(
    ("sampling", "num_guesses"),
    [
        (SamplingParams(max_tokens=1), 0),
        (SamplingParams(max_tokens=2), 1),
        (SamplingParams(max_tokens=100, min_tokens=1), 0),  # the ends are banned before token 0 only
        (SamplingParams(max_tokens=100, min_tokens=4), 3),
        (SamplingParams(max_tokens=2, min_tokens=4), 1),
        (SamplingParams(max_tokens=100, presence_penalty=1.0), 0),
        (SamplingParams(max_tokens=100, logit_bias=((5, 1.0),), num_logprobs=2), 8),
    ],
)
def test_rows_guess_within_what_one_row_can_say(sampling: SamplingParams, num_guesses: int) -> None:
    choices = linear(1.0, 0.0).choose(a_step(sampling, acceptance=0.95), 100)
    assert choices == ([Choice(0, num_guesses)] if num_guesses else [])


def test_a_step_that_prefills_and_a_row_whose_token_is_not_known_have_none() -> None:
    step = a_step(LONG, LONG)
    step.sequences[1].num_pending = 1
    step.add_decode(step.sequences[1])
    assert not step.batch.rows[2].tokens
    assert [choice.row for choice in linear(1.0, 0.0).choose(step, 100)] == [0, 1]
    step.num_chunk_tokens = 20
    assert linear(1.0, 0.0).choose(step, 100) == []


def test_a_step_with_guesses_stays_within_the_longest_gap() -> None:
    assert linear(1.0, 0.1).choose(a_step(LONG, acceptance=0.9, max_gap_s=1.35), 100) == [Choice(0, 3)]
    assert linear(1.0, 0.1).choose(a_step(LONG, acceptance=0.9, max_gap_s=0.5), 100) == []
    step = a_step(LONG, acceptance=0.0, max_gap_s=0.5)
    step.sequences[0].num_plain_steps = STEPS_BETWEEN_TRIALS
    assert linear(1.0, 0.1).choose(step, 100) == []


def test_trials_of_several_sequences_stay_within_the_longest_gap_together() -> None:
    step = a_step(LONG, LONG, LONG, LONG, acceptance=0.0, max_gap_s=1.25)
    for sequence in step.sequences:
        sequence.num_plain_steps = STEPS_BETWEEN_TRIALS
    speculation = linear(1.0, 0.1)
    assert speculation.choose(step, 100) == [Choice(0, 1), Choice(1, 1)]
    assert speculation.choose(step, 100) == [Choice(2, 1), Choice(3, 1)], "the others go next"


def test_a_sequence_without_right_guesses_tries_again_now_and_then() -> None:
    speculation, step = linear(1.0, 0.1), a_step(LONG, acceptance=0.0)
    tries = [bool(speculation.choose(step, 100)) for _ in range(3 * (STEPS_BETWEEN_TRIALS + 1))]
    assert sum(tries) == 3
    assert tries[STEPS_BETWEEN_TRIALS]


def test_a_sequence_is_expected_to_do_as_those_before() -> None:
    speculation, step = linear(1.0, 0.0), a_step(LONG, LONG)
    more: dict[int, list[SampledToken]] = {0: [SampledToken(5, None)] * 8}
    right = StepOutput(step_id=0, sampled=[], num_guesses={0: 8}, more=more, duration_s=0.0)
    wrong = StepOutput(step_id=0, sampled=[], num_guesses={0: 8}, duration_s=0.0)
    for output, least, most in ((right, 0.95, 1.0), (wrong, 0.25, 0.25)):
        for _ in range(400):
            speculation.learn(step.sequences, output)
        step.sequences[1].acceptance = None
        speculation.choose(step, 8)
        assert least <= share_of(step.sequences[1]) <= most


def test_what_a_grammar_may_prescribe_is_guessed_within_the_step_s_bounds() -> None:
    guided = replace(LONG, grammar=Grammar(GrammarKind.REGEX, "a*"))
    step = a_step(guided, LONG, replace(guided, max_tokens=4), replace(guided, presence_penalty=1.0), acceptance=0.0)
    speculation = linear(1.0, 0.1)
    assert speculation.choose(step, 100) == [Choice(0, 0, MAX_GUESSES), Choice(2, 0, 3)]
    assert speculation.choose(step, 10) == [Choice(0, 0, 8), Choice(2, 0, 2)]
    assert speculation.choose(a_step(guided, acceptance=0.5), 100) == [Choice(0, 2, MAX_GUESSES)]
    assert speculation.choose(a_step(guided, acceptance=0.5, max_gap_s=1.4), 100) == [Choice(0, 2, 4)]


def test_what_a_grammar_prescribes_says_nothing_of_other_guesses() -> None:
    speculation, step = linear(1.0, 0.0), a_step(LONG)
    more = {0: [SampledToken(5, None)] * 4}
    output = StepOutput(step_id=0, sampled=[], num_guesses={0: 4}, forced={0}, more=more, duration_s=0.0)
    speculation.learn(step.sequences, output)
    assert (speculation.num_guesses, speculation.num_right, share_of(step.sequences[0])) == (4, 4, 0.5)


def test_shares_follow_what_guesses_came_to() -> None:
    speculation, step = linear(1.0, 0.0), a_step(LONG, LONG, LONG)
    right, wrong, unasked = step.sequences
    more = {0: [SampledToken(5, None)] * 4, 1: []}
    output = StepOutput(step_id=0, sampled=[], num_guesses={0: 4, 1: 4}, more=more, duration_s=0.0)
    for _ in range(20):
        speculation.learn(step.sequences, output)
    assert share_of(right) > 0.99
    assert share_of(wrong) < 0.05
    assert share_of(unasked) == 0.5
    assert (speculation.num_guesses, speculation.num_right) == (160, 80)
    half = StepOutput(step_id=0, sampled=[], num_guesses={2: 4}, more={2: [SampledToken(5, None)]}, duration_s=0.0)
    for _ in range(40):
        speculation.learn(step.sequences, half)
    assert share_of(unasked) == pytest.approx(0.5, abs=0.05)


def test_answers_that_are_too_short_for_a_trial_have_one_in_turn() -> None:
    speculation, tries = linear(1.0, 10.0), 0
    for _ in range(STEPS_BETWEEN_TRIALS):
        short = a_step(LONG)
        short.sequences[0].acceptance = None
        tries += sum(bool(speculation.choose(short, 100)) for _ in range(4))
    assert tries == 3, "one in about 36 of 128 steps"


def ahead(step: PlannedStep) -> PlannedStep:
    """``step`` as it is planned before its tokens are known."""
    step.batch.rows[0].tokens = ()
    return step


def steps_ahead(speculation: Speculation) -> int:
    """Steps that are planned ahead before one that may have guesses."""
    for number in count():
        if speculation.needs_tokens:
            return number
        assert not speculation.choose(ahead(a_step(LONG)), 100)
    raise AssertionError


def test_where_steps_are_planned_ahead_guesses_are_tried_less_often_while_none_is_right() -> None:
    speculation = Speculation(lambda batch: lambda num_guesses, depth: 1.0, plans_ahead=True)
    between = []
    for _ in range(7):
        assert speculation.choose(a_step(LONG), 100), "the executor may find some"
        speculation.learn([], StepOutput(step_id=0, sampled=[], duration_s=0.0))
        between.append(steps_ahead(speculation))
    assert between == [1, 3, 7, 15, 31, 32, 32]
    step = a_step(LONG)
    assert speculation.choose(step, 100)
    speculation.learn(step.sequences, StepOutput(step_id=0, sampled=[], num_guesses={0: 1}, duration_s=0.0))
    assert steps_ahead(speculation) == 32, "it was wrong"
    assert speculation.choose(step, 100)
    right = {0: [SampledToken(5, None)]}
    speculation.learn(step.sequences, StepOutput(step_id=0, sampled=[], num_guesses={0: 1}, more=right, duration_s=0.0))
    assert steps_ahead(speculation) == 0, "the next step may have guesses, too"


def test_steps_are_planned_ahead_while_guesses_do_not_pay_or_prompts_are_computed() -> None:
    speculation = Speculation(lambda batch: lambda num_guesses, depth: 1.0 + 10 * num_guesses, plans_ahead=True)
    assert not speculation.choose(a_step(LONG), 100)
    assert steps_ahead(speculation) == 1
    prefilling = a_step(LONG)
    prefilling.num_chunk_tokens = 20
    assert not speculation.choose(prefilling, 100)
    assert steps_ahead(speculation) == 1 + 3, "the next step may prefill, too, so its tokens are not waited for"


def test_where_no_step_is_planned_ahead_every_step_may_guess() -> None:
    speculation = linear(1.0, 0.0)
    for _ in range(10):
        assert speculation.choose(a_step(LONG), 100)
        speculation.learn([], StepOutput(step_id=0, sampled=[], duration_s=0.0))
        assert speculation.needs_tokens
