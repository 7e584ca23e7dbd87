"""Live driver of a step loop: a thread with an inbox, real time, and the messages of the transfer process.

Sessions, the transfer process and the owner of the worker put messages into the `Inbox` from any thread. The driver
empties it at the top of each turn, sleeps on it while the loop is idle, waits for the executor, and sends orders to
the transfer process and everything else to the gRPC service. It never waits for a router.

Any exception except a failed step ends `LiveLoop.run`, and the owner then ends the process: a worker without its
loop must not look healthy.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition, Event
from typing import NamedTuple, Protocol

from pdserve.contracts.events import ClientEvent, SchedulerLoad
from pdserve.contracts.step import Executor, ModelLimits
from pdserve.engine.scheduling.interface import (
    AbortPullEvent,
    FirstToken,
    GrantEvent,
    OfferEvent,
    PullResult,
    Scheduler,
    StartPullEvent,
    TransferEvent,
    WithdrawEvent,
)
from pdserve.engine.worker.loop import (
    FinishedStep,
    LeaseLost,
    LeaseOpened,
    Message,
    PromptReleased,
    PullEnded,
    StepLoop,
    StepReport,
    StepTimes,
    TransferReport,
    Wait,
)
from pdserve.kv_transfer.block_pool import BlockPool, CacheEvents
from pdserve.proto.codec import WireError, finish_from_proto, finish_to_proto, source_to_proto
from pdserve.proto.v1 import kv_pb2
from pdserve.proto.v1.transfer_pb2 import (
    AbortPull,
    EngineToTransfer,
    Offer,
    OfferedGrant,
    PullDone,
    StartPull,
    TransferToEngine,
    Withdraw,
)

MAX_WAITING_MESSAGES = 8192
"""Messages waiting for the loop before new requests are refused."""

REFUSED = "refused"
"""Failure stage of a pull that the source refused."""

PULSE_S = 0.5
"""Longest interval between turns of an idle loop, which keeps `LiveLoop.is_healthy` meaningful."""

MIN_WAIT_S = 0.001
"""Shortest sleep of an idle loop. Without it, a deadline that is due but not yet expired would make the loop spin."""

STALL_LIMIT_S = 60.0
STALL_FACTOR = 10.0
"""A turn is a hang if it exceeds the limit plus this multiple of its step's predicted time."""

_log = logging.getLogger(__name__)


class PartDied(NamedTuple):
    """A component that the worker cannot run without has died."""

    part: str


class StopLoop(NamedTuple):
    """Leave the loop after the steps in flight."""


LiveMessage = Message | PartDied | StopLoop


class Inbox:
    """Thread-safe queue that the loop empties at once."""

    def __init__(self) -> None:
        self._messages: deque[LiveMessage] = deque()
        self._condition = Condition()

    @property
    def is_full(self) -> bool:
        """Whether to refuse new requests. All other messages are accepted, because they end work."""
        return len(self._messages) >= MAX_WAITING_MESSAGES

    def put(self, message: LiveMessage) -> None:
        with self._condition:
            self._messages.append(message)
            self._condition.notify()

    def take_all(self, timeout_s: float) -> list[LiveMessage]:
        """Return every waiting message in order; wait up to ``timeout_s`` for the first."""
        with self._condition:
            if not self._messages and timeout_s > 0:
                self._condition.wait(timeout_s)
            messages = list(self._messages)
            self._messages.clear()
        return messages


class TransferLink(Protocol):
    """The engine's end of the pipe to its transfer process."""

    @property
    def address(self) -> str:
        """``host:port`` where peers pull from."""
        ...

    def send(self, message: EngineToTransfer) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One turn of the loop, for the routers."""

    load: SchedulerLoad
    events: list[ClientEvent] = field(default_factory=list)
    transfers: list[TransferReport] = field(default_factory=list)
    step: FinishedStep | None = None
    cache: CacheEvents = field(default_factory=lambda: CacheEvents([], []))
    prefill_correction: float = 1.0
    decode_correction: float = 1.0
    is_draining: bool = False

    @property
    def is_for_all(self) -> bool:
        """Whether every session receives the report, not only sessions with an event in it."""
        return bool(self.step or self.transfers or self.cache.stored or self.cache.evicted)


class WorkerSink(Protocol):
    """Receives reports for the routers on the loop's thread. Must return at once."""

    def publish(self, report: WorkerReport) -> None: ...


