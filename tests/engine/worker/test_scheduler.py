from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from math import inf
from typing import TypeVar

import pytest

from pdserve.contracts.block_hash import block_hashes
from pdserve.contracts.events import RefusalCode, RequestEvent, RequestEventKind, RequestKey, TokenEvent
from pdserve.contracts.request import FinishReason, GenerationRequest, KvSource, SamplingParams
from pdserve.contracts.step import ModelLimits, SampledToken, StepBatch, StepOutput
from pdserve.decode_worker.gap_limit import MixedSeconds
from pdserve.decode_worker.swapping import NO_SWAP_SPACE, SwapSpace
from pdserve.engine.scheduling.interface import (
    AbortPullEvent,
    Event,
    FirstToken,
    OfferEvent,
    PullResult,
    StartPullEvent,
)
from pdserve.engine.scheduling.sequence import LOOKAHEAD_TOKENS
from pdserve.engine.scheduling.speculation import Speculation
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.kv_transfer.block_pool import BlockPool

EOS = 2
LIMITS = ModelLimits(max_model_len=400, vocab_size=100, eos_token_ids=(EOS,))
BLOCK_SIZE = 4
SOURCE = KvSource(address="there", worker_epoch=1, handle=b"handle")

EventT = TypeVar("EventT", bound=Event)


def a_scheduler(
    pool: BlockPool | None = None,
    *,
    max_batch_tokens: int = 64,
    max_batch_size: int = 8,
    swap_space: SwapSpace = NO_SWAP_SPACE,
    mixed_s: MixedSeconds | None = None,
    speculation: Speculation | None = None,
) -> Scheduler:
    numbers = count()
    return Scheduler(
        pool or BlockPool(64, BLOCK_SIZE),
        LIMITS,
        mint_handle=lambda: b"handle-%d" % next(numbers),
        max_batch_tokens=max_batch_tokens,
        max_batch_size=max_batch_size,
        swap_space=swap_space,
        mixed_s=mixed_s,
        speculation=speculation,
    )


def a_request(
    request_id: int, num_tokens: int, *, max_tokens: int = 8, emitted: tuple[int, ...] = (), deadline_s: float = 600.0
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_tokens=tuple((10 * request_id + i) % 90 + 5 for i in range(num_tokens)),
        emitted_tokens=emitted,
        sampling=SamplingParams(max_tokens=max_tokens),
        deadline_s=deadline_s,
    )


def key_of(request: GenerationRequest) -> RequestKey:
    return RequestKey(0, request.request_id, request.attempt)


def add(scheduler: Scheduler, *requests: GenerationRequest) -> None:
    for request in requests:
        scheduler.add(key_of(request), request, 0.0)


def prepare(scheduler: Scheduler, *requests: GenerationRequest) -> None:
    for request in requests:
        scheduler.prepare(key_of(request), request, SOURCE, 0.0)


def step(scheduler: Scheduler, now_s: float = 0.0) -> StepBatch:
    batch = scheduler.plan(now_s)
    assert batch is not None
    return batch


def answer(scheduler: Scheduler, batch: StepBatch, token: int = 50) -> None:
    sampled = [SampledToken(token, None) if row.sample else None for row in batch.rows]
    scheduler.complete(StepOutput(step_id=batch.step_id, sampled=sampled, duration_s=0.0), 0.0)


def only(events: list[Event], kind: type[EventT]) -> list[EventT]:
    return [event for event in events if isinstance(event, kind)]


def kinds(events: list[Event]) -> list[RequestEventKind]:
    return [event.kind for event in only(events, RequestEvent)]


def start_pulls(scheduler: Scheduler, *requests: GenerationRequest) -> list[StartPullEvent]:
    prepare(scheduler, *requests)
    scheduler.plan(0.0)
    return only(scheduler.take_events(), StartPullEvent)


def join(scheduler: Scheduler, *requests: GenerationRequest) -> list[StartPullEvent]:
    """Pull the requests' prompts; each has 40 as its first token."""
    pulls = start_pulls(scheduler, *requests)
    assert len(pulls) == len(requests)
    for pull in pulls:
        scheduler.pull_done(
            PullResult(pull_id=pull.pull_id, num_tokens=pull.num_tokens, first_token=FirstToken(40)), 0.0
        )
    scheduler.take_events()
    return pulls


