"""Retries after errors, and work that waited for workers, under a virtual clock."""

from __future__ import annotations

import pytest

from pdserve.contracts.events import RequestEvent, RequestEventKind, RequestKey, TokenEvent
from pdserve.contracts.request import FinishReason, GenerationRequest, KvSource, Outcome, SamplingParams
from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.requests.attempt import Attempt, Parked, Queued
from pdserve.router.requests.request import RequestSpec
from pdserve.router.requests.retries import BUDGET, MAX_BACKOFF_S, MIN_BACKOFF_S, MIN_RETRIES, Retries, backoff_s
from pdserve.router.requests.settings import DispatchSettings
from tests.router.requests.test_dispatch_core import Clock, DrainedDispatcher, ReadRequest, RecordingWorker
from tests.router.rig import COST

TICK_S = 0.1


class Pool:
    """Mixed workers, whose requests a test fails or finishes."""

    def __init__(self, *names: str) -> None:
        self.clock = Clock()
        self.clock.now_s = 1.0
        settings = DispatchSettings(policy="least-loaded", max_in_flight=1000)
        self.dispatcher = DrainedDispatcher(dict.fromkeys(WorkerRole, COST), settings, lambda: self.clock.now_s)
        self.workers = [self.add(name) for name in names]

    def add(self, name: str) -> RecordingWorker:
        worker = RecordingWorker(name, WorkerRole.MIXED)
        self.dispatcher.worker_up(worker)
        return worker

    def start(self, num_tokens: int = 5) -> ReadRequest:
        prompt = tuple(range(1, num_tokens + 1))
        sampling = SamplingParams(max_tokens=1)
        request = ReadRequest(RequestSpec(prompt_tokens=prompt, sampling=sampling, arrived_s=self.clock.now_s))
        self.dispatcher.start(request)
        return request

    def wait(self, seconds: float = TICK_S) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.clock.now_s += TICK_S
            self.dispatcher.sweep()

    def take(self, worker: RecordingWorker) -> list[GenerationRequest]:
        """What the worker got, and starts with."""
        taken, worker.submitted = worker.submitted, []
        for request in taken:
            self._send(worker, request, RequestEventKind.STARTED)
        return taken

    def fail(self, worker: RecordingWorker) -> int:
        """Fail all that the worker has; returns the number of requests."""
        taken = self.take(worker)
        for request in taken:
            self._send(worker, request, RequestEventKind.FAILED)
        return len(taken)

    def answer(self, worker: RecordingWorker) -> int:
        taken = self.take(worker)
        for request in taken:
            key = RequestKey(0, request.request_id, request.attempt)
            self.dispatcher.tokens_received(worker, [TokenEvent(key, 0, 0, 7, None, FinishReason.LENGTH)])
        return len(taken)

    def _send(self, worker: RecordingWorker, request: GenerationRequest, kind: RequestEventKind) -> None:
        key = RequestKey(0, request.request_id, request.attempt)
        self.dispatcher.event_received(worker, RequestEvent(key, kind))


@pytest.mark.parametrize("num_requests", [10, 100])
def test_few_retries_run_at_once(num_requests: int) -> None:
    pool = Pool("mixed-0")
    requests = [pool.start() for _ in range(num_requests)]
    [worker] = pool.workers
    assert pool.fail(worker) == num_requests
    num_retries = []
    while pool.dispatcher.num_in_flight:
        budget = max(MIN_RETRIES, BUDGET * pool.dispatcher.num_in_flight)
        assert not worker.submitted, "no retry at once"
        pool.wait()
        num_retries.append(len(worker.submitted))
        assert 0 < num_retries[-1] < budget + 1
        pool.wait(1.0)
        assert len(worker.submitted) == num_retries[-1], "no more while these have no token"
        pool.answer(worker)
    assert sum(num_retries) == num_requests
    assert {request.outcome for request in requests} == {Outcome.FINISHED}


def test_what_a_lost_worker_held_goes_on_at_once() -> None:
    pool = Pool("mixed-0", "mixed-1")
    for _ in range(40):
        pool.start()
    lost, other = pool.workers
    num_held = len(pool.take(lost))
    pool.answer(other)
    pool.dispatcher.worker_lost(lost)
    assert 0 < num_held == len(other.submitted)


def test_waits_between_errors_double_and_spread() -> None:
    assert [backoff_s(number, 0.5) for number in range(1, 5)] == [MIN_BACKOFF_S * 2**power for power in range(4)]
    assert backoff_s(5000, 0.5) == MAX_BACKOFF_S
    assert backoff_s(1, 0.0) == 0.75 * MIN_BACKOFF_S
    assert backoff_s(1, 0.999) < 1.25 * MIN_BACKOFF_S


