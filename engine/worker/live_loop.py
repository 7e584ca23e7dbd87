"""Live driver of a step loop: a thread with an inbox, real time, and the messages of the transfer process.

Sessions, the transfer process and the owner of the worker put messages into the `Inbox` from any thread. The driver
empties it at the top of each turn, sleeps on it while the loop is idle, waits for the executor, and sends orders to
the transfer process and everything else to the gRPC service. It never waits for a router.

Any exception except a failed step ends `LiveLoop.run`, and the owner then ends the process: a worker without its
loop must not look healthy.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Condition, Event, get_native_id
from typing import NamedTuple

from pdserve.contracts.events import RequestEvent, RequestEventKind
from pdserve.contracts.step import Executor
from pdserve.engine.scheduling.interface import PullResult, StartPullEvent
from pdserve.engine.worker.loop import GrammarSource, ReportSink, StepLoop, StepReport, Wait
from pdserve.engine.worker.messages import Message
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.engine.worker.step_times import StepTimes
from pdserve.engine.worker.transfer_messages import order_to_proto
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.kv_transfer.file_tier import FileTier
from pdserve.proto.v1.transfer_pb2 import EngineToTransfer

MAX_WAITING_MESSAGES = 8192
"""Messages waiting for the loop before new requests are refused."""

PULSE_S = 0.5
"""Longest interval between turns of an idle loop, which keeps `LiveLoop.is_healthy` meaningful."""

MIN_WAIT_S = 0.001
"""Shortest sleep of an idle loop. Without it, a deadline that is due but not yet expired would make the loop spin."""

STALL_LIMIT_S = 5.0
STALL_FACTOR = 10.0
"""A turn is a hang if it exceeds both the limit and this multiple of its step's predicted time, as
`LiveLoop.is_healthy` counts."""

PULL_GRACE_S = 10.0
"""Time after a pull's deadline in which the transfer process must have reported its end, copies to a GPU included."""

_log = logging.getLogger(__name__)

_LOG_LEVELS = {RequestEventKind.FAILED: logging.WARNING, RequestEventKind.KV_UNAVAILABLE: logging.INFO}


def stall_limit_s(predicted_s: float) -> float:
    """Seconds after which a turn with a step of ``predicted_s`` is a hang."""
    return max(STALL_LIMIT_S, STALL_FACTOR * predicted_s)


class _Look(NamedTuple):
    """What was seen when somebody asked whether the loop turns."""

    turned_s: float
    wall_s: float
    cpu_s: float
    """Of the process."""
    stalled_s: float = 0.0
    """Since the first look after the last turn."""


def num_computing() -> int:
    """Other threads of this process that run, or wait for a core."""
    own = get_native_id()
    return sum(_is_computing(int(task)) for task in os.listdir("/proc/self/task") if int(task) != own)


