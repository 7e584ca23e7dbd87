"""The step loop: one thread that owns a worker's scheduler and its executor.

Each turn empties the inbox, plans a step, submits it, takes the result of the oldest step in flight, and hands the
scheduler's events on: tokens and request events to the sink (the gRPC service), orders to the transfer process. With an
executor of pipeline depth 2, step N + 1 is planned and submitted before the result of step N is taken. The loop sleeps
on the inbox when nothing can run. It never waits for a router.

A step that fails costs its own requests only; where the next one was submitted behind it, with rows of the same
sequences, it costs those of that one too. Anything else that goes wrong ends `StepLoop.run` with an exception, and
the owner ends the process with it: a worker without its loop must not look healthy.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import NamedTuple, Protocol

from pdserve.contracts.events import RefusalCode
from pdserve.contracts.step import Executor, ModelLimits, StepBatch, StepHandle, StepOutput
from pdserve.engine.inbox import (
    AddRequest,
    CancelRequest,
    Inbox,
    Message,
    PartDied,
    PrepareRequest,
    SessionEnded,
    StartDrain,
    StopLoop,
    TransferSaid,
)
from pdserve.engine.live_requests import LiveRequests, Refusal
from pdserve.engine.orders import TransferLink, order_to_proto, pull_result, transfer_report
from pdserve.engine.scheduler import (
    ClientEvent,
    PromptLogprobsEvent,
    RequestEvent,
    RequestEventKind,
    RequestKey,
    Scheduler,
    StartPullEvent,
    TokenEvent,
)
from pdserve.engine.step_times import Prediction, StepTimes
from pdserve.kv_transfer.block_pool import BlockPool, CacheEvents
from pdserve.proto.codec import load_to_proto
from pdserve.proto.v1 import transfer_pb2, worker_pb2

PULSE_S = 0.5
"""An idle loop turns at least this often, so that `StepLoop.is_healthy` means something."""

MIN_WAIT_S = 0.001
"""Shortest sleep of an idle loop: a deadline that is due but not yet expired must not make it spin."""

STALL_LIMIT_S = 60.0
STALL_FACTOR = 10.0
"""A turn that lasts longer than the limit and this many times its step's predicted time is a hang."""

MAX_FAILED_STEPS_IN_A_ROW = 16
"""After so many failures in a row the executor is beyond repair and the process ends."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one turn of the loop has to tell the routers."""

    load: worker_pb2.Load
    events: list[ClientEvent] = field(default_factory=list)
    transfers: list[worker_pb2.TransferReport] = field(default_factory=list)
    cache: CacheEvents = field(default_factory=lambda: CacheEvents([], []))

    @property
    def is_for_all(self) -> bool:
        """Whether every session hears of it, not only those that an event names."""
        return self.load.step_tokens > 0 or bool(self.transfers or self.cache.stored or self.cache.evicted)


class StepSink(Protocol):
    """Takes the reports of a loop, on the loop's thread; must return at once."""

    def publish(self, report: StepReport) -> None: ...


class _InFlight(NamedTuple):
    step_id: int
    num_new_tokens: int
    prediction: Prediction
    handle: StepHandle


