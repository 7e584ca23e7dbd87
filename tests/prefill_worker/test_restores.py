"""Prompts that wait for blocks of a tier: when they do, for how long, and what others see meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, takewhile

import pytest

from pdserve.contracts.block_hash import block_hashes
from pdserve.contracts.events import RequestEvent, RequestEventKind, RequestKey
from pdserve.contracts.request import GenerationRequest, SamplingParams
from pdserve.contracts.step import ModelLimits, SampledToken, StepBatch, StepOutput
from pdserve.engine.scheduling.interface import Event
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.prefill_worker.restores import TRY_EVERY, TierSpace

BLOCK_SIZE = 4
PROMPT = tuple(range(10, 22))
"""Three blocks, of which two can be restored: the last token is computed."""
COMPUTE_S = 0.1
"""Of a token."""


class ScriptedTier:
    """Holds the blocks of `PROMPT`, and ends restores as told."""

    failure = ""

    def __init__(self) -> None:
        self.hashes = set(block_hashes(PROMPT, BLOCK_SIZE))
        self.asked: list[tuple[list[bytes], list[int]]] = []
        self.ends: dict[int, tuple[int, float]] = {}
        """Blocks and seconds by restore; else none so far."""

    def match(self, hashes: Iterable[bytes]) -> list[bytes]:
        return list(takewhile(self.hashes.__contains__, hashes))

    def restore(self, restore_id: int, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        assert restore_id == len(self.asked)
        self.asked.append((list(hashes), list(blocks)))

    def end_restore(self, restore_id: int) -> tuple[int, float]:
        return self.ends.get(restore_id, (0, 0.0))


class Worker:
    def __init__(self, num_blocks: int = 16) -> None:
        self.tier = ScriptedTier()
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        handles = count()
        self.scheduler = Scheduler(
            self.pool,
            ModelLimits(max_model_len=64, vocab_size=1000),
            mint_handle=lambda: b"%d" % next(handles),
            max_batch_tokens=32,
            max_batch_size=8,
            tier_space=TierSpace(tier=self.tier, compute_s=lambda num_tokens, num_cached: COMPUTE_S * num_tokens),
        )
        self.events: list[Event] = []
        self._ids = count()

    def add(self, prompt: tuple[int, ...] = PROMPT, salt: bytes = b"", max_tokens: int = 1) -> RequestKey:
        number = next(self._ids)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = GenerationRequest(request_id=number, prompt_tokens=prompt, sampling=sampling, cache_salt=salt)
        key = RequestKey(0, number, 0)
        self.scheduler.add(key, request, now_s=0.0)
        return key

    def plan(self, now_s: float = 0.0) -> StepBatch | None:
        batch = self.scheduler.plan(now_s)
        self.events += self.scheduler.take_events()
        self.scheduler.check_integrity()
        return batch

    def complete(self, batch: StepBatch) -> None:
        sampled = [SampledToken(1, None) if row.sample else None for row in batch.rows]
        self.scheduler.complete(StepOutput(step_id=batch.step_id, sampled=sampled, duration_s=0.0), 0.0)

    def num_cached(self, key: RequestKey) -> int:
        [event] = [
            event
            for event in self.events
            if isinstance(event, RequestEvent) and event.key == key and event.kind is RequestEventKind.STARTED
        ]
        return event.num_cached_tokens

    def restored(self, num_blocks: int, seconds: float) -> None:
        """The last restore ends."""
        number = len(self.tier.asked) - 1
        self.tier.ends[number] = num_blocks, seconds
        self.scheduler.restored(number)

    def run(self) -> None:
        while (batch := self.plan()) is not None:
            self.complete(batch)


def test_a_prompt_waits_for_its_blocks_while_others_are_computed() -> None:
    worker = Worker()
    key, other = worker.add(), worker.add(tuple(range(50, 57)))
    batch = worker.plan()
    assert batch is not None
    assert [row.tokens for row in batch.rows] == [[*range(50, 57)]]
    [(hashes, _)] = worker.tier.asked
    assert hashes == block_hashes(PROMPT, BLOCK_SIZE)[:2]
    load = worker.scheduler.load()
    assert (load.num_waiting, load.num_waiting_tokens, load.num_blocks_referenced) == (1, 4, 2 + 2)
    worker.complete(batch)
    assert worker.plan() is None
    worker.restored(2, 0.01)
    batch = worker.plan()
    assert batch is not None
    assert [(row.cached_length, row.tokens) for row in batch.rows] == [(8, [*PROMPT[8:]])]
    worker.complete(batch)
    assert (worker.num_cached(key), worker.num_cached(other)) == (8, 0)
    load = worker.scheduler.load()
    assert (load.num_restores, load.num_restored_tokens, load.num_restores_given_up) == (1, 8, 0)
    assert load.restore_saved_s == pytest.approx(8 * COMPUTE_S - 0.01)
    assert load.num_blocks_referenced == 0


def test_what_the_pool_has_is_kept_and_not_read() -> None:
    worker = Worker(num_blocks=6)
    worker.add(PROMPT[:5])
    worker.tier.hashes.clear()
    worker.run()
    worker.tier.hashes.update(block_hashes(PROMPT, BLOCK_SIZE))
    key = worker.add()
    assert worker.plan() is None
    [(hashes, _)] = worker.tier.asked
    assert hashes == block_hashes(PROMPT, BLOCK_SIZE)[1:2]
    worker.restored(1, 0.01)
    worker.run()
    assert worker.num_cached(key) == 8


def test_a_late_restore_is_given_up_with_what_it_got() -> None:
    worker = Worker()
    key = worker.add()
    assert worker.plan() is None
    assert worker.scheduler.next_deadline_s() == pytest.approx(8 * COMPUTE_S)
    worker.tier.ends[0] = 1, 0.1
    batch = worker.plan(now_s=8 * COMPUTE_S)
    assert batch is not None
    assert worker.num_cached(key) == 4
    worker.scheduler.restored(0)  # the thread's message comes later
    worker.complete(batch)
    load = worker.scheduler.load()
    assert (load.num_restores_given_up, load.num_blocks_referenced) == (1, 0)
    assert load.restore_saved_s == 0, "one block came in the time in which two are computed"


def test_a_slow_tier_is_not_asked_but_tried_now_and_then() -> None:
    worker = Worker()
    worker.add()
    worker.plan()
    worker.restored(0, 9.0)
    worker.run()
    worker.pool.forget(worker.pool.match_prefix(block_hashes(PROMPT, BLOCK_SIZE)))
    for _ in range(TRY_EVERY - 1):
        worker.add()
        worker.run()
        worker.pool.forget(worker.pool.match_prefix(block_hashes(PROMPT, BLOCK_SIZE)))
    assert len(worker.tier.asked) == 1
    worker.add()
    worker.plan()
    assert len(worker.tier.asked) == 2


def test_a_prompt_that_is_cancelled_leaves_no_block() -> None:
    worker = Worker()
    key = worker.add()
    worker.plan()
    worker.scheduler.cancel(key, 0.0)
    assert worker.plan() is None
    load = worker.scheduler.load()
    assert (load.num_waiting, load.num_blocks_referenced) == (0, 0)
    worker.scheduler.restored(0)
    assert worker.plan() is None


def test_another_tenants_blocks_are_not_found() -> None:
    worker = Worker()
    key = worker.add(salt=b"tenant")
    worker.run()
    assert not worker.tier.asked
    assert worker.num_cached(key) == 0


def test_nothing_is_restored_into_blocks_that_others_will_need() -> None:
    worker = Worker(num_blocks=20)
    worker.add(tuple(range(100, 110)), max_tokens=50)  # expects 15 blocks
    batch = worker.plan()
    assert batch is not None
    worker.complete(batch)
    worker.add(max_tokens=30)
    worker.plan()
    assert not worker.tier.asked