class LiveLoop:
    """Drives one `StepLoop`. Any thread may call everything except `run`."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pool: BlockPool,
        executor: Executor,
        inbox: Inbox,
        sink: WorkerSink,
        transfer: TransferLink,
        times: StepTimes,
        emulated_pull_s: Callable[[int], float] | None = None,
    ) -> None:
        """
        Args:
        pool: the scheduler's pool, read only for changes of its prefix cache.
        emulated_pull_s: minimum duration of a pull of this many blocks, in seconds; ``None`` when nothing is
            emulated.
        """
        self._loop = StepLoop(scheduler=scheduler, executor=executor, sink=self, times=times)
        self._pool = pool
        self._inbox = inbox
        self._sink = sink
        self._transfer = transfer
        self._times = times
        self._emulated_pull_s = emulated_pull_s
        self._is_stopping = False
        self._turned_s = time.monotonic()
        self.drained = Event()
        """Set once a drain was requested and no work is left."""

    def is_healthy(self) -> bool:
        """Whether the loop turned recently."""
        return time.monotonic() - self._turned_s < STALL_LIMIT_S + STALL_FACTOR * self._loop.expected_step_s

    def run(self) -> None:
        """Turn until a `StopLoop` message.

        Raises:
            RuntimeError: the transfer process or the service died, or the executor fails every step.
        """
        wait = Wait.MESSAGE
        while not self._is_stopping:
            for message in self._inbox.take_all(self._idle_s() if wait is Wait.MESSAGE else 0.0):
                self._handle(message)
            self._turned_s = time.monotonic()
            wait = self._loop.turn(self._turned_s)
            if wait is Wait.STEP:
                self._take_oldest()
            if self._loop.is_drained:
                self.drained.set()
        while self._loop.num_in_flight:
            self._take_oldest()

    def publish(self, report: StepReport) -> None:
        """Send orders to the transfer process and everything else to the routers."""
        for order in report.orders:
            min_duration_s = 0.0
            if isinstance(order, StartPullEvent) and self._emulated_pull_s is not None:
                min_duration_s = self._emulated_pull_s(len(order.block_ids))
            self._transfer.send(order_to_proto(order, min_duration_s))
        self._sink.publish(
            WorkerReport(
                load=self._loop.scheduler.load(),
                events=report.events,
                transfers=report.transfers,
                step=report.step,
                cache=self._pool.take_cache_events(),
                prefill_correction=self._times.prefill_correction,
                decode_correction=self._times.decode_correction,
                is_draining=self._loop.is_draining,
            )
        )

    def _idle_s(self) -> float:
        deadline_s = self._loop.next_deadline_s()
        if deadline_s is None:
            return PULSE_S
        return min(max(deadline_s - time.monotonic(), MIN_WAIT_S), PULSE_S)

    def _handle(self, message: LiveMessage) -> None:
        if isinstance(message, PartDied):
            raise RuntimeError(f"{message.part} died")
        if isinstance(message, StopLoop):
            self._is_stopping = True
        else:
            self._loop.handle(message, time.monotonic())

    def _take_oldest(self) -> None:
        step = self._loop.oldest_step
        try:
            output = step.handle.result()
        except RuntimeError as error:
            _log.error("step %d failed: %s", step.step_id, error)
            self._loop.step_failed(error, time.monotonic())
        else:
            self._loop.step_ended(output, time.monotonic())


# Messages of the transfer process


def order_to_proto(order: TransferEvent, min_duration_s: float = 0.0) -> EngineToTransfer:
    """Convert an order. ``min_duration_s`` applies to a `StartPullEvent`: minimum duration of an emulated pull."""
    match order:
        case OfferEvent():
            return EngineToTransfer(offer=Offer(handle=order.handle))
        case GrantEvent():
            return EngineToTransfer(grant=OfferedGrant(handle=order.handle, grant=_grant_to_proto(order)))
        case WithdrawEvent():
            return EngineToTransfer(withdraw=Withdraw(handle=order.handle))
        case StartPullEvent():
            start_pull = StartPull(
                pull_id=order.pull_id,
                source=source_to_proto(order.source),
                num_cached_blocks=order.num_cached_blocks,
                block_ids=order.block_ids,
                deadline_s=order.deadline_s,
                min_duration_s=min_duration_s,
            )
            return EngineToTransfer(start_pull=start_pull)
        case AbortPullEvent():
            return EngineToTransfer(abort_pull=AbortPull(pull_id=order.pull_id))


def _grant_to_proto(event: GrantEvent) -> kv_pb2.Grant:
    grant = kv_pb2.Grant(
        first_index=event.first_index,
        block_ids=event.block_ids,
        generations=event.generations,
        final=event.final,
        num_tokens=event.num_tokens,
    )
    if event.first_token is not None:
        grant.first_token.token = event.first_token.token
        grant.first_token.finish = finish_to_proto(event.first_token.finish)
    return grant


def message_from_proto(message: TransferToEngine, limits: ModelLimits) -> Message:
    """Convert a message. Raises ValueError if an engine does not accept it."""
    match message.WhichOneof("body"):
        case "lease_opened":
            return LeaseOpened(message.lease_opened.handle)
        case "lease_lost":
            return LeaseLost(message.lease_lost.handle)
        case "released":
            return PromptReleased(message.released.handle)
        case "pull_done":
            done = message.pull_done
            report = TransferReport(done.transport, done.seconds, done.bytes, done.failure_stage)
            return PullEnded(_pull_result(done, limits), report)
        case other:
            raise ValueError(f"the transfer process sent an unexpected {other!r}")


def _pull_result(done: PullDone, limits: ModelLimits) -> PullResult:
    """Convert the end of a pull. Values from the peer are validated: an impossible token is a failure."""
    if done.failure_stage:
        failure = f"{done.failure_stage}: {done.message}"
        return PullResult(pull_id=done.pull_id, failure=failure, is_refused=done.failure_stage == REFUSED)
    if done.first_token.token >= limits.vocab_size or done.num_tokens > limits.max_model_len:
        return PullResult(pull_id=done.pull_id, failure="verify: the source's answer is outside the model's limits")
    try:
        finish = finish_from_proto(done.first_token.finish)
    except WireError as error:
        return PullResult(pull_id=done.pull_id, failure=f"verify: {error}")
    first_token = FirstToken(done.first_token.token, finish) if done.HasField("first_token") else None
    return PullResult(pull_id=done.pull_id, num_tokens=done.num_tokens, first_token=first_token)