def test_a_worker_that_fails_everything_is_left_alone_and_tried_now_and_then() -> None:
    pool = Pool("mixed-0", "mixed-1")
    broken, sound = pool.workers
    num_failed, requests = 0, []
    for _ in range(50):
        requests += [pool.start(), pool.start()]
        num_failed += pool.fail(broken)
        pool.answer(sound)
        pool.wait()
    assert num_failed == 3, "one, and two at once; an idle worker draws requests"
    pool.wait(10.0)
    requests += [pool.start() for _ in range(20)]
    assert len(broken.submitted) == 1, "one at a time"
    pool.fail(broken)
    pool.answer(sound)
    pool.wait(10.0)
    requests += [pool.start() for _ in range(2)]
    assert pool.answer(broken) == 1
    requests += [pool.start() for _ in range(20)]
    assert len(broken.submitted) > 1, "it is sound again"
    for _ in range(5):
        pool.answer(broken)
        pool.answer(sound)
        pool.wait(1.0)
    assert {request.outcome for request in requests} == {Outcome.FINISHED}


def test_a_worker_is_not_blamed_for_what_it_gives_up_as_late() -> None:
    pool = Pool("mixed-0", "mixed-1")
    late = [pool.start() for _ in range(8)]
    pool.clock.now_s += DispatchSettings().max_silence_s  # and no sweep, which would come first
    assert pool.fail(pool.workers[0]) == 4
    assert [request.error.status for request in late if request.error is not None] == [504] * 4
    pool.start()
    assert pool.workers[0].submitted


def test_what_a_lost_worker_failed_is_forgotten() -> None:
    pool = Pool("mixed-0")
    for _ in range(2):
        pool.start()
    [worker] = pool.workers
    pool.fail(worker)
    retries = pool.dispatcher._failover._retries
    assert list(retries._failed) == [worker]
    pool.dispatcher.worker_lost(worker)
    assert not retries._failed
    assert not retries._avoid, "nor does it hold the worker"


def test_the_only_worker_gets_requests_whatever_it_failed() -> None:
    pool = Pool("mixed-0")
    [worker] = pool.workers
    failed = [pool.start() for _ in range(2)]
    pool.fail(worker)
    pool.wait()
    pool.fail(worker)
    assert {request.outcome for request in failed} == {Outcome.FAILED}
    request = pool.start()
    pool.answer(worker)
    assert request.outcome is Outcome.FINISHED


def test_queued_requests_are_divided_among_the_workers_that_come_up() -> None:
    pool = Pool()
    requests = [pool.start(num_tokens=64) for _ in range(40)]
    first = pool.add("mixed-0")
    assert len(first.submitted) == 8, "what two steps compute"
    pool.wait()
    assert len(first.submitted) == 8
    second = pool.add("mixed-1")
    assert len(second.submitted) == 8
    num_first = num_second = 0
    while pool.dispatcher.num_in_flight:
        num_first += pool.answer(first)
        num_second += pool.answer(second)
        pool.wait()
    assert (num_first, num_second) == (20, 20)
    assert {request.outcome for request in requests} == {Outcome.FINISHED}


def test_a_queued_request_does_not_wait_for_room_for_ever() -> None:
    pool = Pool()
    requests = [pool.start(num_tokens=64) for _ in range(40)]
    worker = pool.add("mixed-0")
    pool.wait(DispatchSettings().new_wait_s + TICK_S)
    assert len(worker.submitted) == 40
    pool.answer(worker)
    assert {request.outcome for request in requests} == {Outcome.FINISHED}


def test_a_retry_does_not_wait_for_room_that_new_requests_take() -> None:
    pool = Pool("mixed-0")
    [worker] = pool.workers
    pool.start()
    pool.fail(worker)
    new = [pool.start(num_tokens=64) for _ in range(8)]
    pool.wait(MAX_BACKOFF_S)
    assert len(worker.submitted) == len(new) + 1


def test_what_a_lost_worker_held_does_not_wait_for_room_for_long() -> None:
    pool = Pool("mixed-0")
    [lost] = pool.workers
    requests = [pool.start(num_tokens=64) for _ in range(40)]
    pool.dispatcher.worker_lost(lost)
    pool.wait(1.0)
    worker = pool.add("mixed-1")
    assert len(worker.submitted) == 8
    pool.wait(DispatchSettings().new_wait_s)
    assert len(worker.submitted) == len(requests)


def test_a_failed_pull_is_remembered_for_its_pair_alone_and_forgotten_in_time() -> None:
    prefill, other = (RecordingWorker(f"prefill-{number}", WorkerRole.PREFILL) for number in range(2))
    decodes = [RecordingWorker(f"decode-{number}", WorkerRole.DECODE) for number in range(2)]
    request = ReadRequest(RequestSpec(prompt_tokens=(1,), sampling=SamplingParams(), arrived_s=0.0))
    attempt, sent = Attempt(request, 0, 1, Queued(0.0)), GenerationRequest(request_id=1, prompt_tokens=(1,))
    source = KvSource(address="", worker_epoch=0, handle=bytes(16))
    retries = Retries(cut_off_s=10.0)
    retries.pull_failed(prefill, decodes[0], 0.0)
    assert retries.avoided(attempt, decodes, 1.0) == set(), "it is parked nowhere"
    attempt.state = Parked(other, sent, source, 0.0)
    assert retries.avoided(attempt, decodes, 1.0) == set()
    attempt.state = Parked(prefill, sent, source, 0.0)
    assert retries.avoided(attempt, decodes, 9.9) == {decodes[0]}
    assert retries.avoided(attempt, decodes, 10.0) == set()
    assert not retries._avoid, "nor does it hold the workers"
