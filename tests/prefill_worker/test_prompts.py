from __future__ import annotations

from dataclasses import replace
from itertools import count
from math import inf
from typing import TypeVar

import pytest

from pdserve.contracts.events import PromptLogprobsEvent, RequestEvent, RequestEventKind, RequestKey, TokenEvent
from pdserve.contracts.request import FinishReason, GenerationRequest, SamplingParams
from pdserve.contracts.step import ModelLimits, SampledToken, StepBatch, StepOutput, TokenLogprobs
from pdserve.engine.scheduling.interface import Event, FirstToken, GrantEvent, OfferEvent, WithdrawEvent
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.prefill_worker.parking import FINISHED_OFFER_S
from pdserve.prefill_worker.prompts import DUE_WITHOUT_OBJECTIVE_S

EOS = 2
LIMITS = ModelLimits(max_model_len=64, vocab_size=100, eos_token_ids=(EOS,))
BLOCK_SIZE = 4
PARK_TIMEOUT_S = 30.0

EventT = TypeVar("EventT", bound=Event)


def a_scheduler(pool: BlockPool | None = None, *, max_batch_tokens: int = 16, max_batch_size: int = 8) -> Scheduler:
    numbers = count()
    return Scheduler(
        pool or BlockPool(16, BLOCK_SIZE),
        LIMITS,
        mint_handle=lambda: b"handle-%d" % next(numbers),
        max_batch_tokens=max_batch_tokens,
        max_batch_size=max_batch_size,
        park_timeout_s=PARK_TIMEOUT_S,
    )


def a_request(
    request_id: int,
    num_tokens: int,
    *,
    max_tokens: int = 8,
    ttft_slo_s: float = 0.0,
    patience_s: float = 0.0,
    deadline_s: float = 600.0,
    emitted: tuple[int, ...] = (),
    ignore_eos: bool = False,
    stop_token_ids: tuple[int, ...] = (),
    handoff: bool = True,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_tokens=tuple((10 * request_id + i) % 90 + 5 for i in range(num_tokens)),
        emitted_tokens=emitted,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids),
        ttft_slo_s=ttft_slo_s,
        patience_s=patience_s,
        deadline_s=deadline_s,
        handoff=handoff,
    )


def key_of(request: GenerationRequest) -> RequestKey:
    return RequestKey(0, request.request_id, request.attempt)


def add(scheduler: Scheduler, *requests: GenerationRequest, now_s: float = 0.0) -> None:
    for request in requests:
        scheduler.add(key_of(request), request, now_s)


def step(scheduler: Scheduler, now_s: float = 0.0) -> StepBatch:
    batch = scheduler.plan(now_s)
    assert batch is not None
    return batch


def answer(scheduler: Scheduler, batch: StepBatch, token: int = 50, now_s: float = 0.0) -> None:
    sampled = [SampledToken(token, TokenLogprobs(-1.0, ())) if row.sample else None for row in batch.rows]
    scheduler.complete(StepOutput(step_id=batch.step_id, sampled=sampled, duration_s=0.0), now_s)


def park(scheduler: Scheduler, request: GenerationRequest, now_s: float = 0.0, token: int = 50) -> bytes:
    """Compute the request's whole prompt; returns the handle of the parked prompt."""
    add(scheduler, request, now_s=now_s)
    while (batch := scheduler.plan(now_s)) is not None:
        answer(scheduler, batch, token, now_s=now_s)
    [offer] = only(scheduler.take_events(), OfferEvent)
    return offer.handle


def only(events: list[Event], kind: type[EventT]) -> list[EventT]:
    return [event for event in events if isinstance(event, kind)]


def kinds(events: list[Event]) -> list[RequestEventKind]:
    return [event.kind for event in only(events, RequestEvent)]


def chunks(batch: StepBatch) -> list[tuple[int, int, int]]:
    """(sequence, first position, number of tokens) of each row."""
    return [(row.sequence_id, row.cached_length, row.num_new_tokens) for row in batch.rows]