class _FailedStep:
    """Stands in for the handle of a step whose submission raised, so that it fails in its turn."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def result(self) -> StepOutput:
        raise self._error


class StepLoop:
    """Runs one scheduler over one executor. Everything but `run` may be called from any thread."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pool: BlockPool,
        executor: Executor,
        inbox: Inbox,
        sink: StepSink,
        transfer: TransferLink,
        limits: ModelLimits,
        times: StepTimes,
        emulated_pull_s: Callable[[int], float] | None = None,
    ) -> None:
        """
        Args:
            pool: the scheduler's; read here for the changes of its prefix cache only.
            emulated_pull_s: seconds that pulling this many blocks lasts at least; ``None`` when nothing is emulated.
        """
        self._scheduler = scheduler
        self._pool = pool
        self._executor = executor
        self._inbox = inbox
        self._sink = sink
        self._transfer = transfer
        self._limits = limits
        self._times = times
        self._emulated_pull_s = emulated_pull_s
        self._live = LiveRequests()
        self._in_flight: deque[_InFlight] = deque()
        self._events: list[ClientEvent] = []
        self._transfers: list[worker_pb2.TransferReport] = []
        self._num_failed_in_a_row = 0
        self._draining = False
        self._stopping = False
        self._turned_s = time.monotonic()
        self._expected_s = 0.0
        self.drained = Event()
        """Set once a drain was asked for and nothing is left."""

    def is_healthy(self) -> bool:
        """Whether the loop turned lately."""
        return time.monotonic() - self._turned_s < STALL_LIMIT_S + STALL_FACTOR * self._expected_s

    def run(self) -> None:
        """Turn until a `StopLoop` message.

        Raises:
            RuntimeError: the transfer process or the service died, or the executor fails every step.
        """
        is_idle = True
        while not self._stopping:
            for message in self._inbox.take_all(self._wait_s() if is_idle else 0.0):
                self._handle(message)
            is_idle = not self._turn()
        while self._in_flight:
            self._complete_oldest()

    def _wait_s(self) -> float:
        deadline_s = self._scheduler.next_deadline_s()
        if deadline_s is None:
            return PULSE_S
        return min(max(deadline_s - time.monotonic(), MIN_WAIT_S), PULSE_S)

    def _turn(self) -> bool:
        """Plan, submit, complete, publish once; returns whether the next turn may have something to do."""
        self._turned_s = time.monotonic()
        batch = self._scheduler.plan(self._turned_s)
        self._collect_events()
        if batch is not None:
            # Before the step is computed: a pull or a handoff that the plan decided on must not wait for it.
            if self._events:
                self._publish(worker_pb2.Load())
            self._submit(batch)
        step = worker_pb2.Load()
        has_step = bool(self._in_flight)
        if has_step and (batch is None or len(self._in_flight) >= self._executor.pipeline_depth):
            step = self._complete_oldest()
            self._collect_events()
        self._publish(step)
        if self._draining and not self._in_flight and not self._live:
            self.drained.set()
        return has_step  # a completed step may have made room for the next one

    def _submit(self, batch: StepBatch) -> None:
        prediction = self._times.predict(batch)
        self._expected_s = self._times.corrected_s(prediction)
        handle: StepHandle
        try:
            handle = self._executor.submit(batch)
        except RuntimeError as error:
            handle = _FailedStep(error)
        self._in_flight.append(_InFlight(batch.step_id, batch.num_new_tokens, prediction, handle))

    def _complete_oldest(self) -> worker_pb2.Load:
        """Take the oldest step's result; returns the part of a load message that speaks of the step."""
        step = self._in_flight.popleft()
        try:
            output = step.handle.result()
        except RuntimeError as error:
            self._fail(step, error)
            return worker_pb2.Load()
        self._num_failed_in_a_row = 0
        self._scheduler.complete(output, time.monotonic())
        self._times.observe(step.prediction, output.duration_s)
        return worker_pb2.Load(
            step_s=output.duration_s,
            step_tokens=step.num_new_tokens,
            predicted_step_s=step.prediction.predicted_s,
            step_has_prefill=step.prediction.has_prefill,
        )

    def _fail(self, step: _InFlight, error: RuntimeError) -> None:
        _log.error("step %d failed: %s", step.step_id, error)
        self._scheduler.fail_step(step.step_id, str(error), time.monotonic())
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row >= MAX_FAILED_STEPS_IN_A_ROW:
            raise RuntimeError(f"{self._num_failed_in_a_row} steps failed in a row, the last with: {error}") from error

    def _collect_events(self) -> None:
        """Send the scheduler's orders to the transfer process, and keep its other events for the next report."""
        for event in self._scheduler.take_events():
            if isinstance(event, TokenEvent):
                if event.ends_request:
                    self._live.discard(event.key)
                self._events.append(event)
            elif isinstance(event, RequestEvent):
                if event.kind.is_terminal:
                    self._live.discard(event.key)
                self._events.append(event)
            elif isinstance(event, PromptLogprobsEvent):
                self._events.append(event)
            else:
                min_duration_s = self._min_duration_s(event) if isinstance(event, StartPullEvent) else 0.0
                self._transfer.send(order_to_proto(event, min_duration_s))

    def _publish(self, load: worker_pb2.Load) -> None:
        """Report what was collected. ``load`` holds what is to be said of a step, if one was completed."""
        load.MergeFrom(load_to_proto(self._scheduler.load()))
        load.draining = self._draining
        self._times.add_to(load)
        cache = self._pool.take_cache_events()
        self._sink.publish(StepReport(load=load, events=self._events, transfers=self._transfers, cache=cache))
        self._events, self._transfers = [], []

    def _min_duration_s(self, event: StartPullEvent) -> float:
        return self._emulated_pull_s(len(event.block_ids)) if self._emulated_pull_s is not None else 0.0

    def _handle(self, message: Message) -> None:
        now_s = time.monotonic()
        match message:
            case AddRequest(key, request, received_s):
                if self._accept(key):
                    self._scheduler.add(key, request, received_s)
            case PrepareRequest(key, request, source, received_s):
                if self._accept(key):
                    self._scheduler.prepare(key, request, source, received_s)
            case CancelRequest(key, choices):
                self._scheduler.cancel(key, now_s, choices)
            case SessionEnded(session):
                for key in self._live.of_session(session):
                    self._scheduler.cancel(key, now_s)
            case TransferSaid(said):
                self._handle_transfer(said, now_s)
            case PartDied(part):
                raise RuntimeError(f"{part} died")
            case StartDrain():
                self._draining = True
            case StopLoop():
                self._stopping = True

    def _accept(self, key: RequestKey) -> bool:
        """Whether the request may go to the scheduler; a refusal is an event like any other."""
        refusal = Refusal(RefusalCode.DRAINING, "draining") if self._draining else self._live.refusal(key)
        if refusal is not None:
            self._events.append(
                RequestEvent(key=key, kind=RequestEventKind.REJECTED, message=refusal.message, refusal=refusal.code)
            )
            return False
        self._live.add(key)
        return True

    def _handle_transfer(self, said: transfer_pb2.TransferToEngine, now_s: float) -> None:
        match said.WhichOneof("body"):
            case "lease_opened":
                self._scheduler.lease_opened(said.lease_opened.handle, now_s)
            case "lease_lost":
                self._scheduler.lease_lost(said.lease_lost.handle, now_s)
            case "released":
                self._scheduler.released(said.released.handle, now_s)
            case "pull_done":
                self._transfers.append(transfer_report(said.pull_done))
                self._scheduler.pull_done(pull_result(said.pull_done, self._limits), now_s)
            case other:
                raise RuntimeError(f"the transfer process sent an unexpected {other!r}")
