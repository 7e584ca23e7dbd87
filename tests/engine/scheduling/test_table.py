from __future__ import annotations

from math import inf

import pytest

from pdserve.contracts.events import RequestEvent, RequestEventKind, RequestKey, TokenEvent
from pdserve.contracts.request import FinishReason, GenerationRequest, SamplingParams
from pdserve.contracts.step import ModelLimits, SampledToken, StepOutput
from pdserve.engine.scheduling.interface import FirstToken
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.table import PlannedStep, SequenceTable
from pdserve.kv_transfer.block_pool import BlockPool

BLOCK_SIZE = 4
SAMPLING = SamplingParams(max_tokens=3)


def a_table() -> SequenceTable:
    limits = ModelLimits(max_model_len=64, vocab_size=100, eos_token_ids=(2,))
    return SequenceTable(BlockPool(8, BLOCK_SIZE), limits)


def open_with_blocks(
    table: SequenceTable, request_id: int = 0, num_tokens: int = 6, sampling: SamplingParams = SAMPLING
) -> Sequence:
    prompt = tuple(range(10 * request_id + 10, 10 * request_id + 10 + num_tokens))
    request = GenerationRequest(request_id=request_id, prompt_tokens=prompt, sampling=sampling)
    sequence = table.open(RequestKey(0, request_id, 0), request, 0.0, is_handoff=False)
    assert sequence is not None
    sequence.start_at([], table.pool.allocate(table.pool.num_blocks_for(num_tokens + 2)))
    return sequence


def commit_chunk(table: SequenceTable, sequence: Sequence, num_tokens: int) -> PlannedStep:
    step = table.begin_step()
    step.add_chunk(sequence, num_tokens)
    assert table.commit(step) is step.batch
    return step


def output_of(step: PlannedStep, *tokens: int | None) -> StepOutput:
    sampled = [None if token is None else SampledToken(token, None) for token in tokens]
    return StepOutput(step_id=step.batch.step_id, sampled=sampled, duration_s=0.0)


def test_full_blocks_are_known_once_written_not_when_planned() -> None:
    table = a_table()
    sequence = open_with_blocks(table)
    step = commit_chunk(table, sequence, 5)
    hashes = sequence.block_hashes(1)
    assert table.pool.match_prefix(hashes) == []
    assert table.complete(output_of(step, None)) == []
    assert table.pool.match_prefix(hashes) == [*sequence.block_table[:1]]


def test_a_pending_token_is_named_by_its_row_and_known_one_step_later() -> None:
    table = a_table()
    other, sequence = open_with_blocks(table, 0), open_with_blocks(table, 1)
    first = table.begin_step()
    first.add_chunk(other, 3)
    first.add_chunk(sequence, 6)
    table.commit(first)
    second = table.begin_step()
    second.add_decode(sequence)
    table.commit(second)
    assert [(row.previous_row, row.cached_length, row.sample_position) for row in second.batch.rows] == [(1, 6, 7)]
    table.complete(output_of(first, None, 40))
    assert sequence.tokens[-1] == 40
    third = table.begin_step()
    third.add_decode(sequence)
    assert third.batch.rows[0].previous_row == 0
    assert table.events == [TokenEvent(sequence.key, 0, 0, 40, None, FinishReason.NONE)]


def test_finished_rows_are_reported_and_emitted() -> None:
    table = a_table()
    sequence = open_with_blocks(table)
    step = commit_chunk(table, sequence, 6)
    [result] = table.complete(output_of(step, 2))
    assert result == (sequence, FirstToken(2, FinishReason.STOP))
    table.close(sequence)
    assert table.pool.num_referenced == 0
    assert table.get(sequence.key) is None


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_blocks_retire_when_the_last_step_that_writes_to_them_ends(is_cancelled: bool) -> None:
    table = a_table()
    sequence = open_with_blocks(table)
    first, second = commit_chunk(table, sequence, 3), commit_chunk(table, sequence, 2)
    if is_cancelled:
        table.close(sequence)
    else:
        table.retire(sequence)
    assert table.num_retiring == 1
    table.complete(output_of(first, None))
    assert (table.num_retiring, table.pool.num_referenced) == (1, 2)
    table.complete(output_of(second, None))
    assert (table.num_retiring, table.pool.num_referenced) == (0, 0)
    assert table.pool.num_cached == (not is_cancelled)
    table.pool.check_integrity()