def test_prompt_logprobs_are_of_the_whole_prompt_and_come_before_token_0() -> None:
    scheduler = a_scheduler(max_batch_tokens=4)
    asking = replace(a_request(0, 10), sampling=SamplingParams(max_tokens=8, num_prompt_logprobs=2))
    add(scheduler, asking)
    for _ in range(3):
        batch = step(scheduler)
        [row] = batch.rows
        assert row.num_prompt_logprobs == 2
        logprobs = {0: [TokenLogprobs(float(-token), ()) for token in row.prompt_targets]}
        sampled = [SampledToken(50, None) if row.sample else None]
        output = StepOutput(step_id=batch.step_id, sampled=sampled, prompt_logprobs=logprobs, duration_s=0.0)
        scheduler.complete(output, 0.0)
    events = scheduler.take_events()
    told = only(events, PromptLogprobsEvent)
    assert [event.first_position for event in told] == [1, 5, 9]
    assert [-entry.logprob for event in told for entry in event.entries] == list(asking.prompt_tokens[1:])
    assert max(map(events.index, told)) < events.index(only(events, TokenEvent)[0])


def test_a_prompt_whose_logprobs_are_wanted_is_written_to_the_prefix_cache_and_not_read_from_it() -> None:
    scheduler = a_scheduler(BlockPool(32, BLOCK_SIZE))
    plain = a_request(0, 10)
    asking = replace(plain, request_id=1, sampling=SamplingParams(max_tokens=8, num_prompt_logprobs=0))
    add(scheduler, asking)
    batch = step(scheduler)
    logprobs = {0: [TokenLogprobs(0.0, ())] * 9}
    sampled: list[SampledToken | None] = [SampledToken(50, None)]
    scheduler.complete(StepOutput(step_id=0, sampled=sampled, prompt_logprobs=logprobs, duration_s=0.0), 0.0)
    add(scheduler, plain)
    cached = step(scheduler)
    answer(scheduler, cached)
    add(scheduler, replace(asking, request_id=2))
    assert [chunks(batch), chunks(cached), chunks(step(scheduler))] == [[(0, 0, 10)], [(1, 8, 2)], [(2, 0, 10)]]


def test_a_prompt_is_computed_in_chunks_and_only_the_last_one_samples() -> None:
    scheduler = a_scheduler(max_batch_tokens=4)
    request = a_request(0, 10)
    add(scheduler, request)
    batches = [step(scheduler)]
    for _ in range(2):
        answer(scheduler, batches[-1])
        batches.append(step(scheduler))
    assert [chunks(batch) for batch in batches] == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 2)]]
    assert [batch.rows[0].sample is not None for batch in batches] == [False, False, True]
    assert batches[2].rows[0].sample_position == 10
    assert [token for batch in batches for token in batch.rows[0].tokens] == list(request.prompt_tokens)
    assert len(batches[0].rows[0].block_table) == 3, "blocks of the whole prompt from the start"


def test_the_budget_is_filled_with_the_next_prompt() -> None:
    scheduler = a_scheduler(max_batch_tokens=12)
    add(scheduler, a_request(0, 10), a_request(1, 10))
    assert chunks(step(scheduler)) == [(0, 0, 10), (1, 0, 2)]


def test_what_is_wanted_first_goes_first_and_equals_keep_their_order() -> None:
    scheduler = a_scheduler(max_batch_tokens=4)
    add(scheduler, a_request(0, 4), a_request(1, 4), a_request(2, 4, ttft_slo_s=1.0), a_request(3, 4, ttft_slo_s=0.5))
    order = []
    for _ in range(4):
        batch = step(scheduler)
        order += [row.sequence_id for row in batch.rows]
        answer(scheduler, batch)
    assert order == [3, 2, 0, 1]


def test_an_urgent_prompt_overtakes_the_chunks_of_a_long_one() -> None:
    scheduler = a_scheduler(max_batch_tokens=4)
    add(scheduler, a_request(0, 12))
    answer(scheduler, step(scheduler))
    add(scheduler, a_request(1, 3, ttft_slo_s=0.1))
    assert chunks(step(scheduler)) == [(1, 0, 3), (0, 4, 1)]


