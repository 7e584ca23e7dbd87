from __future__ import annotations

from collections import deque
from random import Random
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.contracts.block_hash import block_hashes
from pdserve.contracts.request import FinishReason, GenerationRequest, KvSource, SamplingParams
from pdserve.contracts.step import ModelLimits, SampledToken, StepBatch, StepOutput
from pdserve.decode_worker.scheduler import DecodeScheduler
from pdserve.decode_worker.swapping import NO_SWAP_SPACE, SwapSpace
from pdserve.engine.scheduler import Event, FirstToken, PullResult, RequestKey, StartPullEvent, TokenEvent
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.planner.counted_pool import CountedBlockPool
from pdserve.planner.counted_scheduler import NO_QUIET_STEPS, CountedDecodeScheduler, CountedRows, QuietSteps

LIMITS = ModelLimits(max_model_len=400, vocab_size=100)
BLOCK_SIZE = 4
SOURCE = KvSource(address="there", worker_epoch=1, handle=b"handle")
ALWAYS_SWAP = SwapSpace(num_slots=40, is_cheaper=lambda num_tokens, num_cached: True)

SchedulerT = TypeVar("SchedulerT", bound=DecodeScheduler)


def a_scheduler(
    kind: type[SchedulerT],
    pool: BlockPool | None = None,
    *,
    max_batch_size: int = 8,
    swap_space: SwapSpace = NO_SWAP_SPACE,
) -> SchedulerT:
    return kind(
        pool or BlockPool(64, BLOCK_SIZE),
        LIMITS,
        mint_handle=lambda: b"",
        max_batch_tokens=64,
        max_batch_size=max_batch_size,
        swap_space=swap_space,
    )


def a_request(request_id: int, num_tokens: int, *, max_tokens: int = 8) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_tokens=(request_id, *([0] * (num_tokens - 1))),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


def key_of(request: GenerationRequest) -> RequestKey:
    return RequestKey(0, request.request_id, request.attempt)


def prepare(scheduler: DecodeScheduler, request: GenerationRequest) -> None:
    scheduler.prepare(key_of(request), request, SOURCE, 0.0)


def pulled(scheduler: DecodeScheduler, event: StartPullEvent) -> None:
    scheduler.pull_done(PullResult(event.pull_id, num_tokens=event.num_tokens, first_token=FirstToken(0)), 0.0)


def join(scheduler: CountedDecodeScheduler, *requests: GenerationRequest) -> None:
    """The requests' prompts are pulled."""
    for request in requests:
        prepare(scheduler, request)
    scheduler.quiet_steps(0.0)
    for event in scheduler.take_events():
        if isinstance(event, StartPullEvent):
            pulled(scheduler, event)
    scheduler.take_events()


def plan(scheduler: DecodeScheduler) -> StepBatch:
    batch = scheduler.plan(0.0)
    assert batch is not None
    return batch


def answer(scheduler: DecodeScheduler, batch: StepBatch) -> None:
    sampled = [SampledToken(0, None) if row.sample else None for row in batch.rows]
    scheduler.complete(StepOutput(step_id=batch.step_id, sampled=sampled, duration_s=0.0), 0.0)


def tokens_of(events: list[Event]) -> list[TokenEvent]:
    return [event for event in events if isinstance(event, TokenEvent)]


def test_quiet_steps_end_with_an_answer() -> None:
    scheduler = a_scheduler(CountedDecodeScheduler)
    join(scheduler, a_request(0, 5, max_tokens=8), a_request(1, 5, max_tokens=12))
    assert scheduler.quiet_steps(0.0) == QuietSteps(num_steps=7, batch_size=2, num_context_tokens=10)
    scheduler.advance(6)
    assert scheduler.take_events() == []
    assert scheduler.quiet_steps(0.0) == QuietSteps(num_steps=1, batch_size=2, num_context_tokens=22)
    scheduler.advance(1)
    (event,) = tokens_of(scheduler.take_events())
    assert (event.key.request_id, event.index, event.finish) == (0, 7, FinishReason.LENGTH)
    assert scheduler.quiet_steps(0.0) == QuietSteps(num_steps=4, batch_size=1, num_context_tokens=12)
    assert plan(scheduler).rows == []
    assert scheduler.counted_rows == CountedRows(num_rows=1, num_context_tokens=12)