def test_a_failed_step_reports_the_living_and_holds_planning_until_the_next_has_ended() -> None:
    table = a_table()
    alive, cancelled = open_with_blocks(table, 0), open_with_blocks(table, 1)
    first = table.begin_step()
    first.add_chunk(alive, 6)
    first.add_chunk(cancelled, 6)
    table.commit(first)
    second = commit_decode(table, alive)
    table.close(cancelled)
    held = [table.must_drain]
    assert table.fail_step(first.batch.step_id) == [alive]
    held.append(table.must_drain)
    table.close(alive)
    assert table.fail_step(second.batch.step_id) == []
    held.append(table.must_drain)
    assert held == [False, True, False]
    assert (table.pool.num_referenced, table.pool.num_cached) == (0, 0)


def commit_decode(table: SequenceTable, sequence: Sequence) -> PlannedStep:
    step = table.begin_step()
    step.add_decode(sequence)
    table.commit(step)
    return step


def test_an_empty_step_is_none_and_takes_no_number() -> None:
    table = a_table()
    assert table.commit(table.begin_step()) is None
    sequence = open_with_blocks(table)
    assert commit_chunk(table, sequence, 1).batch.step_id == 0


def test_results_must_come_in_order() -> None:
    table = a_table()
    sequence = open_with_blocks(table)
    commit_chunk(table, sequence, 2)
    second = commit_chunk(table, sequence, 2)
    with pytest.raises(AssertionError, match="ended before"):
        table.complete(output_of(second, None))


def test_what_is_past_its_deadline_is_named_until_it_is_closed() -> None:
    table = a_table()
    assert (table.deadlines.first_instant_s(), table.deadlines.first_due(1e9)) == (inf, None)
    sequence = open_with_blocks(table)
    deadline_s = sequence.request.deadline_s
    assert table.deadlines.first_instant_s() == deadline_s
    assert table.deadlines.first_due(deadline_s - 1) is None
    assert table.deadlines.first_due(deadline_s) is table.get(sequence.key)
    table.close(sequence)
    assert table.deadlines.first_due(deadline_s) is None


def test_events_are_taken_once() -> None:
    table = a_table()
    table.emit(RequestKey(0, 0, 0), RequestEventKind.FAILED, "no")
    assert [event.message for event in table.take_events() if isinstance(event, RequestEvent)] == ["no"]
    assert table.take_events() == []


def test_ends_are_banned_by_position_so_that_late_results_make_no_difference() -> None:
    table = a_table()
    sampling = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=(7,), ignore_eos=True)
    sequence = open_with_blocks(table, sampling=sampling)
    steps = [commit_chunk(table, sequence, 3), commit_chunk(table, sequence, 3)]
    table.complete(output_of(steps[0], None))
    steps.append(commit_decode(table, sequence))
    table.complete(output_of(steps[1], 40))
    steps.append(commit_decode(table, sequence))
    assert [list(step.batch.rows[0].banned_tokens) for step in steps] == [[], [2, 7], [2, 7], []]


def test_an_end_outside_the_vocabulary_needs_no_ban() -> None:
    limits = ModelLimits(max_model_len=64, vocab_size=100, eos_token_ids=(2, 100))
    sequence = open_with_blocks(SequenceTable(BlockPool(8, BLOCK_SIZE), limits), sampling=SamplingParams(min_tokens=1))
    assert sequence.early_end_ids == (2,)


def test_a_replay_counts_what_it_emitted_towards_the_minimum() -> None:
    table = a_table()
    request = GenerationRequest(
        request_id=0, prompt_tokens=(1, 3), emitted_tokens=(4, 5), sampling=SamplingParams(max_tokens=5, min_tokens=3)
    )
    sequence = table.open(RequestKey(0, 0, 0), request, 0.0, is_handoff=False)
    assert sequence is not None
    assert [sequence.banned_at(position) for position in (4, 5)] == [(2,), ()]


def test_history_is_given_to_rows_that_sample_with_penalties() -> None:
    table = a_table()
    sequence = open_with_blocks(table, sampling=SamplingParams(max_tokens=3, presence_penalty=1))
    other = open_with_blocks(table, 1)
    chunk = commit_chunk(table, sequence, 3)
    step = table.begin_step()
    step.add_chunk(sequence, 3)
    step.add_chunk(other, 6)
    table.commit(step)
    assert [list(row.history) for row in (*chunk.batch.rows, *step.batch.rows)] == [[], list(range(10, 16)), []]
    table.complete(output_of(chunk, None))
    table.complete(output_of(step, 40, 50))
    [row] = commit_decode(table, sequence).batch.rows
    assert (list(row.history), row.num_prompt_tokens) == ([*range(10, 16), 40], 6)


