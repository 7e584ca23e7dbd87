from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.contracts.block_hash import block_hashes
from pdserve.contracts.events import RequestKey, TokenEvent
from pdserve.contracts.request import FinishReason, GenerationRequest, KvSource, SamplingParams
from pdserve.contracts.step import ModelLimits, SampledToken, StepBatch, StepOutput, StepRow
from pdserve.decode_worker.swapping import NO_SWAP_SPACE, SwapSpace
from pdserve.engine.scheduling.interface import Event, FirstToken, PullResult, StartPullEvent
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.planner.simulate.steady_steps import NO_STEADY_STEPS, Forwarded, SteadySteps, fast_forward, steady_steps

BLOCK_SIZE = 4
END = 1
SOURCE = KvSource(address="there", worker_epoch=1, handle=b"handle")
ALWAYS_SWAP = SwapSpace(num_slots=40, is_cheaper=lambda num_tokens, num_cached: True)


def a_scheduler(
    pool: BlockPool | None = None, *, max_batch_size: int = 8, swap_space: SwapSpace = NO_SWAP_SPACE
) -> Scheduler:
    return Scheduler(
        pool or BlockPool(64, BLOCK_SIZE),
        ModelLimits(max_model_len=400, vocab_size=100),
        mint_handle=lambda: b"",
        max_batch_tokens=64,
        max_batch_size=max_batch_size,
        swap_space=swap_space,
    )


def a_request(request_id: int, num_tokens: int, *, max_tokens: int = 8, length: int | None = None) -> GenerationRequest:
    """``length``: tokens of the answer, the last one `END`; by default ``max_tokens`` of them."""
    sampling = SamplingParams(max_tokens=max_tokens)
    if length is not None:
        sampling = replace(sampling, min_tokens=length - 1, stop_token_ids=(END,))
    return GenerationRequest(
        request_id=request_id,
        prompt_tokens=(request_id, *([0] * (num_tokens - 1))),
        sampling=sampling,
    )


def key_of(request: GenerationRequest) -> RequestKey:
    return RequestKey(0, request.request_id, request.attempt)


def prepare(scheduler: Scheduler, request: GenerationRequest) -> None:
    scheduler.prepare(key_of(request), request, SOURCE, 0.0)


def pulled(scheduler: Scheduler, event: StartPullEvent) -> None:
    scheduler.pull_done(PullResult(event.pull_id, num_tokens=event.num_tokens, first_token=FirstToken(0)), 0.0)


def join(scheduler: Scheduler, *requests: GenerationRequest) -> None:
    """Pull the requests' prompts and step until each has its second token."""
    for request in requests:
        prepare(scheduler, request)
    scheduler.plan(0.0)
    for event in scheduler.take_events():
        if isinstance(event, StartPullEvent):
            pulled(scheduler, event)
    answer(scheduler, plan(scheduler))
    scheduler.take_events()


def plan(scheduler: Scheduler) -> StepBatch:
    batch = scheduler.plan(0.0)
    assert batch is not None
    return batch


def answer(scheduler: Scheduler, batch: StepBatch) -> None:
    sampled = [SampledToken(token_of(row), None) if row.sample else None for row in batch.rows]
    scheduler.complete(StepOutput(step_id=batch.step_id, sampled=sampled, duration_s=0.0), 0.0)


def token_of(row: StepRow) -> int:
    """`END` as soon as the answer may end."""
    assert row.sample is not None
    is_late = row.sample_position - row.num_prompt_tokens >= row.sample.min_tokens
    return END if row.sample.stop_token_ids and is_late else 0


def tokens_of(events: list[Event]) -> list[TokenEvent]:
    return [event for event in events if isinstance(event, TokenEvent)]


def test_steady_steps_end_with_an_answer() -> None:
    scheduler = a_scheduler()
    join(scheduler, a_request(0, 5, max_tokens=8), a_request(1, 5, max_tokens=12))
    assert steady_steps(scheduler, 0.0) == SteadySteps(num_steps=6, batch_size=2, num_context_tokens=12)
    assert fast_forward(scheduler, 5) == Forwarded(None, 0, 0, [])
    assert scheduler.take_events() == []
    assert steady_steps(scheduler, 0.0) == SteadySteps(num_steps=1, batch_size=2, num_context_tokens=22)
    fast_forward(scheduler, 1)
    (event,) = tokens_of(scheduler.take_events())
    assert (event.key.request_id, event.index, event.finish) == (0, 7, FinishReason.LENGTH)
    assert steady_steps(scheduler, 0.0) == SteadySteps(num_steps=4, batch_size=1, num_context_tokens=12)