def test_quiet_steps_end_before_blocks_run_short() -> None:
    pool = BlockPool(38, BLOCK_SIZE)
    scheduler = a_scheduler(CountedDecodeScheduler, pool)
    join(scheduler, a_request(0, 8, max_tokens=100), a_request(1, 8, max_tokens=100))
    num_steps = scheduler.quiet_steps(0.0).num_steps
    assert num_steps == 19 * BLOCK_SIZE - 8
    scheduler.advance(num_steps)
    assert pool.num_available == 0
    assert scheduler.quiet_steps(0.0).num_steps == 0
    pool.check_integrity()


def test_a_skipped_answer_is_cached_as_zeros() -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = a_scheduler(CountedDecodeScheduler, pool)
    request = a_request(0, 8, max_tokens=21)
    join(scheduler, request)
    scheduler.advance(20)
    assert pool.num_referenced == 0
    hashes = block_hashes([*request.prompt_tokens, *([0] * 20)], BLOCK_SIZE)
    assert len(pool.match_prefix(hashes)) == len(hashes) == 7


def test_quiet_steps_reserve() -> None:
    scheduler = a_scheduler(CountedDecodeScheduler)
    join(scheduler, a_request(0, 5, max_tokens=8))
    prepare(scheduler, a_request(1, 5))
    assert scheduler.quiet_steps(0.0).num_steps == 7
    assert len([event for event in scheduler.take_events() if isinstance(event, StartPullEvent)]) == 1


def test_one_step_is_quiet_while_a_reservation_waits() -> None:
    scheduler = a_scheduler(CountedDecodeScheduler, max_batch_size=1)
    join(scheduler, a_request(0, 5, max_tokens=8))
    batch = plan(scheduler)
    assert scheduler.quiet_steps(0.0) == NO_QUIET_STEPS, "a step is in flight"
    answer(scheduler, batch)
    prepare(scheduler, a_request(1, 5))
    assert scheduler.quiet_steps(0.0).num_steps == 1


def test_nothing_is_quiet_while_a_prompt_waits() -> None:
    scheduler = a_scheduler(CountedDecodeScheduler)
    join(scheduler, a_request(0, 5))
    request = a_request(1, 5)
    scheduler.add(key_of(request), request, 0.0)
    assert not scheduler.is_decoding_only()
    assert scheduler.quiet_steps(0.0) == NO_QUIET_STEPS


@pytest.mark.parametrize("pool", [BlockPool, CountedBlockPool])
def test_the_rows_of_a_step_with_a_prompt_are_counted(pool: type[BlockPool]) -> None:
    scheduler = a_scheduler(CountedDecodeScheduler, pool(64, BLOCK_SIZE))
    join(scheduler, a_request(0, 5), a_request(1, 9, max_tokens=2))
    request = a_request(2, 7)
    scheduler.add(key_of(request), request, 0.0)
    first = plan(scheduler)
    assert [row.sequence_id for row in first.rows] == [2]
    assert scheduler.counted_rows == CountedRows(num_rows=2, num_context_tokens=14)
    second = plan(scheduler)
    assert second.rows == []
    assert scheduler.counted_rows == CountedRows(num_rows=2, num_context_tokens=6 + 7)
    answer(scheduler, first)
    tokens = tokens_of(scheduler.take_events())
    assert [(event.key.request_id, event.index, bool(event.finish)) for event in tokens] == [
        (0, 1, False),
        (1, 1, True),
        (2, 0, False),
    ]
    answer(scheduler, second)
    assert [(event.key.request_id, event.index) for event in tokens_of(scheduler.take_events())] == [(2, 1)]


def test_rows_in_flight_are_built_where_counting_ends() -> None:
    scheduler = a_scheduler(CountedDecodeScheduler, CountedBlockPool(64, BLOCK_SIZE))
    gone, request = a_request(0, 5), a_request(2, 7)
    join(scheduler, gone, a_request(1, 9))
    scheduler.add(key_of(request), request, 0.0)
    first = plan(scheduler)
    scheduler.cancel(key_of(gone), 0.0)
    assert [row.sequence_id for row in first.rows] == [0, 1, 2]
    assert [(row.sequence_id, row.previous_row) for row in plan(scheduler).rows] == [(1, 1), (2, 2)]


def without_ids(event: Event) -> Event:
    """Which blocks a sequence gets is of no consequence."""
    return event._replace(block_ids=(0,) * len(event.block_ids)) if isinstance(event, StartPullEvent) else event


