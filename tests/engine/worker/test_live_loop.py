"""Live driver of the step loop, over a scheduler and an executor that record their calls."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import TypeGuard

import pytest
import torch

from pdserve.contracts.events import (
    ClientEvent,
    RefusalCode,
    RequestEvent,
    RequestEventKind,
    RequestKey,
    SchedulerLoad,
    TokenEvent,
)
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import FinishReason, GenerationRequest, KvSource, SamplingParams
from pdserve.contracts.step import ModelLimits, SampledToken, StepBatch, StepHandle, StepOutput, StepRow
from pdserve.engine.scheduling.interface import (
    AbortPullEvent,
    Event,
    FirstToken,
    GrantEvent,
    OfferEvent,
    PullResult,
    StartPullEvent,
    WithdrawEvent,
)
from pdserve.engine.worker import live_loop
from pdserve.engine.worker.live_loop import Inbox, LiveLoop
from pdserve.engine.worker.loop import MAX_FAILED_STEPS_IN_A_ROW, StepReport
from pdserve.engine.worker.messages import AddRequest, CancelRequest, SessionEnded, StartDrain
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.engine.worker.step_times import StepTimes
from pdserve.engine.worker.transfer_messages import message_from_proto
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware
from pdserve.proto.v1 import kv_pb2, transfer_pb2, worker_pb2
from tests.patience import HANG_S
from tests.workers import wait_until

LIMITS = ModelLimits(max_model_len=256, vocab_size=512)
SHAPE = ModelShape(
    num_layers=1, hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8, vocab_size=512
)
COST = CostModel(SHAPE, hardware("cpu"), Precision(dtype="float32"))
SOURCE = KvSource(address="127.0.0.1:5", worker_epoch=3, handle=bytes(16))


class CountingScheduler(Scheduler):
    """Runs every request for ``max_tokens`` steps, all in one batch, and records its calls."""

    def __init__(self) -> None:
        self.left: dict[RequestKey, int] = {}
        self.planned: deque[list[RequestKey]] = deque()
        self.calls: list[object] = []
        self.events: list[Event] = []
        self.added_s = 0.0
        self.max_planned = 0
        self.num_failed = 0
        self.one_at_a_time = False
        """Each request starts only when the previous one is complete, as if it waited for blocks."""
        self.deadline_s = inf
        self._step_id = 0

    def add(self, key: RequestKey, request: GenerationRequest, now_s: float) -> None:
        self.left[key] = request.sampling.max_tokens
        self.added_s = now_s
        self.events.append(RequestEvent(key=key, kind=RequestEventKind.STARTED))

    def prepare(self, key: RequestKey, request: GenerationRequest, source: KvSource, now_s: float) -> None:
        self.calls.append((key, source, now_s))

    def cancel(self, key: RequestKey, now_s: float) -> None:
        if self.left.pop(key, None) is not None:
            self.events.append(RequestEvent(key=key, kind=RequestEventKind.CANCELLED))

    def plan(self, now_s: float) -> StepBatch | None:
        coming = [key for keys in self.planned for key in keys]
        candidates = list(self.left)[:1] if self.one_at_a_time else list(self.left)
        keys = [key for key in candidates if coming.count(key) < self.left[key]]
        if not keys:
            return None
        self.planned.append(keys)
        self.max_planned = max(self.max_planned, len(self.planned))
        self._step_id += 1
        row = StepRow(sequence_id=0, tokens=[1], cached_length=0, block_table=[0], sample=SamplingParams())
        return StepBatch(step_id=self._step_id, rows=[row] * len(keys))

    def complete(self, output: StepOutput, now_s: float) -> None:
        for key, sampled in zip(self.planned.popleft(), output.sampled, strict=True):
            if key not in self.left or sampled is None:
                continue
            self.left[key] -= 1
            finish = FinishReason.NONE if self.left[key] else FinishReason.LENGTH
            self.events.append(TokenEvent(key, 0, output.step_id, sampled.token, None, finish))
            if not self.left[key]:
                del self.left[key]

    def fail_step(self, step_id: int, message: str, now_s: float) -> None:
        self.num_failed += 1
        for key in self.planned.popleft():
            if self.left.pop(key, None) is not None:
                self.events.append(RequestEvent(key=key, kind=RequestEventKind.FAILED, message=message))

    def pull_done(self, result: PullResult, now_s: float) -> None:
        self.calls.append(result)

    def set_leased(self, handle: bytes, is_leased: bool) -> None:
        self.calls.append(("opened" if is_leased else "lost", handle))

    def released(self, handle: bytes) -> None:
        self.calls.append(("released", handle))

    def next_deadline_s(self) -> float:
        return self.deadline_s

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def load(self) -> SchedulerLoad:
        return SchedulerLoad(num_running=len(self.left))


class FakeExecutor:
    """Answers each row with the number of steps submitted so far. Can be made to fail or to hold its results."""

    def __init__(self, pipeline_depth: int = 1) -> None:
        self.pipeline_depth = pipeline_depth
        self.num_submitted = 0
        self.max_waiting = 0
        self.fail_submit: set[int] = set()
        self.fail_result: set[int] = set()
        self.error: type[RuntimeError] = RuntimeError
        self.may_finish = threading.Event()
        self.may_finish.set()
        self._num_taken = 0

    def submit(self, batch: StepBatch) -> StepHandle:
        self.num_submitted += 1
        if batch.step_id in self.fail_submit:
            raise RuntimeError(f"no memory for step {batch.step_id}")
        self.max_waiting = max(self.max_waiting, self.num_submitted - self._num_taken)
        sampled: list[SampledToken | None] = [SampledToken(self.num_submitted, None) for _ in batch.rows]
        return FakeHandle(self, StepOutput(step_id=batch.step_id, sampled=sampled, duration_s=0.25))

    def take(self, output: StepOutput) -> StepOutput:
        assert self.may_finish.wait(HANG_S)
        self._num_taken += 1
        if output.step_id in self.fail_result:
            raise self.error(f"step {output.step_id} broke")
        return output

    def close(self) -> None:
        pass


class FakeHandle:
    def __init__(self, executor: FakeExecutor, output: StepOutput) -> None:
        self._executor = executor
        self._output = output

    def result(self) -> StepOutput:
        return self._executor.take(self._output)


class Rig:
    """A loop with its collaborators. Doubles as the sink."""

    def __init__(self, pipeline_depth: int = 1) -> None:
        self.scheduler = CountingScheduler()
        self.pool = BlockPool(8, 16)
        self.executor = FakeExecutor(pipeline_depth)
        self.inbox = Inbox()
        self.orders: list[transfer_pb2.EngineToTransfer] = []
        self.reports: list[StepReport] = []
        self.failure: RuntimeError | None = None
        self.loop = LiveLoop(
            scheduler=self.scheduler,
            pool=self.pool,
            executor=self.executor,
            inbox=self.inbox,
            sink=self,
            send_order=self.orders.append,
            times=StepTimes(COST),
            emulated_pull_s=lambda num_blocks: num_blocks * 0.5,
        )

    def publish(self, report: StepReport) -> None:
        self.reports.append(report)

    @property
    def tokens(self) -> list[tuple[RequestKey, int]]:
        return [(e.key, e.token) for report in self.reports for e in report.events if isinstance(e, TokenEvent)]

    @property
    def kinds(self) -> list[tuple[int, RequestEventKind]]:
        return [
            (e.key.request_id, e.kind) for report in self.reports for e in report.events if isinstance(e, RequestEvent)
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self.inbox.stop()
            thread.join(HANG_S)
            assert not thread.is_alive()

    def _run(self) -> None:
        try:
            self.loop.run()
        except RuntimeError as error:
            self.failure = error

    def add(self, request_id: int, max_tokens: int = 3, session: int = 1) -> RequestKey:
        key = RequestKey(session, request_id, 0)
        sampling = SamplingParams(max_tokens=max_tokens)
        request = GenerationRequest(request_id=request_id, prompt_tokens=(1,), sampling=sampling)
        self.inbox.put(AddRequest(key, request, time.monotonic()))
        return key


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_run_to_their_end_with_the_executor_s_depth_in_flight(depth: int) -> None:
    rig = Rig(depth)
    with rig.running():
        key = rig.add(1, max_tokens=5)
        wait_until(lambda: len(rig.tokens) == 5, "5 tokens")
    assert rig.tokens == [(key, step) for step in range(1, 6)]
    assert rig.scheduler.max_planned == rig.executor.max_waiting == depth
    steps = [report.step for report in rig.reports if report.step]
    assert [(report.step_s, report.step.num_new_tokens) for report in rig.reports if report.step] == [(0.25, 1)] * 5
    assert not any(step.prediction is None or step.prediction.has_prefill for step in steps)


def test_work_that_a_completed_step_makes_possible_starts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.engine.worker.live_loop.PULSE_S", 600.0)
    rig = Rig(2)
    rig.scheduler.one_at_a_time = True
    rig.executor.may_finish.clear()
    with rig.running():
        rig.add(1)
        later = rig.add(2)
        rig.executor.may_finish.set()
        wait_until(lambda: [key for key, _ in rig.tokens].count(later) == 3, "the second request's tokens")


def test_what_the_plan_decided_is_published_before_the_step_is_computed() -> None:
    rig = Rig()
    rig.executor.may_finish.clear()
    with rig.running():
        rig.add(1)
        wait_until(lambda: rig.kinds == [(1, RequestEventKind.STARTED)], "STARTED")
        assert not rig.tokens
        rig.executor.may_finish.set()


@pytest.mark.parametrize("where", ["fail_submit", "fail_result"])
def test_a_failed_step_costs_its_own_requests_only(where: str) -> None:
    rig = Rig(2)
    setattr(rig.executor, where, {2})
    with rig.running():
        rig.add(1, max_tokens=50)
        wait_until(lambda: (1, RequestEventKind.FAILED) in rig.kinds, "FAILED")
        later = rig.add(2, max_tokens=2)
        wait_until(lambda: [key for key, _ in rig.tokens].count(later) == 2, "the tokens of the second request")
    assert rig.failure is None


def test_an_executor_that_always_fails_ends_the_loop() -> None:
    rig = Rig()
    rig.executor.fail_result = set(range(100))
    with rig.running():
        for request_id in range(MAX_FAILED_STEPS_IN_A_ROW):
            assert rig.failure is None
            rig.add(request_id)
            wait_until(lambda: rig.scheduler.num_failed > request_id, "a failure")  # noqa: B023
        wait_until(lambda: rig.failure is not None, "the end of the loop")
    assert "in a row" in str(rig.failure)


def test_a_lost_gpu_ends_the_loop_at_once() -> None:
    rig = Rig()
    rig.executor.fail_result = {1}
    rig.executor.error = torch.AcceleratorError
    with rig.running():
        rig.add(1)
        wait_until(lambda: rig.failure is not None, "the end of the loop")
    assert rig.scheduler.num_failed == 0, "the request goes on elsewhere"


def test_the_death_of_a_part_ends_the_loop() -> None:
    rig = Rig()
    with rig.running():
        rig.inbox.stop("the transfer process died")
        wait_until(lambda: rig.failure is not None, "the end of the loop")
    assert "transfer process died" in str(rig.failure)


def test_the_end_of_a_session_cancels_its_requests_only() -> None:
    rig = Rig()
    rig.executor.may_finish.clear()
    with rig.running():
        rig.add(1, max_tokens=10**6, session=1)
        rig.add(2, max_tokens=10**6, session=2)
        rig.inbox.put(SessionEnded(1))
        rig.executor.may_finish.set()
        wait_until(lambda: (1, RequestEventKind.CANCELLED) in rig.kinds, "CANCELLED")
        assert (2, RequestEventKind.CANCELLED) not in rig.kinds
        rig.inbox.put(CancelRequest(RequestKey(2, 2, 0)))
        wait_until(lambda: (2, RequestEventKind.CANCELLED) in rig.kinds, "CANCELLED")


def test_a_second_request_under_the_same_key_is_rejected() -> None:
    rig = Rig()
    with rig.running():
        key = rig.add(1, max_tokens=10**6)
        rig.add(1)
        wait_until(lambda: (1, RequestEventKind.REJECTED) in rig.kinds, "REJECTED")
        rig.inbox.put(CancelRequest(key))
        wait_until(lambda: (1, RequestEventKind.CANCELLED) in rig.kinds, "CANCELLED")


def is_rejection(event: ClientEvent) -> TypeGuard[RequestEvent]:
    return isinstance(event, RequestEvent) and event.kind is RequestEventKind.REJECTED


def test_a_drain_refuses_new_work_and_waits_for_the_old() -> None:
    rig = Rig()
    with rig.running():
        key = rig.add(1, max_tokens=10**6)
        wait_until(lambda: bool(rig.tokens), "a token")
        rig.inbox.put(StartDrain())
        rig.add(2)
        wait_until(lambda: (2, RequestEventKind.REJECTED) in rig.kinds, "REJECTED")
        (refusal,) = [event.refusal for report in rig.reports for event in report.events if is_rejection(event)]
        assert refusal is RefusalCode.DRAINING
        assert rig.reports[-1].load.draining
        assert not rig.loop.drained.is_set()
        rig.inbox.put(CancelRequest(key))
        assert rig.loop.drained.wait(HANG_S)


def test_orders_reach_the_transfer_process_in_order() -> None:
    rig = Rig()
    rig.scheduler.events = [
        OfferEvent(b"h" * 16),
        GrantEvent(
            handle=b"h" * 16,
            first_index=2,
            block_ids=(7, 8),
            generations=(1, 2**63),
            num_tokens=60,
            first_token=FirstToken(9, FinishReason.STOP),
        ),
        WithdrawEvent(b"h" * 16),
        StartPullEvent(pull_id=4, source=SOURCE, num_cached_blocks=1, block_ids=(3, 5), num_tokens=40, deadline_s=2.0),
        AbortPullEvent(4),
    ]
    with rig.running():
        wait_until(lambda: len(rig.orders) == 5, "five orders")
    offer, grant, withdraw, start, abort = rig.orders
    assert offer.offer.handle == grant.grant.handle == withdraw.withdraw.handle == b"h" * 16
    assert list(grant.grant.grant.block_ids) == [7, 8]
    assert list(grant.grant.grant.generations) == [1, 2**63]
    assert grant.grant.grant.final
    assert grant.grant.grant.first_token == kv_pb2.FirstToken(token=9, finish=worker_pb2.FINISH_REASON_STOP)
    assert (start.start_pull.pull_id, list(start.start_pull.block_ids)) == (4, [3, 5])
    assert start.start_pull.min_duration_s == 1.0
    assert abort.abort_pull.pull_id == 4


def test_a_pull_that_never_ends_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_loop, "PULL_GRACE_S", 0.5)
    rig = Rig()
    rig.scheduler.events = [
        StartPullEvent(pull_id=number, source=SOURCE, num_cached_blocks=0, block_ids=(3,), num_tokens=9, deadline_s=0.0)
        for number in (1, 2)
    ]
    with rig.running():
        rig.inbox.put(PullResult(pull_id=1))
        wait_until(lambda: rig.failure is not None, "the failure")
    assert "did not end a pull" in str(rig.failure)

    rig = Rig()
    rig.scheduler.events = [
        StartPullEvent(pull_id=1, source=SOURCE, num_cached_blocks=0, block_ids=(3,), num_tokens=9, deadline_s=0.0)
    ]
    with rig.running():
        wait_until(lambda: len(rig.orders) == 1, "the order")
        rig.inbox.put(PullResult(pull_id=1))
        time.sleep(2 * 0.5)
    assert rig.failure is None


def test_words_of_the_transfer_process_reach_the_scheduler_and_the_routers() -> None:
    rig = Rig()
    done = transfer_pb2.PullDone(pull_id=4, num_tokens=40, transport="memfd", bytes=99, seconds=0.5)
    done.first_token.CopyFrom(kv_pb2.FirstToken(token=12, finish=worker_pb2.FINISH_REASON_LENGTH))
    beyond = transfer_pb2.PullDone(pull_id=5, first_token=kv_pb2.FirstToken(token=LIMITS.vocab_size))
    with rig.running():
        for said in (
            transfer_pb2.TransferToEngine(lease_opened=transfer_pb2.LeaseOpened(handle=b"a")),
            transfer_pb2.TransferToEngine(lease_lost=transfer_pb2.LeaseLost(handle=b"b")),
            transfer_pb2.TransferToEngine(released=transfer_pb2.Released(handle=b"c")),
            transfer_pb2.TransferToEngine(pull_done=done),
            transfer_pb2.TransferToEngine(pull_done=beyond),
            transfer_pb2.TransferToEngine(
                pull_done=transfer_pb2.PullDone(pull_id=6, failure_stage="copy", message="stale")
            ),
        ):
            rig.inbox.put(message_from_proto(said, LIMITS))
        wait_until(lambda: len(rig.scheduler.calls) == 6, "six calls")
    *leases, good, bad, failed = rig.scheduler.calls
    assert leases == [("opened", b"a"), ("lost", b"b"), ("released", b"c")]
    assert good == PullResult(
        pull_id=4,
        num_tokens=40,
        first_token=FirstToken(12, FinishReason.LENGTH),
        transport="memfd",
        seconds=0.5,
        num_bytes=99,
    )
    assert isinstance(bad, PullResult)
    assert "limits" in bad.failure
    assert failed == PullResult(pull_id=6, failure="copy: stale", failure_stage="copy")
    assert [pull for report in rig.reports for pull in report.pulls] == [good, bad, failed]


def test_requests_reach_the_scheduler_with_the_instant_of_their_receipt() -> None:
    rig = Rig()
    prepared, added = RequestKey(1, 1, 0), RequestKey(1, 2, 0)
    with rig.running():
        rig.inbox.put(AddRequest(prepared, GenerationRequest(request_id=1, prompt_tokens=(1,)), 3.0, SOURCE))
        wait_until(lambda: rig.scheduler.calls == [(prepared, SOURCE, 3.0)], "the call")
        rig.inbox.put(AddRequest(added, GenerationRequest(request_id=2, prompt_tokens=(1,)), 4.0))
        wait_until(lambda: rig.scheduler.added_s == 4.0, "the request")


def test_an_idle_loop_sleeps_and_a_hung_one_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    with rig.running():
        wait_until(lambda: bool(rig.reports), "the first turn")
        num_reports = len(rig.reports)
        time.sleep(0.3)
        assert len(rig.reports) - num_reports <= 2
        assert rig.loop.is_healthy()
        monkeypatch.setattr("pdserve.engine.worker.live_loop.STALL_LIMIT_S", 0.05)
        rig.executor.may_finish.clear()
        rig.add(1)
        wait_until(lambda: not rig.loop.is_healthy(), "a stall")
        rig.executor.may_finish.set()


def test_a_loop_whose_process_waits_for_a_core_is_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    waits_for_core = True
    monkeypatch.setattr("pdserve.engine.worker.live_loop.PULSE_S", 0.01)
    monkeypatch.setattr("pdserve.engine.worker.live_loop.STALL_LIMIT_S", 0.05)
    monkeypatch.setattr("pdserve.engine.worker.live_loop.num_computing", lambda: int(waits_for_core))
    monkeypatch.setattr("pdserve.engine.worker.live_loop.time.process_time", lambda: 0.0)
    with rig.running():
        rig.executor.may_finish.clear()
        rig.add(1)
        wait_until(lambda: rig.executor.num_submitted > 0, "the step")
        for _ in range(20):
            time.sleep(0.02)
            assert rig.loop.is_healthy()
        waits_for_core = False
        wait_until(lambda: not rig.loop.is_healthy(), "a stall")
        rig.executor.may_finish.set()


def test_a_thread_that_computes_is_seen() -> None:
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        wait_until(lambda: live_loop.num_computing() > 0, "the thread")
    finally:
        is_over.set()
        thread.join()
    wait_until(lambda: live_loop.num_computing() == 0, "no other thread")


def test_an_idle_loop_sleeps_until_the_next_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.engine.worker.live_loop.PULSE_S", 600.0)
    rig = Rig()
    deadline_s = rig.scheduler.deadline_s = time.monotonic() + 1.0
    with rig.running():
        wait_until(lambda: bool(rig.reports), "the first turn")
        asleep = len(rig.reports)
        wait_until(lambda: len(rig.reports) > asleep, "the turn at the deadline")
        assert time.monotonic() >= deadline_s


def test_changes_of_the_prefix_cache_are_reported_once() -> None:
    rig = Rig()
    (block,) = rig.pool.allocate(1)
    rig.pool.register([block], [b"hash"])
    with rig.running():
        wait_until(lambda: len(rig.reports) >= 2, "two turns")
    assert [report.cache.stored for report in rig.reports if report.cache.stored] == [[b"hash"]]


def test_the_log_names_failed_requests_as_the_router_does(caplog: pytest.LogCaptureFixture) -> None:
    kinds = (RequestEventKind.LAST_CHUNK, RequestEventKind.KV_UNAVAILABLE, RequestEventKind.FAILED)
    with caplog.at_level(logging.INFO):
        Rig().loop.publish(StepReport(events=[RequestEvent(RequestKey(1, 0xAF, 0), kind, kind.name) for kind in kinds]))
    assert caplog.messages == [f"request af, attempt 0: {kind.name}" for kind in kinds[1:]]
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]
