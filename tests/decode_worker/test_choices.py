"""Several choices on a worker that decodes: one pull or one prefill for all, then a sequence of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.contracts.request import FinishReason, GenerationRequest
from pdserve.contracts.step import BlockCopy, SampledToken, StepBatch, StepOutput
from pdserve.decode_worker.scheduler import DecodeScheduler
from pdserve.decode_worker.swapping import SwapSpace
from pdserve.engine.scheduler import FirstToken, PullResult, RequestEvent, RequestEventKind, TokenEvent
from pdserve.kv_transfer.block_pool import BlockPool
from tests.decode_worker.test_scheduler import (
    BLOCK_SIZE,
    EOS,
    a_request,
    a_scheduler,
    add,
    answer,
    key_of,
    kinds,
    only,
    prepare,
    start_pulls,
    step,
)

GONE_ON = FinishReason.NONE


def choices_request(request_id: int, num_tokens: int, num_choices: int, *, max_tokens: int = 8) -> GenerationRequest:
    return replace(a_request(request_id, num_tokens, max_tokens=max_tokens), num_choices=num_choices)


def join(scheduler: DecodeScheduler, request: GenerationRequest, *first: FirstToken) -> None:
    """The request's prompt is pulled with these first tokens; by default 40, 41 and so on."""
    [pull] = start_pulls(scheduler, request)
    tokens = first or tuple(FirstToken(40 + choice) for choice in range(request.num_choices))
    result = PullResult(pull_id=pull.pull_id, num_tokens=pull.num_tokens, first_tokens=tokens)
    scheduler.pull_done(result, 0.0)


def answer_forking(scheduler: DecodeScheduler, batch: StepBatch, *tokens: int) -> None:
    """The batch's one row samples a token for each of its choices."""
    [row] = batch.rows
    assert row.num_choices == len(tokens)
    first, *others = [SampledToken(token, None) for token in tokens]
    scheduler.complete(StepOutput(step_id=batch.step_id, sampled=[first], forks={0: others}, duration_s=0.0), 0.0)


def tokens_of(scheduler: DecodeScheduler) -> list[tuple[int, int, int, bool]]:
    """(choice, index, token, whether the request ends with it) of every token since the last look."""
    events = only(scheduler.take_events(), TokenEvent)
    return [(event.choice, event.index, event.token, event.ends_request) for event in events]


def test_one_pull_serves_all_choices_which_join_once() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    request = choices_request(0, 10, 3)
    [pull] = start_pulls(scheduler, request)
    assert (len(pull.block_ids), pull.num_tokens) == (3, 10)
    assert pool.num_referenced == 4 + 2 * 2, "the prompt, and head-room of every choice"
    first = tuple(map(FirstToken, (40, 41, 42)))
    scheduler.pull_done(PullResult(pull_id=pull.pull_id, num_tokens=10, first_tokens=first), 5.0)
    assert scheduler.take_events() == [RequestEvent(key=key_of(request), kind=RequestEventKind.JOINED, waited_s=5.0)]
    assert pool.num_referenced == 4 + 2 * 2
    batch = step(scheduler)
    assert [(row.choice, list(row.tokens), row.cached_length, row.num_choices) for row in batch.rows] == [
        (0, [40], 10, 1),
        (1, [41], 10, 1),
        (2, [42], 10, 1),
    ]
    original = batch.rows[0].block_table[2]
    assert batch.block_copies == [BlockCopy(original, row.block_table[2]) for row in batch.rows[1:]]
    assert step(scheduler).block_copies == [], "once each"


def test_the_copied_block_is_kept_until_the_step_that_copies_it_has_ended() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    request = choices_request(0, 10, 2)
    join(scheduler, request)
    batch = step(scheduler)
    source = batch.block_copies[0].source
    scheduler.cancel(key_of(request), 0.0, (0,))
    assert pool.num_unreferenced([source]) == 0
    answer(scheduler, batch)
    assert pool.num_unreferenced([source]) == 1