def _is_computing(task: int) -> bool:
    try:
        return Path(f"/proc/self/task/{task}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"R"
    except OSError:  # it has ended
        return False


class Inbox:
    """Thread-safe queue that the loop empties at once, and the request to stop it."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._condition = Condition()
        self._failure = ""
        self._is_stopped = False

    @property
    def is_full(self) -> bool:
        """Whether to refuse new requests. All other messages are accepted, because they end work."""
        return len(self._messages) >= MAX_WAITING_MESSAGES

    def put(self, message: Message) -> None:
        with self._condition:
            self._messages.append(message)
            self._condition.notify()

    def stop(self, failure: str = "") -> None:
        """End the loop after the steps in flight, or at once with an error if something it needs has failed."""
        with self._condition:
            self._is_stopped = True
            self._failure = self._failure or failure
            self._condition.notify()

    def take_all(self, timeout_s: float) -> list[Message] | None:
        """Return every waiting message in order; wait up to ``timeout_s`` for the first. ``None`` once stopped.

        Raises:
            RuntimeError: the failure that `stop` reported.
        """
        with self._condition:
            if not self._messages and not self._is_stopped and timeout_s > 0:
                self._condition.wait(timeout_s)
            if self._failure:
                raise RuntimeError(self._failure)
            if self._is_stopped:
                return None
            messages = list(self._messages)
            self._messages.clear()
        return messages


class LiveLoop:
    """Drives one `StepLoop`. Any thread may call everything except `run`."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pool: BlockPool,
        executor: Executor,
        inbox: Inbox,
        sink: ReportSink,
        send_order: Callable[[EngineToTransfer], None],
        times: StepTimes,
        grammars: GrammarSource | None = None,
        emulated_pull_s: Callable[[int], float] | None = None,
        tier: FileTier | None = None,
    ) -> None:
        """
        Args:
            pool: the scheduler's pool, read only for changes of its prefix cache.
            send_order: sends a message to the transfer process.
            emulated_pull_s: minimum duration of a pull of this many blocks, in seconds; ``None`` when nothing is
                emulated.
            tier: the one below the pool; ``None`` without.
        """
        self._loop = StepLoop(scheduler=scheduler, executor=executor, sink=self, grammars=grammars, times=times)
        self._pool = pool
        self._inbox = inbox
        self._sink = sink
        self._send_order = send_order
        self._times = times
        self._emulated_pull_s = emulated_pull_s
        self._tier = tier
        self._pulls: dict[int, StartPullEvent] = {}
        """Those that have not ended, by id."""
        self._pulls_due_s: dict[int, float] = {}
        """Latest instant at which the end of each running pull is known."""
        self._turned_s = time.monotonic()
        self._look = _Look(0.0, 0.0, 0.0)
        self.drained = Event()
        """Set once a drain was requested and no work is left."""

    def is_healthy(self) -> bool:
        """Whether the loop turned recently. While threads of the process compute, only the CPU time that each gets
        counts: little on a machine that is busy with other work, where a slow turn is no hang."""
        last, look = self._look, _Look(self._turned_s, time.monotonic(), time.process_time())
        if look.turned_s == last.turned_s and look.wall_s - look.turned_s > 2 * PULSE_S:
            passed_s, threads = look.wall_s - last.wall_s, num_computing()
            computed_s = (look.cpu_s - last.cpu_s) / threads if threads else passed_s
            look = look._replace(stalled_s=last.stalled_s + min(passed_s, computed_s))
        self._look = look
        return look.stalled_s < stall_limit_s(self._loop.expected_step_s)

    def run(self) -> None:
        """Turn until `Inbox.stop`.

        Raises:
            RuntimeError: `Inbox.stop` reported a failure, the executor fails every step or has lost its GPU, or the
                transfer process does not end a pull: it may still write to the blocks, so nobody else can have them.
        """
        wait = Wait.MESSAGE
        while (messages := self._inbox.take_all(self._idle_s() if wait is Wait.MESSAGE else 0.0)) is not None:
            for message in messages:
                if isinstance(message, PullResult):
                    self._pulls_due_s.pop(message.pull_id, None)
                self._loop.handle(message, time.monotonic())
            self._turned_s = time.monotonic()
            if self._pulls_due_s and min(self._pulls_due_s.values()) < self._turned_s:
                raise RuntimeError("the transfer process did not end a pull at its deadline")
            wait = self._loop.turn(self._turned_s)
            if wait is Wait.STEP:
                self._take_oldest()
            if self._loop.is_drained:
                self.drained.set()
        while self._loop.in_flight:
            self._take_oldest()

    def publish(self, report: StepReport) -> None:
        """Send orders to the transfer process and everything else to the routers."""
        for order in report.orders:
            min_duration_s = 0.0
            if isinstance(order, StartPullEvent):
                self._pulls[order.pull_id] = order
                self._pulls_due_s[order.pull_id] = time.monotonic() + order.deadline_s + PULL_GRACE_S
                if self._emulated_pull_s is not None:
                    min_duration_s = self._emulated_pull_s(len(order.block_ids))
            self._send_order(order_to_proto(order, min_duration_s))
        for event in report.events:
            if isinstance(event, RequestEvent) and (level := _LOG_LEVELS.get(event.kind)):
                # The router's log has the same number beside the client's id.
                _log.log(level, "request %x, attempt %d: %s", event.key.request_id, event.key.attempt, event.message)
        report.pulls = [self._described(pull) for pull in report.pulls]
        cache = self._pool.take_cache_events()
        report.cache = cache if self._tier is None else self._tier.follow(cache)
        report.load = self._loop.scheduler.load()._replace(
            prefill_correction=self._times.prefill.factor,
            decode_correction=self._times.decode.factor,
            draining=self._loop.is_draining,
        )
        self._sink.publish(report)

    def _described(self, result: PullResult) -> PullResult:
        """A result as the routers get it: with the tokens that were pulled, not those of the whole prompt."""
        order = self._pulls.pop(result.pull_id, None)
        if order is None:
            return result
        num_pulled = max(0, result.num_tokens - order.num_cached_blocks * self._pool.block_size)
        return result._replace(source=order.source.address, is_prefix=bool(order.prefix), num_tokens=num_pulled)

    def _idle_s(self) -> float:
        deadline_s = self._loop.scheduler.next_deadline_s()
        return min(max(deadline_s - time.monotonic(), MIN_WAIT_S), PULSE_S)

    def _take_oldest(self) -> None:
        step = self._loop.in_flight[0]
        try:
            output = step.handle.result()
        except RuntimeError as error:
            _log.error("step %d failed: %s", step.step_id, error)
            if type(error).__name__ == "AcceleratorError":  # torch's: no later call of this process succeeds
                raise
            self._loop.step_failed(error, time.monotonic())
        else:
            self._loop.step_ended(output, time.monotonic())