def sequence_ids(batch: StepBatch) -> list[int]:
    return [row.sequence_id for row in batch.rows]


# Pulls


def test_a_pull_may_wait_as_long_as_its_request_for_a_last_chunk_that_takes_minutes() -> None:
    [pull] = start_pulls(a_scheduler(), a_request(0, 10, deadline_s=300.0))
    assert pull.deadline_s == 300.0


def test_a_pull_reserves_the_whole_prompt_and_head_room_at_once() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    request = a_request(0, 10)
    scheduler.prepare(key_of(request), request, SOURCE, 1.0)
    assert scheduler.plan(3.0) is None
    started, pull = scheduler.take_events()
    assert started == RequestEvent(key=key_of(request), kind=RequestEventKind.STARTED, waited_s=2.0)
    assert isinstance(pull, StartPullEvent)
    assert (pull.source, pull.num_cached_blocks, len(pull.block_ids), pull.num_tokens) == (SOURCE, 0, 3, 10)
    assert pool.num_referenced == 4
    assert 0 < pull.deadline_s <= 598


@pytest.mark.parametrize("num_tokens", [10, 8])
def test_a_further_choice_pulls_only_the_partly_filled_block(num_tokens: int) -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    first = a_request(0, num_tokens)
    join(scheduler, first)
    [pull] = start_pulls(scheduler, replace(first, request_id=1, choice=1))
    assert (pull.num_cached_blocks, len(pull.block_ids)) == (2, num_tokens // 10)
    scheduler.pull_done(PullResult(pull_id=pull.pull_id, num_tokens=num_tokens, first_token=FirstToken(41)), 0.0)
    batch = step(scheduler)
    assert [(row.choice, list(row.tokens), row.cached_length) for row in batch.rows] == [
        (0, [], num_tokens + 1),
        (1, [41], num_tokens),
    ]
    tables = [row.block_table for row in batch.rows]
    assert tables[0][:2] == tables[1][:2]
    assert not {*tables[0][2:]} & {*tables[1][2:]}


def test_a_first_token_that_ends_the_answer_here_is_not_decoded_on() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    [pull] = start_pulls(scheduler, a_request(0, 10, max_tokens=1))
    scheduler.pull_done(PullResult(pull_id=pull.pull_id, num_tokens=10, first_token=FirstToken(40)), 0.0)
    assert kinds(scheduler.take_events()) == [RequestEventKind.RELEASED]
    assert pool.num_referenced == 0


def test_a_source_must_have_a_first_token() -> None:
    scheduler = a_scheduler()
    [pull] = start_pulls(scheduler, a_request(0, 10))
    scheduler.pull_done(PullResult(pull_id=pull.pull_id, num_tokens=10), 0.0)
    [event] = only(scheduler.take_events(), RequestEvent)
    assert (event.kind, event.message) == (RequestEventKind.KV_UNAVAILABLE, "verify: the source granted no first token")


def test_a_pulled_sequence_decodes_from_the_first_token_without_repeating_it() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    request = a_request(0, 10, emitted=(30, 31))
    [pull] = start_pulls(scheduler, request)
    scheduler.pull_done(PullResult(pull_id=pull.pull_id, num_tokens=12, first_token=FirstToken(40)), 5.0)
    assert scheduler.take_events() == [RequestEvent(key=key_of(request), kind=RequestEventKind.JOINED, waited_s=5.0)]
    [row] = step(scheduler).rows
    assert (list(row.tokens), row.cached_length, row.sample_position) == ([40], 12, 13)
    scheduler.complete(StepOutput(step_id=0, sampled=[SampledToken(41, None)], duration_s=0.0), 0.0)
    assert scheduler.take_events() == [TokenEvent(key_of(request), 0, 3, 41, None, FinishReason.NONE)]
    hashes = block_hashes((*request.prompt_tokens, 30, 31), BLOCK_SIZE)
    assert pool.match_prefix(hashes) == list(row.block_table[:3]), "pulled blocks are shared with others"


def test_blocks_that_are_here_already_are_not_pulled() -> None:
    scheduler = a_scheduler()
    [first] = join(scheduler, a_request(0, 8))
    same_prompt = replace(a_request(0, 8), request_id=1)
    [second] = start_pulls(scheduler, same_prompt)
    assert (second.num_cached_blocks, second.block_ids, second.num_tokens) == (2, (), 8)
    assert len(first.block_ids) == 2


def test_a_request_that_ended_with_its_first_token_is_released() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    [pull] = start_pulls(scheduler, a_request(0, 10))
    scheduler.pull_done(PullResult(pull_id=pull.pull_id, first_token=FirstToken(EOS, FinishReason.STOP)), 0.0)
    assert kinds(scheduler.take_events()) == [RequestEventKind.RELEASED]
    assert scheduler.plan(0.0) is None
    assert (pool.num_referenced, pool.num_cached) == (0, 0)


@pytest.mark.parametrize(("stage", "refusal"), [("refused", "SOURCE"), ("aborted", "SOURCE"), ("copy", "NONE")])
def test_a_failed_pull_tells_a_refusal_of_the_source_from_a_broken_link(stage: str, refusal: str) -> None:
    scheduler = a_scheduler(BlockPool(64, BLOCK_SIZE))
    [pull] = start_pulls(scheduler, a_request(0, 10))
    scheduler.pull_done(PullResult(pull_id=pull.pull_id, failure="whatever it says", failure_stage=stage), 0.0)
    [event] = scheduler.take_events()
    assert isinstance(event, RequestEvent)
    assert event.refusal is RefusalCode[refusal]


@pytest.mark.parametrize("failure", ["copy: broken", ""])
def test_a_failed_pull_caches_nothing(failure: str) -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    [pull] = start_pulls(scheduler, a_request(0, 10))
    scheduler.pull_done(
        PullResult(pull_id=pull.pull_id, failure=failure, num_tokens=9, first_token=FirstToken(40)), 0.0
    )
    [event] = scheduler.take_events()
    assert kinds([event]) == [RequestEventKind.KV_UNAVAILABLE]
    assert isinstance(event, RequestEvent)
    assert event.message == (failure or "verify: KV of 9 tokens for a prompt of 10")
    assert (pool.num_referenced, pool.num_cached) == (0, 0)


@pytest.mark.parametrize("failure", ["aborted", ""])
def test_targets_of_a_cancelled_pull_stay_reserved_until_it_has_ended(failure: str) -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    request = a_request(0, 10)
    [pull] = start_pulls(scheduler, request)
    scheduler.cancel(key_of(request), 0.0)
    events = scheduler.take_events()
    assert kinds(events) == [RequestEventKind.CANCELLED]
    assert only(events, AbortPullEvent) == [AbortPullEvent(pull.pull_id)]
    assert pool.num_referenced == 4
    scheduler.pull_done(PullResult(pull_id=pull.pull_id, failure=failure, num_tokens=10), 0.0)
    assert scheduler.take_events() == []
    assert (pool.num_referenced, pool.num_cached) == (0, 0)


def test_a_waiting_reservation_can_be_cancelled() -> None:
    scheduler = a_scheduler()
    request = a_request(0, 10)
    prepare(scheduler, request)
    scheduler.cancel(key_of(request), 0.0)
    scheduler.cancel(key_of(request), 0.0)
    assert scheduler.plan(0.0) is None
    assert kinds(scheduler.take_events()) == [RequestEventKind.CANCELLED]


def test_reservations_are_served_in_order_and_hold_nothing_while_they_wait() -> None:
    pool = BlockPool(32, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    [pull] = start_pulls(scheduler, a_request(0, 80, max_tokens=20))
    prepare(scheduler, a_request(1, 40, max_tokens=20), a_request(2, 4, max_tokens=4))
    held = pool.num_referenced
    assert scheduler.plan(0.0) is None
    assert scheduler.take_events() == []
    assert pool.num_referenced == held
    assert scheduler.load().num_waiting == 2
    scheduler.pull_done(PullResult(pull_id=pull.pull_id, failure="copy"), 0.0)
    scheduler.plan(0.0)
    started = [event.key.request_id for event in only(scheduler.take_events(), RequestEvent) if event.waited_s == 0]
    assert started[-2:] == [1, 2]


# Decode


def test_two_steps_in_flight_refer_to_the_row_before() -> None:
    scheduler = a_scheduler()
    join(scheduler, a_request(0, 5), a_request(1, 5))
    first, second = step(scheduler), step(scheduler)
    assert [(list(row.tokens), row.previous_row) for row in first.rows] == [([40], -1)] * 2
    assert [(list(row.tokens), row.previous_row) for row in second.rows] == [([], 0), ([], 1)]
    assert [row.cached_length for row in second.rows] == [6, 6]
    answer(scheduler, first)
    third = step(scheduler)
    assert [row.previous_row for row in third.rows] == [0, 1]


def test_no_row_is_planned_beyond_max_tokens() -> None:
    scheduler = a_scheduler()
    join(scheduler, a_request(0, 5, max_tokens=3))
    first, second = step(scheduler), step(scheduler)
    answer(scheduler, first)
    assert scheduler.plan(0.0) is None
    answer(scheduler, second)
    events = only(scheduler.take_events(), TokenEvent)
    assert [(event.index, event.finish) for event in events] == [(1, FinishReason.NONE), (2, FinishReason.LENGTH)]
    assert scheduler.load().num_blocks_referenced == 0


def test_the_row_of_a_sequence_that_has_finished_meanwhile_is_ignored() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    join(scheduler, a_request(0, 5))
    first, second = step(scheduler), step(scheduler)
    answer(scheduler, first, EOS)
    assert [event.finish for event in only(scheduler.take_events(), TokenEvent)] == [FinishReason.STOP]
    assert pool.num_referenced > 0, "the second step still writes"
    answer(scheduler, second, 51)
    assert scheduler.take_events() == []
    assert pool.num_referenced == 0


def test_a_finished_answer_can_be_continued_from_the_cache() -> None:
    scheduler = a_scheduler()
    request = a_request(0, 5, max_tokens=9)
    add(scheduler, request)
    while (batch := scheduler.plan(0.0)) is not None:
        answer(scheduler, batch)
    follow_up = GenerationRequest(request_id=1, prompt_tokens=(*request.prompt_tokens, *[50] * 9, 7))
    add(scheduler, follow_up)
    [row] = step(scheduler).rows
    assert row.cached_length == 12, "13 tokens were computed: three full blocks"


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_failed_row_fails_its_sequence_alone(is_ahead: bool) -> None:
    """Whether or not the next step is in flight."""
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    join(scheduler, a_request(0, 8), a_request(1, 5))
    failing = step(scheduler)
    behind = step(scheduler) if is_ahead else None
    scheduler.take_events()
    output = StepOutput(
        step_id=failing.step_id, sampled=[None, SampledToken(50, None)], failed={0: "nan"}, duration_s=0.0
    )
    scheduler.complete(output, 0.0)
    events = scheduler.take_events()
    [failed] = only(events, RequestEvent)
    assert (failed.key.request_id, failed.kind, failed.message) == (0, RequestEventKind.FAILED, "nan")
    assert [event.key.request_id for event in only(events, TokenEvent)] == [1]
    if behind is not None:
        scheduler.complete(
            StepOutput(
                step_id=behind.step_id, sampled=[None, SampledToken(51, None)], failed={0: "nan"}, duration_s=0.0
            ),
            0.0,
        )
        assert [event.key.request_id for event in only(scheduler.take_events(), TokenEvent)] == [1]
    assert pool.num_referenced == 3, "of the other alone"
    assert pool.num_cached == 0, "what a failed row wrote is shared with nobody"
    assert sequence_ids(step(scheduler)) == [1]


def test_a_failed_step_fails_its_sequences_only() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    join(scheduler, a_request(0, 8))
    failing = step(scheduler)
    prepare(scheduler, a_request(1, 5))
    late = step(scheduler)
    [pull] = only(scheduler.take_events(), StartPullEvent)
    scheduler.pull_done(PullResult(pull_id=pull.pull_id, num_tokens=5, first_token=FirstToken(40)), 0.0)
    scheduler.take_events()
    scheduler.fail_step(failing.step_id, "broken", 0.0)
    [event] = only(scheduler.take_events(), RequestEvent)
    assert (event.key.request_id, event.kind, event.message) == (0, RequestEventKind.FAILED, "broken")
    assert scheduler.plan(0.0) is None, "the step in flight may fail too, and what would be planned on it"
    answer(scheduler, late)
    assert scheduler.take_events() == []
    assert (pool.num_referenced, pool.num_cached) == (3, 0)
    assert sequence_ids(step(scheduler)) == [1]


@pytest.mark.parametrize("is_running", [False, True])
def test_a_deadline_ends_a_pull_and_no_running_sequence(is_running: bool) -> None:
    scheduler = a_scheduler()
    request = a_request(0, 10, deadline_s=9.0)
    [pull] = start_pulls(scheduler, request)
    assert pull.deadline_s == 9.0
    if is_running:
        scheduler.pull_done(PullResult(pull_id=pull.pull_id, num_tokens=10, first_token=FirstToken(40)), 0.0)
        scheduler.take_events()
        assert scheduler.next_deadline_s() == inf
        assert sequence_ids(step(scheduler, 9.0)) == [0]
        return
    assert scheduler.next_deadline_s() == 9.0
    assert scheduler.plan(9.0) is None
    events = scheduler.take_events()
    assert kinds(events) == [RequestEventKind.FAILED]
    assert len(only(events, AbortPullEvent)) == 1


# Local prefill


def test_prefill_fills_what_decode_leaves_of_the_budget() -> None:
    scheduler = a_scheduler(max_batch_tokens=8)
    join(scheduler, a_request(0, 5), a_request(1, 5))
    add(scheduler, a_request(2, 10))
    batch = step(scheduler)
    assert [row.num_new_tokens for row in batch.rows] == [1, 1, 6]
    answer(scheduler, batch)
    batch = step(scheduler)
    assert [row.num_new_tokens for row in batch.rows] == [1, 1, 4]
    assert batch.rows[2].sample is not None
    follow = step(scheduler)
    assert [row.previous_row for row in follow.rows] == [0, 1, 2], "decodes before its token 0 is known"


def test_a_local_request_emits_every_token() -> None:
    scheduler = a_scheduler()
    add(scheduler, a_request(0, 5, max_tokens=3))
    while (batch := scheduler.plan(0.0)) is not None:
        answer(scheduler, batch)
    events = scheduler.take_events()
    assert kinds(events) == [RequestEventKind.STARTED]
    assert [event.index for event in only(events, TokenEvent)] == [0, 1, 2]


def ms_per_token(chunks: Iterable[tuple[int, int]], num_rows: int, num_context_tokens: int) -> float:
    """A step takes 1 ms per new token, and more after cached ones."""
    return 1e-3 * (num_rows + sum(num_new + num_cached / 100 for num_new, num_cached in chunks))


def test_chunks_fit_the_tightest_gap_of_those_that_decode() -> None:
    scheduler = a_scheduler(mixed_s=ms_per_token)
    tight, loose = (replace(a_request(n, 6, max_tokens=20), max_gap_s=gap_s) for n, gap_s in enumerate((0.0123, 0.05)))
    join(scheduler, tight, loose)
    answer(scheduler, step(scheduler))
    add(scheduler, a_request(2, 15, max_tokens=1), a_request(3, 15, max_tokens=1))
    chunks = []
    for _ in range(4):
        batch = step(scheduler)
        assert batch.num_new_tokens <= 12
        chunks += [row.num_new_tokens for row in batch.rows[2:]]
        answer(scheduler, batch)
    assert chunks == [10, 5, 5, 10]
    scheduler.cancel(key_of(tight), 0.0)
    add(scheduler, a_request(4, 60, max_tokens=1))
    assert [row.num_new_tokens for row in step(scheduler).rows] == [1, 49]


def test_prompts_advance_by_a_block_where_the_gap_has_no_room_for_them() -> None:
    scheduler = a_scheduler(mixed_s=ms_per_token)
    join(scheduler, replace(a_request(0, 6), max_gap_s=1e-3))
    answer(scheduler, step(scheduler))
    add(scheduler, a_request(1, 10), a_request(2, 10))
    assert [row.num_new_tokens for row in step(scheduler).rows] == [1, BLOCK_SIZE]


def test_decode_rows_leave_a_token_to_prefill() -> None:
    scheduler = a_scheduler(max_batch_tokens=2, max_batch_size=8)
    add(scheduler, a_request(0, 2, max_tokens=50), a_request(1, 2, max_tokens=50))
    for _ in range(4):
        batch = step(scheduler)
        assert batch.num_new_tokens <= 2
        assert set(sequence_ids(batch)) == {0}
        answer(scheduler, batch)


def test_a_handoff_is_served_here_too() -> None:
    scheduler = a_scheduler()
    request = GenerationRequest(request_id=0, prompt_tokens=(5, 6, 7), handoff=True)
    add(scheduler, request)
    answer(scheduler, step(scheduler))
    events = scheduler.take_events()
    [offer] = only(events, OfferEvent)
    assert scheduler.plan(0.0) is None, "it is parked, not decoded"
    scheduler.set_leased(offer.handle, True)
    scheduler.set_leased(offer.handle, False)
    scheduler.released(offer.handle)
    assert kinds(scheduler.take_events()) == [RequestEventKind.RELEASED]


def test_a_pulled_handoff_request_is_decoded_here_even_after_a_preemption() -> None:
    scheduler = a_scheduler(BlockPool(36, BLOCK_SIZE))
    join(scheduler, a_request(0, 8, max_tokens=100), replace(a_request(1, 4, max_tokens=100), handoff=True))
    events = _run_to_the_end(scheduler)
    assert RequestEventKind.PREEMPTED in kinds(events)
    assert not only(events, OfferEvent)
    assert only(events, TokenEvent)[-1].finish is FinishReason.LENGTH


def _run_to_the_end(scheduler: Scheduler, pipeline_depth: int = 2) -> list[Event]:
    in_flight: list[StepBatch] = []
    events: list[Event] = []
    for _ in range(2000):
        batch = scheduler.plan(0.0)
        in_flight += [batch] if batch is not None else []
        if not in_flight:
            return events
        if batch is None or len(in_flight) >= pipeline_depth:
            answer(scheduler, in_flight.pop(0))
        events += scheduler.take_events()
    raise AssertionError("no end after 2000 steps")


# Admission and preemption


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (a_request(0, 395, max_tokens=6), ("max_model_len 400",)),
        (a_request(0, 30, max_tokens=300), ("329 tokens", "has 64", "kv_memory")),
    ],
)
def test_what_can_never_run_is_rejected_with_the_reason(request_: GenerationRequest, words: tuple[str, ...]) -> None:
    scheduler = a_scheduler()
    prepare(scheduler, request_)
    add(scheduler, request_)
    events = only(scheduler.take_events(), RequestEvent)
    assert [event.kind for event in events] == [RequestEventKind.REJECTED] * 2
    assert all(word in event.message for event in events for word in words), events[0].message