def test_choices_that_ended_with_token_0_do_not_go_on() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    stop = FirstToken(EOS, FinishReason.STOP)
    join(scheduler, choices_request(0, 10, 3), stop, FirstToken(41), stop)
    assert kinds(scheduler.take_events())[-1] is RequestEventKind.JOINED
    batch = step(scheduler)
    assert [(row.choice, list(row.tokens)) for row in batch.rows] == [(1, [41])]
    answer(scheduler, batch, EOS)
    assert tokens_of(scheduler) == [(1, 1, EOS, True)]
    assert pool.num_referenced == 0


def test_a_request_all_of_whose_choices_ended_with_token_0_is_released() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    [pull] = start_pulls(scheduler, choices_request(0, 10, 2))
    first = (FirstToken(EOS, FinishReason.STOP), FirstToken(EOS, FinishReason.STOP))
    scheduler.pull_done(PullResult(pull_id=pull.pull_id, first_tokens=first), 0.0)
    assert kinds(scheduler.take_events()) == [RequestEventKind.RELEASED]
    assert pool.num_referenced == 0


@pytest.mark.parametrize("num_first", [0, 1, 3])
def test_a_source_must_have_a_first_token_of_every_choice(num_first: int) -> None:
    scheduler = a_scheduler()
    [pull] = start_pulls(scheduler, choices_request(0, 10, 2))
    first = (FirstToken(40),) * num_first
    scheduler.pull_done(PullResult(pull_id=pull.pull_id, num_tokens=10, first_tokens=first), 0.0)
    [event] = only(scheduler.take_events(), RequestEvent)
    assert (event.kind, event.message) == (
        RequestEventKind.KV_UNAVAILABLE,
        f"verify: {num_first} first tokens for 2 choices",
    )


def test_a_local_prompt_is_computed_once_and_its_first_choice_does_not_wait() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    add(scheduler, choices_request(0, 10, 3, max_tokens=3))
    prompt = step(scheduler)
    assert [(row.num_new_tokens, row.choice, row.num_choices) for row in prompt.rows] == [(10, 0, 3)]
    ahead = step(scheduler)
    assert [(row.choice, row.previous_row, row.num_choices) for row in ahead.rows] == [(0, 0, 1)]
    answer_forking(scheduler, prompt, 50, 51, 52)
    assert tokens_of(scheduler) == [(0, 0, 50, False), (1, 0, 51, False), (2, 0, 52, False)]
    answer(scheduler, ahead, 60)
    both = step(scheduler)
    assert [(row.choice, list(row.tokens), row.cached_length) for row in both.rows] == [
        (0, [60], 11),
        (1, [51], 10),
        (2, [52], 10),
    ]
    assert len(both.block_copies) == 2
    answer(scheduler, both, 61)
    assert tokens_of(scheduler) == [(0, 1, 60, False), (0, 2, 61, False), (1, 1, 61, False), (2, 1, 61, False)]
    answer(scheduler, step(scheduler), 62)
    assert tokens_of(scheduler) == [(1, 2, 62, False), (2, 2, 62, True)]
    assert pool.num_referenced == 0


def test_a_choice_frees_its_blocks_when_it_ends_and_the_request_ends_with_the_last() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    request = choices_request(0, 10, 2)
    join(scheduler, request)
    batch = step(scheduler)
    held = pool.num_referenced
    sampled: list[SampledToken | None] = [SampledToken(EOS, None), SampledToken(50, None)]
    scheduler.complete(StepOutput(step_id=batch.step_id, sampled=sampled, duration_s=0.0), 0.0)
    assert tokens_of(scheduler) == [(0, 1, EOS, False), (1, 1, 50, False)]
    assert pool.num_referenced == held - 2, "its last block and head-room; full blocks are shared"
    scheduler.cancel(key_of(request), 0.0)
    assert kinds(scheduler.take_events()) == [RequestEventKind.CANCELLED]
    assert pool.num_referenced == 0