class Twins:
    """The live scheduler, which plans every row, and the counting one, told the same."""

    def __init__(self, *, is_caching: bool, num_blocks: int, depth: int, swap_space: SwapSpace) -> None:
        pool = BlockPool if is_caching else CountedBlockPool
        self.pools = [pool(num_blocks, BLOCK_SIZE) for _ in range(2)]
        self.live = a_scheduler(DecodeScheduler, self.pools[0], max_batch_size=6, swap_space=swap_space)
        self.counted = a_scheduler(CountedDecodeScheduler, self.pools[1], max_batch_size=6, swap_space=swap_space)
        self.both: list[DecodeScheduler] = [self.live, self.counted]
        self.depth = depth
        self.in_flight: deque[tuple[StepBatch, StepBatch]] = deque()
        self.pulls: list[StartPullEvent] = []

    def check(self, *, tells_second_tokens: bool = True) -> None:
        """They see the same and say the same."""
        loads = [scheduler.load() for scheduler in self.both]
        assert loads[0] == loads[1]
        rooms = [scheduler._room() for scheduler in self.both]
        assert rooms[0] == rooms[1]
        for pool in self.pools:
            pool.check_integrity()
        said = []
        for scheduler in self.both:
            last_index = 1 if tells_second_tokens else 0
            events = [without_ids(event) for event in scheduler.take_events()]
            said.append([e for e in events if not isinstance(e, TokenEvent) or e.index <= last_index or e.finish])
        assert said[0] == said[1]
        self.pulls += [event for event in said[0] if isinstance(event, StartPullEvent)]

    def pull(self) -> None:
        """The first pull ends."""
        event = self.pulls.pop(0)
        for scheduler in self.both:
            pulled(scheduler, event)
        self.check()

    def run(self, share: float) -> bool:
        """Run ahead where that can be, and plan a step where not; returns whether there was something to do."""
        if self.in_flight:
            return self.step()
        quiet = self.counted.quiet_steps(0.0)
        if not quiet.num_steps:
            return self.step()
        num_steps = max(1, round(quiet.num_steps * share))
        batch = plan(self.live)
        assert quiet.batch_size == len(batch.rows)
        assert quiet.num_context_tokens == sum(row.cached_length for row in batch.rows)
        answer(self.live, batch)
        for _ in range(num_steps - 1):
            answer(self.live, plan(self.live))
        self.counted.advance(num_steps)
        self.check(tells_second_tokens=False)
        return True

    def step(self) -> bool:
        """Plan as far ahead as may be, complete one step; returns whether there was one."""
        while len(self.in_flight) < self.depth:
            batches = [scheduler.plan(0.0) for scheduler in self.both]
            if batches[0] is None or batches[1] is None:
                assert batches == [None, None]
                self.check()
                break
            rows, few = batches[0].rows, batches[1].rows
            counted = self.counted.counted_rows
            assert len(rows) == len(few) + counted.num_rows
            num_cached_tokens = sum(row.cached_length for row in few) + counted.num_context_tokens
            assert sum(row.cached_length for row in rows) == num_cached_tokens
            places = [[(row.sequence_id, row.previous_row, row.cached_length) for row in each] for each in (rows, few)]
            assert counted.num_rows or places[0] == places[1]
            self.in_flight.append((batches[0], batches[1]))
            self.check()
        if not self.in_flight:
            return bool(self.pulls)
        for scheduler, batch in zip(self.both, self.in_flight.popleft(), strict=True):
            answer(scheduler, batch)
        self.check()
        return True


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    is_caching=st.booleans(),
    depth=st.integers(1, 2),
    swap_space=st.sampled_from([NO_SWAP_SPACE, ALWAYS_SWAP]),
)
def test_counting_is_the_same_as_planning_every_row(
    seed: int, is_caching: bool, depth: int, swap_space: SwapSpace
) -> None:
    random = Random(seed)
    twins = Twins(is_caching=is_caching, num_blocks=random.randint(70, 120), depth=depth, swap_space=swap_space)
    for number in range(80):
        move = random.choice(["add", "prepare", "run", "step", "step", "step", "pulled", "pulled", "cancel", "cancel"])
        request = a_request(number, random.randint(1, 40), max_tokens=random.choice([1, 2, 30, 250]))
        cancelled = RequestKey(0, number - random.randint(1, 6), 0)
        if move == "run":
            twins.run(random.random())
        elif move == "step":
            twins.step()
        elif move == "pulled" and twins.pulls:
            twins.pull()
        for scheduler in twins.both:
            if move == "add":
                scheduler.add(key_of(request), request, 0.0)
            elif move == "prepare":
                prepare(scheduler, request)
            elif move == "cancel":
                scheduler.cancel(cancelled, 0.0)
        twins.check()
    while twins.run(1.0):
        while twins.pulls:
            twins.pull()
    assert [scheduler.load().num_running for scheduler in twins.both] == [0, 0]
    assert [pool.num_referenced for pool in twins.pools] == [0, 0]
