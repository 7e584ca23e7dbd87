"""Preempted sequences swapped to host memory and back: contents and timing of the copies, and ownership of the
slots."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import NamedTuple

import pytest

from pdserve.contracts.events import RequestEvent, RequestEventKind, RequestKey, TokenEvent
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import FinishReason, GenerationRequest, SamplingParams
from pdserve.contracts.step import ModelLimits, SampledToken, StepBatch, StepOutput
from pdserve.decode_worker.swapping import SwapSpace, swap_space
from pdserve.engine.scheduling.interface import Event
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware

EOS = 2
BLOCK_SIZE = 4
MAX_TOKENS = 100
PROMPT_TOKENS = 8
FIRST, SECOND = RequestKey(0, 0, 0), RequestKey(0, 1, 0)


class Worker:
    """A scheduler with two sequences that together outgrow its pool, and the steps in flight."""

    def __init__(self, *, num_slots: int = 64, pipeline_depth: int = 2, has_requests: bool = True) -> None:
        self.pool = BlockPool(38, BLOCK_SIZE)
        self.asked: list[tuple[int, int]] = []
        handles = count()
        self.scheduler = Scheduler(
            self.pool,
            ModelLimits(max_model_len=400, vocab_size=1000, eos_token_ids=(EOS,)),
            mint_handle=lambda: b"%d" % next(handles),
            max_batch_tokens=64,
            max_batch_size=8,
            swap_space=SwapSpace(num_slots=num_slots, is_cheaper=self._is_cheaper),
        )
        self.pipeline_depth = pipeline_depth
        self.in_flight: list[StepBatch] = []
        self.events: list[Event] = []
        self.next_token = 500
        if has_requests:
            self.add(0, tuple(range(10, 18)))
            self.add(1, tuple(range(20, 28)))

    def _is_cheaper(self, num_tokens: int, num_cached: int) -> bool:
        self.asked.append((num_tokens, num_cached))
        return True

    def add(self, number: int, prompt: tuple[int, ...], deadline_s: float = 600.0) -> None:
        request = GenerationRequest(
            request_id=number,
            prompt_tokens=prompt,
            sampling=SamplingParams(max_tokens=MAX_TOKENS),
            deadline_s=deadline_s,
        )
        self.scheduler.add(RequestKey(0, number, 0), request, 0.0)

    def plan(self, now_s: float = 0.0) -> StepBatch | None:
        batch = self.scheduler.plan(now_s)
        if batch is not None:
            self.in_flight.append(batch)
        self.check()
        return batch

    def answer(self, token: int | None = None) -> None:
        """Complete the oldest step: every row samples its own token, or ``token``."""
        batch = self.in_flight.pop(0)
        sampled: list[SampledToken | None] = []
        for row in batch.rows:
            self.next_token += 1
            sampled.append(SampledToken(token or self.next_token, None) if row.sample else None)
        self.scheduler.complete(StepOutput(step_id=batch.step_id, sampled=sampled, duration_s=0.0), 0.0)
        self.check()

    def fail(self) -> None:
        self.scheduler.fail_step(self.in_flight.pop(0).step_id, "broken", 0.0)
        self.check()

    def step(self) -> StepBatch | None:
        """Plan a step if another may be in flight; with nothing to plan, complete the oldest one."""
        while len(self.in_flight) >= self.pipeline_depth:
            self.answer()
        batch = self.plan()
        if batch is None and self.in_flight:
            self.answer()
        return batch

    def until_swap_out(self) -> StepBatch:
        """Step until one with swap-outs is in flight, together with the previous step at depth 2."""
        while (batch := self.step()) is None or not batch.swap_outs:
            assert self.next_token < 800, "nothing was swapped out"
        return batch

    def until_swap_in(self) -> StepBatch:
        while (batch := self.step()) is None or not batch.swap_ins:
            assert self.next_token < 800, "nothing was swapped in"
        return batch

    def to_the_end(self) -> None:
        for _ in range(1000):
            is_idle = not self.in_flight
            if self.step() is None and is_idle:
                return
        raise AssertionError("no end")

    def check(self) -> None:
        self.scheduler.check_integrity()
        self.events += self.scheduler.take_events()

    @property
    def num_slots_used(self) -> int:
        return self.scheduler.load().num_swap_slots_used

    def kinds(self, key: RequestKey) -> list[RequestEventKind]:
        return [event.kind for event in self.events if isinstance(event, RequestEvent) and event.key == key]

    def indexes(self, key: RequestKey) -> list[int]:
        return [event.index for event in self.events if isinstance(event, TokenEvent) and event.key == key]


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_a_preempted_sequence_comes_back_where_it_was(pipeline_depth: int) -> None:
    worker = Worker(pipeline_depth=pipeline_depth)
    worker.until_swap_out()
    worker.to_the_end()
    assert worker.indexes(FIRST) == worker.indexes(SECOND) == list(range(MAX_TOKENS))
    assert worker.kinds(SECOND) == [
        RequestEventKind.STARTED,
        RequestEventKind.PREEMPTED,
        RequestEventKind.RESUMED,
    ]
    load = worker.scheduler.load()
    assert (load.num_preemptions, load.num_swap_outs, load.num_swap_ins) == (1, 1, 1)
    assert load.num_swap_slots_used == worker.pool.num_referenced == 0


def test_all_kv_is_copied_that_of_the_step_in_flight_included() -> None:
    worker = Worker()
    batch = worker.until_swap_out()
    [before, _] = worker.in_flight
    [row] = [row for row in before.rows if row.sequence_id == 1]
    num_tokens = row.cached_length + 1
    assert [copy.source for copy in batch.swap_outs] == list(row.block_table)[: -(-num_tokens // BLOCK_SIZE)]
    assert worker.asked == [(num_tokens, 0)]
    assert len({copy.target for copy in batch.swap_outs}) == len(batch.swap_outs) == worker.num_slots_used


def test_blocks_are_reused_only_when_their_copy_was_made() -> None:
    worker = Worker()
    batch = worker.until_swap_out()
    assert not batch.rows, "the needy one waits for the blocks"
    worker.answer()
    assert worker.pool.num_available == 0
    assert worker.plan() is None
    worker.answer()
    assert worker.pool.num_available >= len(batch.swap_outs)


def test_only_what_the_cache_has_lost_is_copied_back_and_nothing_is_computed_again() -> None:
    worker = Worker()
    outs = worker.until_swap_out().swap_outs
    batch = worker.until_swap_in()
    [row] = batch.rows
    num_kv_blocks = len(outs)
    assert (row.sequence_id, row.num_new_tokens) == (1, 1)
    assert row.cached_length == worker.asked[0][0]
    num_cached = num_kv_blocks - len(batch.swap_ins)
    assert 0 < num_cached < num_kv_blocks, "the first sequence needed some of the blocks, not all"
    assert [copy.source for copy in batch.swap_ins] == [copy.target for copy in outs][num_cached:]
    assert [copy.target for copy in batch.swap_ins] == list(row.block_table)[num_cached:num_kv_blocks]


def test_slots_are_free_when_the_step_that_copied_back_has_ended() -> None:
    worker = Worker()
    num_slots = len(worker.until_swap_out().swap_outs)
    worker.until_swap_in()
    while len(worker.in_flight) > 1:
        worker.answer()
    assert worker.num_slots_used == num_slots
    worker.answer()
    assert worker.num_slots_used == 0


def test_without_enough_slots_it_is_recomputed() -> None:
    worker = Worker(num_slots=18)
    worker.to_the_end()
    load = worker.scheduler.load()
    assert (load.num_preemptions, load.num_swap_outs) == (1, 0)
    assert worker.indexes(SECOND) == list(range(MAX_TOKENS))


def test_what_others_share_is_expected_to_stay_cached() -> None:
    shared = tuple(range(10, 10 + PROMPT_TOKENS))
    worker = Worker(has_requests=False)
    worker.add(0, (*shared, 1))
    worker.step()
    worker.step()
    worker.add(1, (*shared, 3))
    worker.until_swap_out()
    assert [num_cached for _, num_cached in worker.asked] == [PROMPT_TOKENS]


# Requests that end while swapped


@pytest.mark.parametrize("num_answered", [0, 1, 2])
def test_a_cancelled_sequence_frees_blocks_and_slots_once_nothing_uses_them(num_answered: int) -> None:
    """Cancelled with a row and the copies in flight, with the copies in flight, and with its KV on the host."""
    worker = Worker()
    num_slots = len(worker.until_swap_out().swap_outs)
    for _ in range(num_answered):
        worker.answer()
    worker.scheduler.cancel(SECOND, 0.0)
    worker.check()
    assert worker.num_slots_used == (num_slots if num_answered < 2 else 0)
    while worker.in_flight:
        worker.answer()
    assert worker.num_slots_used == 0
    worker.to_the_end()
    assert worker.pool.num_referenced == 0
    assert worker.kinds(SECOND)[-1] is RequestEventKind.CANCELLED
    assert worker.indexes(FIRST) == list(range(MAX_TOKENS))


def test_a_sequence_cancelled_while_it_is_copied_back_keeps_its_slots_until_then() -> None:
    worker = Worker()
    num_slots = len(worker.until_swap_out().swap_outs)
    worker.until_swap_in()
    worker.scheduler.cancel(SECOND, 0.0)
    worker.check()
    assert worker.num_slots_used == num_slots
    worker.to_the_end()
    assert worker.num_slots_used == worker.pool.num_referenced == 0


def test_a_deadline_ends_no_answer_that_is_swapped_out() -> None:
    worker = Worker(has_requests=False)
    worker.add(0, tuple(range(10, 18)))
    worker.add(1, tuple(range(20, 28)), deadline_s=5.0)
    worker.until_swap_out()
    worker.answer()
    worker.answer()
    worker.plan(5.0)
    assert RequestEventKind.FAILED not in worker.kinds(SECOND)
    worker.to_the_end()
    assert worker.num_slots_used == worker.pool.num_referenced == 0


def test_a_sequence_that_turns_out_to_be_finished_does_not_come_back() -> None:
    worker = Worker()
    worker.until_swap_out()
    worker.answer(EOS)
    assert [event.finish for event in worker.events[-2:] if isinstance(event, TokenEvent)] == [FinishReason.STOP] * 2
    assert worker.scheduler.load().num_waiting == 0
    worker.answer()
    assert worker.num_slots_used == worker.pool.num_referenced == 0
    assert worker.plan() is None


# Failures


@pytest.mark.parametrize("which", ["the row before the copies", "the copies", "the way back"])
def test_kv_of_a_failed_step_is_never_resumed_from(which: str) -> None:
    worker = Worker()
    worker.until_swap_out()
    if which == "the way back":
        worker.until_swap_in()
    if which != "the row before the copies":
        while len(worker.in_flight) > 1:
            worker.answer()
    worker.fail()
    assert worker.kinds(SECOND)[-1] is RequestEventKind.FAILED
    worker.to_the_end()
    assert worker.num_slots_used == worker.pool.num_referenced == 0


def test_a_failed_copy_costs_nobody_else() -> None:
    worker = Worker()
    worker.until_swap_out()
    worker.answer()
    worker.fail()
    worker.to_the_end()
    assert worker.indexes(FIRST) == list(range(MAX_TOKENS))


# Order and choice


def test_a_swapped_sequence_goes_ahead_of_new_work() -> None:
    worker = Worker()
    worker.until_swap_out()
    worker.add(2, (30, 31, 32))
    worker.until_swap_in()
    assert worker.kinds(RequestKey(0, 2, 0)) == []
    worker.to_the_end()
    assert worker.indexes(RequestKey(0, 2, 0)) == list(range(MAX_TOKENS))


class Case(NamedTuple):
    num_tokens: int
    num_cached: int
    swaps: bool


@pytest.mark.parametrize(
    "case",
    [Case(8000, 0, True), Case(8000, 7996, False), Case(16, 16, False)],
)
def test_the_cheaper_of_recomputation_and_two_copies_is_chosen(case: Case) -> None:
    """On a CPU a prefill of thousands of tokens takes longer than two copies of their KV at 3 GB/s. A prefill of
    only the last four tokens takes less than copying all of the KV."""
    shape = ModelShape(
        num_layers=2, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=4, head_dim=64, vocab_size=1000
    )
    cost = CostModel(shape, replace(hardware("cpu", num_cores=2), host_bandwidth=3e9), Precision())
    assert swap_space(cost, 8, 2048).is_cheaper(case.num_tokens, case.num_cached) is case.swaps
    assert cost.swap_s(1000) == pytest.approx(1000 * 2 * 2 * 4 * 64 * 4 / cost.hardware.host_bandwidth)