def test_two_choices_that_end_in_one_step_end_the_request_once() -> None:
    scheduler = a_scheduler()
    join(scheduler, choices_request(0, 10, 2))
    scheduler.take_events()
    answer(scheduler, step(scheduler), EOS)
    assert tokens_of(scheduler) == [(0, 1, EOS, False), (1, 1, EOS, True)]


# Cancels of single choices


def test_a_running_choice_is_cancelled_alone() -> None:
    scheduler = a_scheduler()
    request = choices_request(0, 10, 3)
    join(scheduler, request)
    scheduler.take_events()
    scheduler.cancel(key_of(request), 0.0, (1, 9))
    assert scheduler.take_events() == []
    assert [row.choice for row in step(scheduler).rows] == [0, 2]
    scheduler.cancel(key_of(request), 0.0, (0, 2))
    assert kinds(scheduler.take_events()) == [RequestEventKind.CANCELLED]
    scheduler.cancel(key_of(request), 0.0, (0,))
    assert scheduler.take_events() == []


@pytest.mark.parametrize("dropped", [0, 1])
def test_a_choice_cancelled_before_its_pull_is_done_never_starts(dropped: int) -> None:
    scheduler = a_scheduler()
    request = choices_request(0, 10, 2)
    [pull] = start_pulls(scheduler, request)
    scheduler.cancel(key_of(request), 0.0, (dropped,))
    first = (FirstToken(40), FirstToken(41))
    scheduler.pull_done(PullResult(pull_id=pull.pull_id, num_tokens=10, first_tokens=first), 0.0)
    assert kinds(scheduler.take_events())[-1] is RequestEventKind.JOINED
    assert [row.choice for row in step(scheduler).rows] == [1 - dropped]


def test_a_choice_cancelled_while_its_prompt_is_computed_is_not_emitted() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    request = choices_request(0, 10, 2, max_tokens=1)
    add(scheduler, request)
    prompt = step(scheduler)
    scheduler.cancel(key_of(request), 0.0, (0,))
    answer_forking(scheduler, prompt, 50, 51)
    assert tokens_of(scheduler) == [(1, 0, 51, True)]
    assert pool.num_referenced == 0


# Ends of the whole request


def test_a_failed_step_fails_every_choice() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool, max_batch_tokens=64)
    request = choices_request(0, 10, 3)
    add(scheduler, request)
    prompt, ahead = step(scheduler), step(scheduler)
    answer_forking(scheduler, prompt, 50, 51, 52)
    scheduler.take_events()
    assert [row.choice for row in ahead.rows] == [0]
    scheduler.fail_step(ahead.step_id, "broken", 0.0)
    [event] = only(scheduler.take_events(), RequestEvent)
    assert (event.kind, event.message) == (RequestEventKind.FAILED, "broken")
    assert scheduler.plan(0.0) is None
    assert pool.num_referenced == 0


def test_a_deadline_ends_all_choices_also_when_the_first_is_over() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    request = replace(choices_request(0, 10, 3), deadline_s=9.0)
    join(scheduler, request)
    scheduler.cancel(key_of(request), 0.0, (0,))
    scheduler.take_events()
    assert scheduler.next_deadline_s() == 9.0
    assert scheduler.plan(9.0) is None
    assert kinds(scheduler.take_events()) == [RequestEventKind.FAILED]
    assert scheduler.next_deadline_s() is None
    assert pool.num_referenced == 0


# Seats, blocks, preemption


@pytest.mark.parametrize("is_pulled", [True, False])
def test_a_request_takes_a_seat_for_each_of_its_choices(is_pulled: bool) -> None:
    scheduler = a_scheduler(max_batch_size=4)
    requests = [choices_request(0, 5, 3), choices_request(1, 5, 2), choices_request(2, 5, 1)]
    if is_pulled:
        join(scheduler, requests[0])
        prepare(scheduler, *requests[1:])
        scheduler.plan(0.0)
        started = [event.key.request_id for event in only(scheduler.take_events(), RequestEvent)]
        assert started == [0], "JOINED; and the last does not overtake the second"
    else:
        add(scheduler, *requests)
        assert [row.sequence_id for row in step(scheduler).rows] == [0]