def test_a_prompt_without_objective_is_not_starved() -> None:
    scheduler = a_scheduler(max_batch_tokens=4)
    add(scheduler, a_request(0, 4))
    now_s = 0.0
    for request_id in range(1, 100):
        now_s += 1.0
        add(scheduler, a_request(request_id, 4, ttft_slo_s=0.5), now_s=now_s)
        batch = step(scheduler, now_s)
        answer(scheduler, batch, now_s=now_s)
        for grant in only(scheduler.take_events(), GrantEvent):
            scheduler.released(grant.handle)
        if batch.rows[0].sequence_id == 0:
            break
    assert now_s <= DUE_WITHOUT_OBJECTIVE_S + 1


def test_a_patient_prompt_fills_no_step_of_others() -> None:
    scheduler = a_scheduler(max_batch_tokens=8)
    add(scheduler, a_request(0, 12, patience_s=1.0), a_request(1, 4, patience_s=1.0))
    answer(scheduler, step(scheduler))
    add(scheduler, a_request(2, 3, ttft_slo_s=0.1), a_request(3, 3, ttft_slo_s=0.2), now_s=0.5)
    urgent = step(scheduler, 0.5)
    assert chunks(urgent) == [(2, 0, 3), (3, 0, 3)]
    answer(scheduler, urgent)
    add(scheduler, a_request(4, 3, ttft_slo_s=0.1), now_s=1.0)
    assert chunks(step(scheduler, 1.0)) == [(4, 0, 3), (0, 8, 4), (1, 0, 1)], "it has no patience left"


def test_patient_prompts_are_not_planned_ahead() -> None:
    scheduler = a_scheduler(max_batch_tokens=8)
    add(scheduler, a_request(0, 16, patience_s=1.0))
    first = step(scheduler)
    assert chunks(first) == [(0, 0, 8)]
    assert scheduler.plan(0.0) is None
    add(scheduler, a_request(1, 4, ttft_slo_s=0.1))
    assert chunks(step(scheduler)) == [(1, 0, 4)]
    answer(scheduler, first)
    assert scheduler.plan(0.0) is None
    assert chunks(step(scheduler, 1.0)) == [(0, 8, 8)], "it has no patience left"


def test_token_0_and_the_grants_of_a_handoff() -> None:
    pool = BlockPool(16, BLOCK_SIZE)
    scheduler = a_scheduler(pool, max_batch_tokens=6)
    request = a_request(0, 10)
    add(scheduler, request, now_s=1.0)
    first = step(scheduler, now_s=3.0)
    assert scheduler.take_events() == [
        RequestEvent(key=key_of(request), kind=RequestEventKind.STARTED, num_cached_tokens=0, waited_s=2.0)
    ]
    answer(scheduler, first)
    assert scheduler.take_events() == []
    last = step(scheduler)
    last_chunk, offer, early = scheduler.take_events()
    assert isinstance(last_chunk, RequestEvent)
    assert (last_chunk.kind, last_chunk.handle) == (RequestEventKind.LAST_CHUNK, b"handle-0")
    assert offer == OfferEvent(b"handle-0")
    blocks = tuple(last.rows[0].block_table)
    generations = pool.generations(blocks)
    assert early == GrantEvent(handle=b"handle-0", first_index=0, block_ids=blocks[:1], generations=generations[:1])
    answer(scheduler, last, token=42)
    token, final = scheduler.take_events()
    assert token == TokenEvent(key_of(request), 0, 0, 42, TokenLogprobs(-1.0, ()), FinishReason.NONE)
    assert final == GrantEvent(
        handle=b"handle-0",
        first_index=1,
        block_ids=blocks[1:],
        generations=generations[1:],
        num_tokens=10,
        first_token=FirstToken(42),
    )
    assert scheduler.load().num_parked == 1


def test_grants_follow_the_chunks_one_step_late() -> None:
    scheduler = a_scheduler(max_batch_tokens=4)
    add(scheduler, a_request(0, 8))
    first = step(scheduler)
    last = step(scheduler)
    events = scheduler.take_events()
    assert only(events, OfferEvent)
    assert not only(events, GrantEvent)
    answer(scheduler, first)
    [grant] = only(scheduler.take_events(), GrantEvent)
    assert (grant.first_index, len(grant.block_ids), grant.final) == (0, 1, False)
    answer(scheduler, last)
    [grant] = only(scheduler.take_events(), GrantEvent)
    assert (grant.first_index, len(grant.block_ids), grant.final) == (1, 1, True)