def test_an_answer_that_ends_before_its_limit_keeps_its_blocks_while_a_row_of_it_is_in_flight() -> None:
    scheduler = a_scheduler()
    join(scheduler, a_request(0, 8, max_tokens=100, length=7), a_request(1, 8, max_tokens=100))
    plan(scheduler)
    assert steady_steps(scheduler, 0.0).num_steps == 5
    in_flight, num_unneeded, num_context_tokens, _ = fast_forward(scheduler, 5)
    (event,) = tokens_of(scheduler.take_events())
    assert (event.key.request_id, event.index, event.finish) == (0, 6, FinishReason.STOP)
    assert in_flight is not None
    assert (len(in_flight.rows), num_unneeded, num_context_tokens) == (2, 1, 28)
    assert scheduler.load().num_blocks_referenced == 8
    steady = steady_steps(scheduler, 0.0)
    assert (steady.num_steps, steady.batch_size) == (1, 1)
    fast_forward(scheduler, 1)
    assert scheduler.load().num_blocks_referenced == 4
    assert steady_steps(scheduler, 0.0).num_steps > 1


def test_steady_steps_end_before_blocks_run_short() -> None:
    scheduler = a_scheduler(BlockPool(38, BLOCK_SIZE))
    join(scheduler, a_request(0, 8, max_tokens=100), a_request(1, 8, max_tokens=100))
    num_steps = 0
    while num_now := steady_steps(scheduler, 0.0).num_steps:
        fast_forward(scheduler, num_now)
        num_steps += num_now
    assert num_steps == 19 * BLOCK_SIZE - 9
    assert scheduler.load().num_blocks_free == 0
    scheduler.check_integrity()


def test_a_skipped_answer_is_cached_as_zeros() -> None:
    scheduler = a_scheduler()
    request = a_request(0, 8, max_tokens=21)
    join(scheduler, request)
    fast_forward(scheduler, 19)
    load = scheduler.load()
    assert (load.num_blocks_referenced, load.num_blocks_cached) == (0, 7)
    prepare(scheduler, a_request(1, 1))
    follow_up = GenerationRequest(request_id=2, prompt_tokens=(*request.prompt_tokens, *[0] * 20))
    assert len(block_hashes(follow_up.prompt_tokens, BLOCK_SIZE)) == 7
    prepare(scheduler, follow_up)
    scheduler.plan(0.0)
    pulls = [event.num_cached_blocks for event in scheduler.take_events() if isinstance(event, StartPullEvent)]
    assert pulls == [0, 7]


def test_steady_steps_reserve() -> None:
    scheduler = a_scheduler()
    join(scheduler, a_request(0, 5, max_tokens=8))
    prepare(scheduler, a_request(1, 5))
    assert steady_steps(scheduler, 0.0).num_steps == 6
    assert len([event for event in scheduler.take_events() if isinstance(event, StartPullEvent)]) == 1


def test_nothing_is_steady_while_a_prompt_waits() -> None:
    scheduler = a_scheduler()
    join(scheduler, a_request(0, 5))
    request = a_request(1, 5)
    scheduler.add(key_of(request), request, 0.0)
    assert steady_steps(scheduler, 0.0) == NO_STEADY_STEPS


def test_one_step_is_steady_while_a_cancelled_row_is_in_flight() -> None:
    scheduler = a_scheduler()
    gone = a_request(0, 5)
    join(scheduler, gone, a_request(1, 5))
    batch = plan(scheduler)
    scheduler.cancel(key_of(gone), 0.0)
    assert steady_steps(scheduler, 0.0).num_steps == 1
    answer(scheduler, batch)
    assert steady_steps(scheduler, 0.0).num_steps > 1


def without_ids(event: Event) -> Event:
    """Replace block ids by zeros: they may differ between the twins."""
    return event._replace(block_ids=(0,) * len(event.block_ids)) if isinstance(event, StartPullEvent) else event