@pytest.mark.parametrize(
    ("request_", "pool_blocks", "words"),
    [
        (choices_request(0, 5, 5), 64, ("5 choices", "at most 4", "max_batch_size")),
        (choices_request(0, 8, 4, max_tokens=100), 64, ("4 choices", "66 KV blocks", "kv_memory")),
        (replace(choices_request(0, 5, 2), emitted_tokens=(7,)), 64, ("2 choices", "1 emitted")),
    ],
)
def test_what_can_never_fit_is_rejected_with_a_remedy(
    request_: GenerationRequest, pool_blocks: int, words: tuple[str, ...]
) -> None:
    scheduler = a_scheduler(BlockPool(pool_blocks, BLOCK_SIZE), max_batch_size=4)
    add(scheduler, request_)
    prepare(scheduler, request_)
    events = only(scheduler.take_events(), RequestEvent)
    assert [event.kind for event in events] == [RequestEventKind.REJECTED] * 2
    assert all(word in event.message for event in events for word in words), events[0].message


def test_the_last_choice_is_preempted_alone_and_resumes_from_the_shared_prefix() -> None:
    pool = BlockPool(42, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    request = choices_request(0, 10, 2, max_tokens=100)
    join(scheduler, request)
    scheduler.take_events()
    tokens: dict[int, list[int]] = {0: [], 1: []}
    seen: list[RequestEventKind] = []
    recomputed = []
    while (batch := scheduler.plan(0.0)) is not None:
        recomputed += [row.cached_length for row in batch.rows if row.num_new_tokens > 1]
        answer(scheduler, batch)
        events = scheduler.take_events()
        seen += kinds(events)
        for event in only(events, TokenEvent):
            tokens[event.choice].append(event.index)
    assert seen[:2] == [RequestEventKind.PREEMPTED, RequestEventKind.RESUMED]
    assert recomputed[0] >= 8, "the prompt's full blocks are still here"
    assert tokens == {0: list(range(1, 100)), 1: list(range(1, 100))}
    assert pool.num_referenced == 0


def test_nobody_is_preempted_before_the_last_arrivals_are_known() -> None:
    """The request that came last is about to become several sequences: these are to go first."""
    pool = BlockPool(34, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    join(scheduler, choices_request(0, 7, 1, max_tokens=70))
    for _ in range(4):
        answer(scheduler, step(scheduler))
    add(scheduler, choices_request(1, 5, 2, max_tokens=10))
    prompt = step(scheduler)
    pool.allocate(pool.num_available)
    ahead = step(scheduler)
    assert scheduler.load().num_preemptions == 0
    assert [row.sequence_id for row in ahead.rows] == [1], "the older one waits a step for its block"
    sampled = [SampledToken(50, None), SampledToken(51, None)]
    output = StepOutput(step_id=prompt.step_id, sampled=[*sampled], forks={1: [SampledToken(52, None)]}, duration_s=0.0)
    scheduler.complete(output, 0.0)
    answer(scheduler, ahead)
    assert [row.sequence_id for row in step(scheduler).rows] == [0, 1]
    assert scheduler.load().num_preemptions == 1


def test_a_choice_whose_block_is_not_copied_yet_is_recomputed_not_swapped() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool, swap_space=SwapSpace(num_slots=64, is_cheaper=lambda num_tokens, num_cached: True))
    join(scheduler, choices_request(0, 7, 1, max_tokens=70))
    for _ in range(4):
        answer(scheduler, step(scheduler))
    join(scheduler, choices_request(1, 5, 2, max_tokens=70))
    pool.allocate(pool.num_available)
    batch = step(scheduler)
    assert [row.sequence_id for row in batch.rows] == [0, 1]
    assert scheduler.load().num_preemptions == 1
    assert (batch.block_copies, batch.swap_outs) == ([], [])
