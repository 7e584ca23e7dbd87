"""Several choices on a worker that only prefills: one prompt, parked once, with a first token of each choice."""

from __future__ import annotations

from dataclasses import replace

from pdserve.contracts.request import FinishReason, GenerationRequest
from pdserve.contracts.step import SampledToken, StepBatch, StepOutput
from pdserve.engine.scheduler import FirstToken, GrantEvent, RequestEventKind, TokenEvent
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.prefill_worker.scheduler import PrefillScheduler
from tests.prefill_worker.test_scheduler import (
    BLOCK_SIZE,
    EOS,
    a_request,
    a_scheduler,
    add,
    answer,
    key_of,
    kinds,
    only,
    step,
)


def choices_request(num_choices: int) -> GenerationRequest:
    return replace(a_request(0, 6), num_choices=num_choices)


def answer_choices(scheduler: PrefillScheduler, batch: StepBatch, *tokens: int) -> None:
    """The batch's one row samples a token for each choice."""
    [row] = batch.rows
    assert row.num_choices == len(tokens)
    first, *others = [SampledToken(token, None) for token in tokens]
    scheduler.complete(StepOutput(step_id=batch.step_id, sampled=[first], forks={0: others}, duration_s=0.0), 0.0)


def test_a_prompt_is_parked_once_with_the_first_token_of_every_choice() -> None:
    pool = BlockPool(16, BLOCK_SIZE)
    scheduler = a_scheduler(pool, max_batch_size=1, max_batch_tokens=4)
    request = choices_request(3)
    add(scheduler, request)
    chunk = step(scheduler)
    assert chunk.rows[0].num_choices == 1, "only the last chunk samples"
    answer(scheduler, chunk)
    scheduler.take_events()
    answer_choices(scheduler, step(scheduler), 42, EOS, 43)
    events = scheduler.take_events()
    key = key_of(request)
    assert only(events, TokenEvent) == [
        TokenEvent(key, 0, 0, 42, None, FinishReason.NONE),
        TokenEvent(key, 1, 0, EOS, None, FinishReason.STOP),
        TokenEvent(key, 2, 0, 43, None, FinishReason.NONE),
    ]
    early, grant = only(events, GrantEvent)
    assert early.first_tokens == ()
    assert grant.first_tokens == (FirstToken(42), FirstToken(EOS, FinishReason.STOP), FirstToken(43))
    assert (grant.final, grant.num_tokens, len(grant.block_ids)) == (True, 6, 1)
    assert pool.num_referenced == 2, "the prompt's blocks, once"
    scheduler.released(grant.handle, 0.0)
    assert kinds(scheduler.take_events()) == [RequestEventKind.RELEASED]
    assert pool.num_referenced == 0


def test_a_request_ends_here_when_every_choice_ends_with_token_0() -> None:
    pool = BlockPool(16, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    add(scheduler, choices_request(2))
    answer_choices(scheduler, step(scheduler), EOS, EOS)
    events = scheduler.take_events()
    assert [event.ends_request for event in only(events, TokenEvent)] == [False, True]
    [grant] = only(events, GrantEvent)
    assert (grant.block_ids, [first.finish for first in grant.first_tokens]) == ((), [FinishReason.STOP] * 2)
    assert pool.num_referenced == 0


def test_a_choice_cancelled_before_token_0_is_not_emitted_and_nobody_goes_on_with_it() -> None:
    scheduler = a_scheduler()
    request = choices_request(2)
    add(scheduler, request)
    batch = step(scheduler)
    scheduler.cancel(key_of(request), 0.0, (0,))
    scheduler.take_events()
    answer_choices(scheduler, batch, 42, 43)
    events = scheduler.take_events()
    assert [event.choice for event in only(events, TokenEvent)] == [1]
    [grant] = only(events, GrantEvent)
    assert [first.finish for first in grant.first_tokens] == [FinishReason.STOP, FinishReason.NONE]
    scheduler.cancel(key_of(request), 0.0, (1,))
    assert kinds(scheduler.take_events()) == [RequestEventKind.CANCELLED]
