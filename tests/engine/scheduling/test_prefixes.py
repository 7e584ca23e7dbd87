"""Prefixes that are pulled from, and lent to, the prefix caches of other workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.contracts.block_hash import block_hashes
from pdserve.contracts.events import RequestEventKind
from pdserve.contracts.request import GenerationRequest, PrefixSource
from pdserve.engine.scheduling.interface import AbortPullEvent, GrantEvent, PullResult, StartPullEvent, WithdrawEvent
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.kv_transfer.block_pool import BlockPool
from tests.engine.worker.test_scheduler import (
    BLOCK_SIZE,
    a_request,
    a_scheduler,
    add,
    answer,
    key_of,
    kinds,
    only,
    step,
)

SOURCE = PrefixSource(address="there", worker_epoch=7, num_tokens=20, min_tokens=8, max_s=0.5)


def pulling(scheduler: Scheduler, request: GenerationRequest) -> StartPullEvent:
    add(scheduler, request)
    assert scheduler.plan(0.0) is None, "nothing is computed meanwhile"
    (pull,) = only(scheduler.take_events(), StartPullEvent)
    return pull


def a_prompt(request_id: int = 1, num_tokens: int = 30, source: PrefixSource = SOURCE) -> GenerationRequest:
    return replace(a_request(request_id, num_tokens), prefix_source=source)


def test_a_prompt_pulls_what_it_lacks_of_the_prefix_and_computes_the_rest() -> None:
    scheduler, request = a_scheduler(), replace(a_prompt(), cache_salt=b"a tenant")
    pull = pulling(scheduler, request)
    assert pull.source.address == "there"
    assert pull.source.worker_epoch == 7
    assert pull.prefix == tuple(block_hashes(request.prompt_tokens, BLOCK_SIZE, b"a tenant")[:5])
    assert pull.prefix != tuple(block_hashes(request.prompt_tokens, BLOCK_SIZE)[:5])
    assert len(pull.block_ids) == 5
    assert pull.deadline_s == 0.5
    assert scheduler.load().num_waiting == 1
    assert scheduler.load().num_waiting_tokens == 10
    scheduler.pull_done(PullResult(pull.pull_id, num_tokens=16), 0.0)
    (started,) = kinds(scheduler.take_events())
    assert started is RequestEventKind.STARTED
    (row,) = step(scheduler).rows
    assert row.cached_length == 16
    assert [*row.tokens] == [*request.prompt_tokens[16:]]
    assert {*block_hashes(request.prompt_tokens, BLOCK_SIZE, b"a tenant")[:4]} == {*scheduler.table.pool.known_hashes}
    scheduler.check_integrity()


def test_a_prefix_that_does_not_come_is_computed() -> None:
    scheduler, request = a_scheduler(), a_prompt()
    pull = pulling(scheduler, request)
    scheduler.pull_done(PullResult(pull.pull_id, failure="deadline: too slow", num_tokens=16), 0.5)
    assert kinds(scheduler.take_events()) == [RequestEventKind.STARTED]
    assert not scheduler.table.pool.known_hashes
    assert [*step(scheduler).rows[0].tokens] == [*request.prompt_tokens]


@pytest.mark.parametrize(
    "source",
    [
        replace(SOURCE, num_tokens=7),
        replace(SOURCE, num_tokens=3, min_tokens=0),
        replace(SOURCE, min_tokens=21),
    ],
)
def test_a_prefix_is_not_pulled_that_is_faster_to_compute(source: PrefixSource) -> None:
    scheduler = a_scheduler()
    add(scheduler, a_prompt(source=source))
    assert step(scheduler).num_new_tokens == 30


def test_blocks_that_came_into_the_cache_meanwhile_are_not_pulled() -> None:
    scheduler = a_scheduler()
    request = a_prompt()
    add(scheduler, replace(request, request_id=2, prompt_tokens=request.prompt_tokens[:16], prefix_source=None))
    answer(scheduler, step(scheduler))
    add(scheduler, request)
    assert [row.cached_length for row in step(scheduler).rows] == [16, 16], "four tokens take less time than a pull"


def test_others_are_computed_while_a_prefix_is_pulled() -> None:
    scheduler = a_scheduler()
    add(scheduler, a_prompt(), a_request(2, 10))
    batch = step(scheduler)
    assert batch.num_new_tokens == 10
    answer(scheduler, batch)
    (pull,) = only(scheduler.take_events(), StartPullEvent)
    scheduler.pull_done(PullResult(pull.pull_id, num_tokens=20), 0.0)
    assert step(scheduler).num_new_tokens == 1 + 10


@pytest.mark.parametrize("failure", ["", "aborted: the request has ended"])
def test_targets_of_a_cancelled_prompt_stay_reserved_until_its_pull_has_ended(failure: str) -> None:
    scheduler, request = a_scheduler(), a_prompt()
    pull = pulling(scheduler, request)
    scheduler.cancel(key_of(request), 0.0)
    assert only(scheduler.take_events(), AbortPullEvent) == [AbortPullEvent(pull.pull_id)]
    assert scheduler.table.pool.num_referenced == 8 + 1
    assert scheduler.load().num_waiting == 0
    scheduler.pull_done(PullResult(pull.pull_id, failure=failure, num_tokens=20), 0.0)
    assert scheduler.table.pool.num_free == scheduler.table.pool.num_blocks


def cached(scheduler: Scheduler, num_tokens: int = 16, request_id: int = 9) -> list[bytes]:
    """Hashes of blocks that `scheduler` caches."""
    request = a_request(request_id, num_tokens, max_tokens=1)
    request = replace(request, prompt_tokens=(request_id, *request.prompt_tokens[1:]))
    add(scheduler, request)
    answer(scheduler, step(scheduler))
    scheduler.take_events()
    assert scheduler.table.pool.num_referenced == 0
    return block_hashes(request.prompt_tokens, BLOCK_SIZE)


def test_cached_blocks_are_lent_until_the_pull_has_ended() -> None:
    scheduler = a_scheduler()
    hashes = cached(scheduler)
    scheduler.lend(b"loan", [*hashes, b"unknown"])
    scheduler.lend(b"other", hashes[1:3])
    scheduler.lend(b"none", [b"unknown", *hashes])
    first, second, none = only(scheduler.take_events(), GrantEvent)
    assert (first.handle, first.num_tokens, first.final) == (b"loan", 16, True)
    assert second.block_ids == first.block_ids[1:3]
    assert first.generations == scheduler.table.pool.generations(first.block_ids)
    assert (none.block_ids, none.num_tokens, none.final) == ((), 0, True)
    assert scheduler.table.pool.num_referenced == 4
    scheduler.released(b"loan")
    assert scheduler.table.pool.num_referenced == 2
    for handle in (b"other", b"none", b"loan"):
        scheduler.released(handle)
    assert scheduler.table.pool.num_referenced == 0
    assert len(scheduler.table.pool.known_hashes) == 4
    scheduler.check_integrity()


def test_what_was_lent_is_evicted_before_what_was_not_and_the_deepest_first() -> None:
    scheduler = a_scheduler(BlockPool(11, BLOCK_SIZE))
    older, lent = cached(scheduler, 20), cached(scheduler, 20, request_id=10)
    scheduler.lend(b"loan", lent)
    scheduler.released(b"loan")
    pool = scheduler.table.pool
    for num_left in (4, 3, 2, 1, 0):
        pool.allocate(pool.num_free + 1)
        assert (len(pool.match_prefix(lent)), len(pool.match_prefix(older))) == (num_left, 5)
    scheduler.check_integrity()


def test_what_was_taken_back_may_be_the_only_copy_and_is_evicted_as_any_other() -> None:
    scheduler = a_scheduler(BlockPool(11, BLOCK_SIZE))
    older, lent = cached(scheduler, 20), cached(scheduler, 20, request_id=10)
    scheduler.lend(b"loan", lent)
    assert scheduler.lending.withdraw()
    pool = scheduler.table.pool
    pool.allocate(pool.num_free + 1)
    assert (len(pool.match_prefix(lent)), len(pool.match_prefix(older))) == (5, 4)


def test_no_more_than_half_of_the_pool_is_on_loan() -> None:
    scheduler = a_scheduler(BlockPool(8, BLOCK_SIZE))
    hashes = cached(scheduler, 20)
    scheduler.lend(b"first", hashes[:3])
    scheduler.lend(b"second", hashes[3:])
    scheduler.lend(b"third", hashes[3:4])
    assert [len(grant.block_ids) for grant in only(scheduler.take_events(), GrantEvent)] == [3, 1, 0]


def test_lent_blocks_are_taken_back_before_an_answer_is_preempted() -> None:
    scheduler = a_scheduler(BlockPool(10, BLOCK_SIZE))
    hashes = cached(scheduler)
    request = a_request(1, 20, max_tokens=19)
    add(scheduler, request)
    batch = step(scheduler)
    scheduler.lend(b"loan", hashes)
    scheduler.take_events()
    while scheduler.running and not only(scheduler.take_events(), WithdrawEvent):
        answer(scheduler, batch)
        batch = step(scheduler)
    assert scheduler.running, "the answer grew beyond what was left"
    assert scheduler.load().num_preemptions == 0
    scheduler.released(b"loan")
    scheduler.check_integrity()


def test_a_prompt_does_not_wait_for_one_loan_after_the_other() -> None:
    scheduler = a_scheduler(BlockPool(8, BLOCK_SIZE))
    hashes = cached(scheduler)
    scheduler.lend(b"first", hashes[:2])
    add(scheduler, a_request(1, 25))
    assert scheduler.plan(0.0) is None, "seven blocks are needed, six are left"
    scheduler.lend(b"second", hashes[:2])
    scheduler.released(b"first")
    _, second = only(scheduler.take_events(), GrantEvent)
    assert not second.block_ids
    assert step(scheduler).num_new_tokens == 25
    scheduler.check_integrity()