class Twins:
    """A scheduler that plans every step and one that fast-forwards, with the same requests."""

    def __init__(self, *, caches_content: bool, num_blocks: int, depth: int, swap_space: SwapSpace) -> None:
        self.pools = [BlockPool(num_blocks, BLOCK_SIZE, caches_content=caches_content) for _ in range(2)]
        self.planning, self.forwarding = self.both = [
            a_scheduler(pool, max_batch_size=6, swap_space=swap_space) for pool in self.pools
        ]
        self.depth = depth
        self.in_flight: deque[tuple[StepBatch, StepBatch]] = deque()
        self.pulls: list[StartPullEvent] = []
        self.second_tokens: list[TokenEvent] = []

    def check(self) -> None:
        """Check that both have the same load, prefix cache and events, except tokens between the second and the
        last. Tokens of one turn come in any order."""
        assert self.planning.load() == self.forwarding.load()
        assert self.pools[0].known_hashes == self.pools[1].known_hashes
        said = []
        for scheduler in self.both:
            scheduler.check_integrity()
            events = [without_ids(event) for event in scheduler.take_events()]
            tokens = [e for e in tokens_of(events) if e.index <= 1 or e.finish]
            others = [e for e in events if not isinstance(e, TokenEvent)]
            said.append([*sorted(tokens, key=lambda e: (e.key, e.index)), *others])
        second_tokens, self.second_tokens = self.second_tokens, []
        for event in second_tokens:
            said[0].remove(event)
        assert said[0] == said[1]
        self.pulls += [event for event in said[0] if isinstance(event, StartPullEvent)]

    def pull(self) -> None:
        """End the first pull."""
        event = self.pulls.pop(0)
        for scheduler in self.both:
            pulled(scheduler, event)
        self.check()

    def forward(self, share: float) -> bool:
        """Take a share of the steady steps, or one step; returns whether there was anything to do."""
        steady = NO_STEADY_STEPS
        if len(self.in_flight) == self.depth - 1:
            steady = steady_steps(self.forwarding, 0.0)
        if not steady.num_steps:
            return self.step()
        num_steps = max(1, round(steady.num_steps * share))
        steps = deque(batch for batch, _ in self.in_flight)
        for number in range(num_steps):
            batch = self.planning.plan(0.0)
            if batch is not None:
                steps.append(batch)
                is_last = number == steady.num_steps - 1
                assert is_last or len(batch.rows) == steady.batch_size
                num_context_tokens = steady.num_context_tokens + number * steady.batch_size
                assert is_last or sum(row.cached_length for row in batch.rows) == num_context_tokens
            answer(self.planning, steps.popleft())
        in_flight, _, num_context_tokens, second_tokens = fast_forward(self.forwarding, num_steps)
        self.second_tokens = [event for _, event in second_tokens]
        self.in_flight.clear()
        if in_flight is not None and not in_flight.rows:
            answer(self.forwarding, in_flight)  # it ends at once
        elif in_flight is not None:
            (expected,) = steps
            assert places(in_flight) == places(expected)
            assert num_context_tokens == sum(row.cached_length for row in expected.rows)
            self.in_flight.append((expected, in_flight))
        assert len(steps) == len(self.in_flight)
        self.check()
        return True

    def step(self) -> bool:
        """Plan as far ahead as allowed and complete one step; returns whether there was one."""
        while len(self.in_flight) < self.depth:
            one, other = (scheduler.plan(0.0) for scheduler in self.both)
            self.check()
            if one is None or other is None:
                assert one is other
                break
            assert places(one) == places(other)
            self.in_flight.append((one, other))
        if not self.in_flight:
            return bool(self.pulls)
        for scheduler, batch in zip(self.both, self.in_flight.popleft(), strict=True):
            answer(scheduler, batch)
        self.check()
        return True


def places(batch: StepBatch) -> list[tuple[int, int, int, int, int, int]]:
    return [
        (
            row.sequence_id,
            row.previous_row,
            row.cached_length,
            row.sample_position,
            row.num_new_tokens,
            len(row.block_table),
        )
        for row in batch.rows
    ]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    caches_content=st.booleans(),
    depth=st.integers(1, 2),
    swap_space=st.sampled_from([NO_SWAP_SPACE, ALWAYS_SWAP]),
)
@example(seed=998, caches_content=True, depth=2, swap_space=NO_SWAP_SPACE)  # two end whose rows are not in order
def test_fast_forwarding_is_the_same_as_planning_every_step(
    seed: int, caches_content: bool, depth: int, swap_space: SwapSpace
) -> None:
    random = Random(seed)
    twins = Twins(caches_content=caches_content, num_blocks=random.randint(70, 120), depth=depth, swap_space=swap_space)
    for number in range(80):
        move = random.choice(["add", "prepare", "forward", "forward", "step", "step", "pulled", "pulled", "cancel"])
        max_tokens = random.choice([1, 2, 30, 250])
        length = random.choice([None, random.randint(1, max_tokens)])
        request = a_request(number, random.randint(1, 40), max_tokens=max_tokens, length=length)
        cancelled = RequestKey(0, number - random.randint(1, 6), 0)
        if move == "forward":
            twins.forward(random.random())
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
    while twins.forward(1.0):
        while twins.pulls:
            twins.pull()
    for scheduler in twins.both:
        load = scheduler.load()
        assert (load.num_running, load.num_blocks_referenced) == (0, 0)