def test_release_demotes_the_blocks_to_cached() -> None:
    pool = BlockPool(16, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    handle = park(scheduler, a_request(0, 10))
    assert pool.num_referenced == 3
    scheduler.released(handle)
    assert kinds(scheduler.take_events()) == [RequestEventKind.RELEASED]
    assert (pool.num_referenced, pool.num_cached) == (0, 2)
    scheduler.released(handle)
    scheduler.cancel(RequestKey(0, 0, 0), 1.0)
    assert scheduler.take_events() == []


def test_a_cached_prefix_is_not_computed_again_and_is_granted_first() -> None:
    scheduler = a_scheduler()
    scheduler.released(park(scheduler, a_request(0, 8)))
    scheduler.take_events()
    add(scheduler, a_request(0, 8, max_tokens=9))
    batch = step(scheduler)
    assert chunks(batch) == [(1, 4, 4)], "the last token is computed again, so one full block is reused"
    started, _, _, grant = scheduler.take_events()
    assert isinstance(started, RequestEvent)
    assert started.num_cached_tokens == 4
    assert isinstance(grant, GrantEvent)
    assert (grant.first_index, grant.block_ids) == (0, (batch.rows[0].block_table[0],))


@pytest.mark.parametrize("num_tokens", [10, 8])
@pytest.mark.parametrize("is_released", [False, True])
def test_a_further_choice_computes_only_the_last_block_of_a_prompt_parked_or_released(
    num_tokens: int, is_released: bool
) -> None:
    pool = BlockPool(16, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    first = a_request(0, num_tokens)
    handle = park(scheduler, first)
    if is_released:
        scheduler.released(handle)
        scheduler.take_events()
    num_full = (num_tokens - 1) // BLOCK_SIZE
    add(scheduler, replace(first, request_id=1, choice=1))
    batch = step(scheduler)
    assert [(row.choice, row.cached_length, row.num_new_tokens) for row in batch.rows] == [
        (1, num_full * BLOCK_SIZE, num_tokens - num_full * BLOCK_SIZE)
    ]
    answer(scheduler, batch, token=51)
    events = scheduler.take_events()
    assert only(events, RequestEvent)[0].num_cached_tokens == num_full * BLOCK_SIZE
    assert [(event.choice, event.token) for event in only(events, TokenEvent)] == [(1, 51)]
    num_blocks = pool.num_blocks_for(num_tokens)
    assert pool.num_referenced == (num_blocks if is_released else num_blocks + 1)


def test_a_replay_computes_what_was_emitted_too_and_counts_on() -> None:
    scheduler = a_scheduler()
    add(scheduler, a_request(0, 5, emitted=(60, 61, 62), max_tokens=4))
    batch = step(scheduler)
    assert list(batch.rows[0].tokens)[5:] == [60, 61, 62]
    assert batch.rows[0].sample_position == 8
    answer(scheduler, batch)
    [token] = only(scheduler.take_events(), TokenEvent)
    assert (token.index, token.finish) == (3, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("request_", "token", "finish"),
    [
        (a_request(0, 6), EOS, FinishReason.STOP),
        (a_request(0, 6, ignore_eos=True), EOS, FinishReason.NONE),
        (a_request(0, 6, stop_token_ids=(33,)), 33, FinishReason.STOP),
        (a_request(0, 6, max_tokens=1), 33, FinishReason.LENGTH),
        (a_request(0, 60, max_tokens=4), 33, FinishReason.NONE),
    ],
)
def test_stop_rules_at_token_0(request_: GenerationRequest, token: int, finish: FinishReason) -> None:
    scheduler = a_scheduler(max_batch_tokens=64)
    add(scheduler, request_)
    answer(scheduler, step(scheduler), token)
    [event] = only(scheduler.take_events(), TokenEvent)
    assert event.finish is finish


@pytest.mark.parametrize(("emitted", "max_tokens"), [((), 1), ((7, 8), 3)])
def test_a_prompt_whose_next_token_is_the_last_is_offered_to_nobody(emitted: tuple[int, ...], max_tokens: int) -> None:
    pool = BlockPool(16, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    add(scheduler, a_request(0, 6, max_tokens=max_tokens, emitted=emitted))
    answer(scheduler, step(scheduler))
    [started, token] = scheduler.take_events()
    assert kinds([started]) == [RequestEventKind.STARTED]
    assert isinstance(token, TokenEvent)
    assert token.finish is FinishReason.LENGTH
    assert pool.num_referenced == 0
    assert scheduler.next_deadline_s() == inf


def test_an_answer_that_ends_with_token_0_frees_everything_but_tells_its_puller() -> None:
    pool = BlockPool(16, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    add(scheduler, a_request(0, 6))
    answer(scheduler, step(scheduler), EOS)
    events = scheduler.take_events()
    [grant] = only(events, GrantEvent)
    assert grant.first_token is not None
    assert (grant.first_token.finish, grant.block_ids) == (FinishReason.STOP, ())
    assert pool.num_referenced == 0
    assert (scheduler.load().num_parked, scheduler.load().num_blocks_parked) == (0, 0)
    assert scheduler.next_deadline_s() == FINISHED_OFFER_S
    assert scheduler.plan(FINISHED_OFFER_S) is None
    assert scheduler.take_events() == [WithdrawEvent(grant.handle)], "the offer is taken back if nobody asks for it"


def test_a_lease_does_not_hold_the_offer_of_an_answer_that_has_ended() -> None:
    scheduler = a_scheduler()
    handle = park(scheduler, a_request(0, 6), token=EOS)
    scheduler.set_leased(handle, True)
    assert scheduler.next_deadline_s() == FINISHED_OFFER_S
    assert scheduler.plan(FINISHED_OFFER_S) is None
    assert scheduler.take_events() == [WithdrawEvent(handle)]
    assert scheduler.next_deadline_s() == inf


def test_a_parked_prompt_that_nobody_pulls_expires() -> None:
    pool = BlockPool(16, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    handle = park(scheduler, a_request(0, 6), now_s=5.0)
    assert scheduler.next_deadline_s() == 5.0 + PARK_TIMEOUT_S
    assert scheduler.plan(4.9 + PARK_TIMEOUT_S) is None
    assert scheduler.take_events() == []
    assert scheduler.plan(5.0 + PARK_TIMEOUT_S) is None
    withdraw, unavailable = scheduler.take_events()
    assert withdraw == WithdrawEvent(handle)
    assert kinds([unavailable]) == [RequestEventKind.KV_UNAVAILABLE]
    assert pool.num_referenced == 0


def test_a_lease_holds_a_prompt_until_it_is_lost() -> None:
    scheduler = a_scheduler()
    handle = park(scheduler, a_request(0, 6))
    scheduler.set_leased(handle, True)
    assert scheduler.plan(2 * PARK_TIMEOUT_S) is None
    assert scheduler.take_events() == []
    scheduler.set_leased(handle, False)
    assert scheduler.plan(2 * PARK_TIMEOUT_S) is None
    assert kinds(scheduler.take_events()) == [RequestEventKind.KV_UNAVAILABLE]


def test_another_puller_may_come_within_the_park_time() -> None:
    scheduler = a_scheduler()
    handle = park(scheduler, a_request(0, 6))
    scheduler.set_leased(handle, True)
    scheduler.set_leased(handle, False)
    scheduler.set_leased(handle, True)
    scheduler.released(handle)
    assert kinds(scheduler.take_events()) == [RequestEventKind.RELEASED]


def test_parked_prompts_hold_at_most_half_of_the_pool() -> None:
    scheduler = a_scheduler(BlockPool(8, BLOCK_SIZE))
    handles = [park(scheduler, a_request(0, 8)), park(scheduler, a_request(1, 8))]
    add(scheduler, a_request(2, 4))
    assert scheduler.plan(0.0) is None
    scheduler.released(handles[0])
    assert chunks(step(scheduler)) == [(2, 0, 4)]


def test_a_prompt_larger_than_half_of_the_pool_runs_when_nothing_is_parked() -> None:
    scheduler = a_scheduler(BlockPool(8, BLOCK_SIZE), max_batch_tokens=64)
    handle = park(scheduler, a_request(0, 4))
    add(scheduler, a_request(1, 30))
    assert scheduler.plan(0.0) is None
    scheduler.released(handle)
    assert chunks(step(scheduler)) == [(1, 0, 30)]


def test_a_prompt_that_lacks_blocks_is_not_overtaken() -> None:
    scheduler = a_scheduler(BlockPool(8, BLOCK_SIZE), max_batch_tokens=64)
    handle = park(scheduler, a_request(0, 12))
    add(scheduler, a_request(1, 20), a_request(2, 4))
    assert scheduler.plan(0.0) is None
    scheduler.released(handle)
    assert [row.sequence_id for row in step(scheduler).rows] == [1]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (a_request(0, 60, max_tokens=5), ("max_model_len 64", "60 prompt tokens", "max_tokens 5")),
        (a_request(0, 40, max_tokens=5), ("10 KV blocks", "has 9", "kv_memory")),
        (a_request(0, 4, max_tokens=2, emitted=(5, 6)), ("nothing to generate",)),
    ],
)
def test_what_can_never_run_is_rejected_with_the_reason(request_: GenerationRequest, words: tuple[str, ...]) -> None:
    scheduler = a_scheduler(BlockPool(9, BLOCK_SIZE))
    add(scheduler, request_)
    [event] = only(scheduler.take_events(), RequestEvent)
    assert event.kind is RequestEventKind.REJECTED
    assert all(word in event.message for word in words), event.message
    assert scheduler.plan(0.0) is None


def test_a_repeated_key_is_ignored() -> None:
    scheduler = a_scheduler()
    add(scheduler, a_request(0, 4), a_request(0, 4))
    assert len(step(scheduler).rows) == 1
    assert scheduler.plan(0.0) is None


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_deadline_fails_a_prompt_that_still_waits(num_steps: int) -> None:
    pool = BlockPool(16, BLOCK_SIZE)
    scheduler = a_scheduler(pool, max_batch_tokens=4)
    add(scheduler, a_request(0, 10, deadline_s=7.0))
    assert scheduler.next_deadline_s() == 7.0
    for _ in range(num_steps):
        answer(scheduler, step(scheduler))
    scheduler.take_events()
    assert scheduler.plan(7.0) is None
    events = scheduler.take_events()
    [failed] = only(events, RequestEvent)
    assert failed.kind is RequestEventKind.FAILED
    assert failed.message.startswith("deadline")
    assert pool.num_referenced == 0
    assert scheduler.next_deadline_s() == inf


def test_a_deadline_ends_no_prompt_that_is_parked() -> None:
    scheduler = a_scheduler()
    park(scheduler, a_request(0, 10, deadline_s=7.0), now_s=6.0)
    assert scheduler.next_deadline_s() == 6.0 + PARK_TIMEOUT_S
    assert scheduler.plan(7.0) is None
    assert scheduler.take_events() == []


def test_resumed_answers_go_before_prompts_that_have_not_begun() -> None:
    scheduler = a_scheduler(max_batch_tokens=8)
    add(scheduler, a_request(0, 6, ttft_slo_s=0.1), now_s=0.0)
    add(scheduler, a_request(1, 6, ttft_slo_s=0.1, emitted=(7,)), a_request(2, 6, emitted=(7,)), now_s=5.0)
    assert [each[0] for each in chunks(step(scheduler, 5.0))] == [1, 2]
    assert [each[0] for each in chunks(step(scheduler, 5.0))] == [2, 0]


def test_of_resumed_answers_the_one_that_has_waited_longest_goes_first() -> None:
    scheduler = a_scheduler(max_batch_tokens=8)
    add(scheduler, a_request(0, 6, emitted=(7,)), now_s=0.0)
    add(scheduler, a_request(1, 6, deadline_s=580.0, emitted=(7,)), now_s=5.0)
    assert [each[0] for each in chunks(step(scheduler, 5.0))] == [1, 0]


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_cancel_frees_a_prompt_wherever_it_is(num_steps: int) -> None:
    pool = BlockPool(16, BLOCK_SIZE)
    scheduler = a_scheduler(pool, max_batch_tokens=4)
    add(scheduler, a_request(0, 10))
    for _ in range(num_steps):
        answer(scheduler, step(scheduler))
    scheduler.take_events()
    scheduler.cancel(RequestKey(0, 0, 0), 0.0)
    events = scheduler.take_events()
    assert kinds(events) == [RequestEventKind.CANCELLED]
    assert len(only(events, WithdrawEvent)) == (num_steps == 3)
    assert pool.num_referenced == 0
    assert scheduler.plan(0.0) is None


def test_blocks_of_a_cancelled_prompt_wait_for_the_step_in_flight() -> None:
    pool = BlockPool(16, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    add(scheduler, a_request(0, 10))
    batch = step(scheduler)
    scheduler.cancel(RequestKey(0, 0, 0), 0.0)
    scheduler.take_events()
    assert pool.num_referenced == 3, "the step still writes to them"
    answer(scheduler, batch)
    assert pool.num_referenced == 0
    assert scheduler.take_events() == []


def test_a_failed_step_fails_its_prompts_and_caches_nothing() -> None:
    pool = BlockPool(16, BLOCK_SIZE)
    scheduler = a_scheduler(pool, max_batch_tokens=8)
    add(scheduler, a_request(0, 10), a_request(1, 4))
    answer(scheduler, step(scheduler))
    batch = step(scheduler)
    scheduler.take_events()
    scheduler.fail_step(batch.step_id, "out of memory", 0.0)
    events = scheduler.take_events()
    assert [(event.kind, event.message) for event in only(events, RequestEvent)] == [
        (RequestEventKind.FAILED, "out of memory")
    ] * 2
    assert len(only(events, WithdrawEvent)) == 2
    assert (pool.num_referenced, pool.num_cached) == (0, 0)


def test_a_failed_row_fails_its_prompt_alone() -> None:
    pool = BlockPool(16, BLOCK_SIZE)
    scheduler = a_scheduler(pool, max_batch_tokens=16)
    add(scheduler, a_request(0, 10), a_request(1, 4))
    batch = step(scheduler)
    scheduler.take_events()
    sampled = [None, SampledToken(50, None)]
    scheduler.complete(StepOutput(step_id=0, sampled=sampled, failed={0: "nan"}, duration_s=0.0), 0.0)
    events = scheduler.take_events()
    assert [(event.key.request_id, event.kind) for event in only(events, RequestEvent)] == [
        (0, RequestEventKind.FAILED)
    ]
    assert len(only(events, WithdrawEvent)) == 1
    assert [grant.final for grant in only(events, GrantEvent)] == [True]
    assert pool.num_referenced == 1
    assert len(batch.rows) == 2


def test_nothing_is_planned_on_top_of_a_step_that_may_fail_too() -> None:
    scheduler = a_scheduler(max_batch_tokens=8)
    add(scheduler, a_request(0, 16))
    first, second = step(scheduler), step(scheduler)
    scheduler.fail_step(first.step_id, "out of memory", 0.0)
    add(scheduler, a_request(1, 4))
    assert scheduler.plan(0.0) is None
    scheduler.fail_step(second.step_id, "out of memory", 0.0)
    assert step(scheduler).step_id == second.step_id + 1


def test_the_load_counts_what_is_to_be_done() -> None:
    scheduler = a_scheduler(max_batch_tokens=8, max_batch_size=1)
    add(scheduler, a_request(0, 10), a_request(1, 5))
    step(scheduler)
    load = scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_parked) == (1, 1, 0)
    assert (load.num_waiting_tokens, load.num_started_tokens, load.num_context_tokens) == (5, 10, 8)
    assert load.num_tokens_in_flight == 8
    assert (load.num_blocks_free, load.num_blocks_referenced) == (13, 3)