def test_a_sequence_is_admitted_when_all_are_expected_to_fit_to_their_end() -> None:
    needs = (8 + LOOKAHEAD_TOKENS) // BLOCK_SIZE
    scheduler = a_scheduler(BlockPool(2 * needs, BLOCK_SIZE))
    join(scheduler, a_request(0, 8, max_tokens=100))
    prepare(scheduler, a_request(1, 8, max_tokens=100))
    batch = step(scheduler)
    assert kinds(scheduler.take_events()) == [], "the first has one token more: together they may need a block too many"
    answer(scheduler, batch, EOS)
    scheduler.plan(0.0)
    assert kinds(scheduler.take_events())[-1] is RequestEventKind.STARTED


def test_no_more_than_the_batch_size_hold_blocks() -> None:
    scheduler = a_scheduler(max_batch_size=2)
    add(scheduler, a_request(0, 5), a_request(1, 5), a_request(2, 5))
    batch = step(scheduler)
    assert sequence_ids(batch) == [0, 1]
    answer(scheduler, batch, EOS)
    assert sequence_ids(step(scheduler)) == [2]


def test_what_was_held_up_for_longer_goes_first() -> None:
    scheduler = a_scheduler(max_batch_size=1)
    add(scheduler, a_request(0, 5), a_request(1, 5))
    batch = step(scheduler)
    prepare(scheduler, a_request(2, 5))
    answer(scheduler, batch, EOS)
    scheduler.take_events()
    answer(scheduler, step(scheduler), EOS)
    scheduler.plan(0.0)
    assert [event.key.request_id for event in only(scheduler.take_events(), RequestEvent)] == [1, 2]


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_the_latest_is_preempted_and_resumes_without_repeating_tokens(pipeline_depth: int) -> None:
    pool = BlockPool(38, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    requests = [a_request(i, 8, max_tokens=100) for i in range(2)]
    join(scheduler, *requests)
    events = _run_to_the_end(scheduler, pipeline_depth)
    preempted = [event.key.request_id for event in only(events, RequestEvent)]
    assert set(preempted) == {1}, "the oldest is never preempted"
    assert kinds(events)[:2] == [RequestEventKind.PREEMPTED, RequestEventKind.RESUMED]
    for request in requests:
        tokens = [event for event in only(events, TokenEvent) if event.key == key_of(request)]
        assert [event.index for event in tokens] == list(range(1, 100))
    assert scheduler.load().num_preemptions >= 1
    assert pool.num_referenced == 0


def _step_until_a_preemption(scheduler: Scheduler) -> StepBatch:
    """Keep two steps in flight until the second cannot be planned for lack of blocks; returns the first."""
    batch = step(scheduler)
    while (following := scheduler.plan(0.0)) is not None:
        scheduler.take_events()
        answer(scheduler, batch)
        batch = following
    assert scheduler.load().num_preemptions
    return batch


def test_one_shortage_preempts_one_sequence_although_its_blocks_come_back_late() -> None:
    scheduler = a_scheduler(BlockPool(54, BLOCK_SIZE))
    join(scheduler, *(a_request(i, 8, max_tokens=100) for i in range(3)))
    batch = _step_until_a_preemption(scheduler)
    assert sequence_ids(batch) == [0, 1, 2]
    assert [event.key.request_id for event in only(scheduler.take_events(), RequestEvent)] == [2]
    answer(scheduler, batch)
    assert sequence_ids(step(scheduler)) == [0, 1]
    assert scheduler.load().num_preemptions == 1


def test_a_sequence_that_turns_out_to_be_finished_when_preempted_does_not_come_back() -> None:
    pool = BlockPool(36, BLOCK_SIZE)
    scheduler = a_scheduler(pool)
    join(scheduler, a_request(0, 8, max_tokens=100), a_request(1, 8, max_tokens=100))
    batch = _step_until_a_preemption(scheduler)
    scheduler.take_events()
    answer(scheduler, batch, EOS)
    assert [event.finish for event in only(scheduler.take_events(), TokenEvent)] == [FinishReason.STOP] * 2
    assert scheduler.plan(0.0) is None
    assert scheduler.load().num_waiting == 0
    assert pool.num_referenced == 0


def test_a_preempted_sequence_goes_ahead_of_new_work() -> None:
    scheduler = a_scheduler(BlockPool(38, BLOCK_SIZE))
    join(scheduler, a_request(0, 8, max_tokens=100), a_request(1, 8, max_tokens=100))
    computed: list[int] = []
    started: list[int] = []
    while (batch := scheduler.plan(0.0)) is not None:
        events = only(scheduler.take_events(), RequestEvent)
        started += [event.key.request_id for event in events if event.kind is not RequestEventKind.PREEMPTED]
        if events and events[0].kind is RequestEventKind.PREEMPTED:
            add(scheduler, a_request(2, 4, max_tokens=4))
            prepare(scheduler, a_request(3, 4, max_tokens=4))
            computed = []
        computed += sequence_ids(batch)
        answer(scheduler, batch)
    assert computed.index(1) < computed.index(2)
    assert started.index(1) < started.index(3)


# Change of role


def test_a_worker_finishes_what_it_decodes_beside_prompts_to_hand_off() -> None:
    scheduler = a_scheduler(max_batch_tokens=8)
    pulled, waiting = a_request(0, 4, max_tokens=5), a_request(1, 20, max_tokens=5)
    join(scheduler, pulled)
    add(scheduler, waiting, replace(a_request(2, 4), handoff=True))
    events = _run_to_the_end(scheduler)
    last = [token.key.request_id for token in only(events, TokenEvent) if token.finish is FinishReason.LENGTH]
    assert sorted(last) == [0, 1]
    assert len(only(events, OfferEvent)) == 1
    assert scheduler.load().num_blocks_referenced == scheduler.load().num_blocks_parked > 0


def test_beside_what_decodes_patient_prompts_are_planned_ahead() -> None:
    scheduler = a_scheduler(max_batch_tokens=8)
    add(scheduler, replace(a_request(0, 20), patience_s=9.0))
    step(scheduler)
    assert len(step(scheduler).rows) == 1


def test_once_nothing_is_to_decode_patient_prompts_are_not_planned_ahead() -> None:
    scheduler = a_scheduler(max_batch_tokens=8)
    answer_of = a_request(1, 4)
    add(scheduler, answer_of, replace(a_request(0, 40), patience_s=9.0, handoff=True))
    first = step(scheduler)
    step(scheduler)
    answer(scheduler, first)
    scheduler.cancel(key_of(answer_of), 0.0)
    assert scheduler.plan(0.0) is None


def test_where_all_is_handed_off_prompts_take_the_batch_slots() -> None:
    scheduler = a_scheduler(max_batch_tokens=8, max_batch_size=1)
    add(scheduler, replace(a_request(0, 20), handoff=True))
    first = step(scheduler)
    add(scheduler, replace(a_request(1, 4), handoff=True, ttft_slo_s=0.1))
    second = step(scheduler)
    assert sequence_ids(first) == sequence_ids(second) == [0]


# Guesses


def free_guesses() -> Speculation:
    return Speculation(lambda batch: lambda num_guesses, depth: 1.0)


def test_guesses_take_free_blocks_and_preempt_nobody() -> None:
    pool = BlockPool(8, BLOCK_SIZE)
    scheduler = a_scheduler(pool, max_batch_size=20, speculation=free_guesses())
    join(scheduler, *[a_request(number, 6, max_tokens=10) for number in range(2)])
    for sequence in scheduler.running:
        sequence.acceptance = 0.95
    pool.allocate(1)
    assert pool.num_available == 1
    batch = step(scheduler)
    assert [(row.max_guesses, len(row.block_table)) for row in batch.rows] == [(8, 4), (5, 3)]
    assert scheduler.load().num_preemptions == 0
    assert pool.num_available == 0


def test_guesses_fill_what_a_step_leaves_of_its_token_budget() -> None:
    scheduler = a_scheduler(max_batch_tokens=5, speculation=free_guesses())
    join(scheduler, a_request(0, 6), a_request(1, 6))
    assert [row.max_guesses for row in step(scheduler).rows] == [2, 1]


@pytest.mark.parametrize(("max_batch_size", "num_guesses"), [(4, [4, 3]), (12, [5, 5]), (2, [4, 3])])
def test_a_step_with_guesses_samples_no_more_tokens_than_the_batch_may_have(
    max_batch_size: int, num_guesses: list[int]
) -> None:
    """Or than one row with 8 guesses."""
    scheduler = a_scheduler(max_batch_size=max_batch_size, speculation=free_guesses())
    join(scheduler, a_request(0, 6, max_tokens=60), a_request(1, 6, max_tokens=60))
    for sequence in scheduler.running:
        sequence.acceptance = 0.6
    assert [row.max_guesses for row in step(scheduler).rows] == num_guesses


def test_a_step_that_may_have_guesses_is_planned_once_the_tokens_before_it_are_known() -> None:
    speculation = Speculation(lambda batch: lambda num_guesses, depth: 1.0 + 10 * num_guesses, plans_ahead=True)
    scheduler = a_scheduler(speculation=speculation)
    join(scheduler, a_request(0, 6, max_tokens=20))
    in_flight, are_known = list[StepBatch](), list[bool]()
    while len(are_known) < 14:
        if (batch := scheduler.plan(0.0)) is not None:
            in_flight.append(batch)
            are_known.append(bool(batch.rows[0].tokens))
        if batch is None or len(in_flight) == 2:
            answer(scheduler, in_flight.pop(0))
    assert are_known == [True, False, True, False, False, False, True, *[False] * 7]


def test_nothing_is_planned_ahead_of_a_step_with_guesses() -> None:
    scheduler = a_scheduler(speculation=free_guesses())
    join(scheduler, a_request(0, 6, max_tokens=20))
    batch = step(scheduler)
    assert batch.rows[0].max_guesses == 4
    assert scheduler.plan(0.0) is None
    more = {0: [SampledToken(52, None)]}
    sampled: list[SampledToken | None] = [SampledToken(51, None)]
    output = StepOutput(step_id=0, sampled=sampled, num_guesses={0: 4}, more=more, duration_s=0.0)
    scheduler.complete(output, 0.0)
    assert [event.token for event in only(scheduler.take_events(), TokenEvent)] == [51, 52]
    [row] = step(scheduler).rows
    assert (list(row.tokens), row.cached_length) == ([52], 8)
    load = scheduler.load()
    assert (load.num_guesses, load.num_right_guesses) == (4, 1)


def test_a_prompt_to_hand_off_has_no_guesses() -> None:
    scheduler = a_scheduler(speculation=free_guesses())
    add(scheduler, replace(a_request(0, 1), handoff=True))
    assert [row.max_guesses for row in step(scheduler).rows] == [0]