def guessing_step(table: SequenceTable, sequence: Sequence, num_guesses: int) -> PlannedStep:
    """A decode step, after a chunk of the prompt that sampled token 40."""
    chunk = commit_chunk(table, sequence, 6)
    table.complete(output_of(chunk, 40))
    step = table.begin_step()
    step.add_decode(sequence)
    step.allow_guesses(0, num_guesses)
    assert table.commit(step) is step.batch
    table.take_events()
    return step


def output_of_run(step: PlannedStep, *tokens: int) -> StepOutput:
    first, *more = [SampledToken(token, None) for token in tokens]
    return StepOutput(step_id=step.batch.step_id, sampled=[first], more={0: more}, duration_s=0.0)


def test_a_row_may_guess_as_far_as_its_blocks_reach() -> None:
    table = a_table()
    sequence = open_with_blocks(table)
    step = guessing_step(table, sequence, 8)
    [row] = step.batch.rows
    assert (row.cached_length, len(row.block_table), row.max_guesses) == (6, 2, 1)
    assert list(row.history) == sequence.tokens
    assert table.is_guessing
    table.complete(output_of(step, 50))
    assert not table.is_guessing


def test_a_step_has_guesses_if_a_row_before_its_last_has() -> None:
    table = a_table()
    first, last = (open_with_blocks(table, number) for number in range(2))
    for sequence in (first, last):
        table.complete(output_of(commit_chunk(table, sequence, 6), 40))
    step = table.begin_step()
    step.add_decode(first)
    step.add_decode(last)
    step.allow_guesses(0, 1)
    step.allow_guesses(1, 0)
    assert [row.max_guesses for row in step.batch.rows] == [1, 0]
    assert step.batch.may_guess


def test_a_run_is_emitted_in_order_and_goes_on_from_its_last_token() -> None:
    table = a_table()
    sequence = open_with_blocks(table, num_tokens=6, sampling=SamplingParams(max_tokens=20))
    sequence.block_table.extend(table.pool.allocate(2))
    step = guessing_step(table, sequence, 8)
    assert table.complete(output_of_run(step, 50, 51, 52, 53)) == []
    assert [(event.index, event.token) for event in table.take_events() if isinstance(event, TokenEvent)] == [
        (1, 50),
        (2, 51),
        (3, 52),
        (4, 53),
    ]
    assert sequence.num_written == sequence.num_computed == 10
    assert (sequence.num_pending, sequence.num_uncomputed) == (0, 1)
    step = table.begin_step()
    step.add_decode(sequence)
    [row] = step.batch.rows
    assert (list(row.tokens), row.cached_length, row.sample_position) == ([53], 10, 11)


def test_only_blocks_whose_tokens_are_all_known_to_be_right_are_cached() -> None:
    table = a_table()
    sequence = open_with_blocks(table, sampling=SamplingParams(max_tokens=20))
    sequence.block_table.extend(table.pool.allocate(2))
    step = guessing_step(table, sequence, 8)
    table.complete(output_of_run(step, 50))  # guesses filled the blocks, and the first was wrong
    assert sequence.num_registered_blocks == 1
    step = table.begin_step()
    step.add_decode(sequence)
    step.allow_guesses(0, 8)
    table.commit(step)
    table.complete(output_of_run(step, 51, 52, 53, 54))
    assert sequence.num_registered_blocks == 2
    assert table.pool.match_prefix(sequence.block_hashes(2)) == [*sequence.block_table[:2]]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_an_answer_ends_at_any_place_of_a_run(finish: FinishReason, place: int) -> None:
    table = a_table()
    is_stop = finish is FinishReason.STOP
    sequence = open_with_blocks(table, sampling=SamplingParams(max_tokens=20 if is_stop else 2 + place))
    sequence.block_table.extend(table.pool.allocate(2))
    step = guessing_step(table, sequence, 8)
    tokens = [50, 51, 52, 53]
    if is_stop:
        tokens[place] = 2
    [(ended, _)] = table.complete(output_of_run(step, *tokens))
    assert ended is sequence
    events = [event for event in table.take_events() if isinstance(event, TokenEvent)]
    assert [event.token for event in events] == tokens[: place + 1]
    assert [event.finish for event in events] == [FinishReason.NONE] * place + [finish]
    assert sequence.num_written == 7 + place
    table.close(sequence)
    assert table.pool.num_referenced == 0


def test_the_results_of_a_cancelled_row_with_guesses_are_dropped() -> None:
    table = a_table()
    sequence = open_with_blocks(table)
    step = guessing_step(table, sequence, 1)
    table.close(sequence)
    assert table.complete(output_of_run(step, 50, 51)) == []
    assert table.take_events() == []
    assert table.pool.num_referenced == 0
